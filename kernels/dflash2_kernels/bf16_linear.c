/* y [T, N] = bf16(x [T, K]) · w' + bias for a few rows; see bf16_linear.py for the order of w. Every y[t][n] is one chain of
   dot products over k, whatever T is: a row's bits do not depend on its neighbours. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#define LANES 16
#define GROUP 4      /* vectors of outputs side by side */
#define TILE 6       /* rows: TILE * GROUP sums, GROUP weights and one input fit 32 registers */
#define CHUNK 96     /* rows that share one reading of a group */
#define AHEAD 4096   /* bytes of weights asked for in advance within a group */
#define LINE 32      /* values of a cache line */

static inline __attribute__((always_inline)) void
tile(const int rows, const int group, const int near, const int far, const uint32_t *x, long pairs, const uint16_t *w,
     const uint16_t *next, const float *bias, float *y, long stride, long left) {
    __m512 sums[TILE][GROUP];
    for (int t = 0; t < rows; t++)
        for (int g = 0; g < group; g++) sums[t][g] = _mm512_setzero_ps();
    for (long k = 0; k < pairs; k++, w += group * 2 * LANES, next += far * LINE) {
        __m512bh part[GROUP];
        for (int g = 0; g < group; g++) {
            part[g] = (__m512bh)_mm512_load_si512(w + g * 2 * LANES);
            if (near) _mm_prefetch((const char *)(w + g * 2 * LANES) + AHEAD, _MM_HINT_T0);
        }
        for (int line = 0; line < far; line++) _mm_prefetch((const char *)(next + line * LINE), _MM_HINT_T1);
        for (int t = 0; t < rows; t++) {
            const __m512bh value = (__m512bh)_mm512_set1_epi32((int)x[t * pairs + k]);
            for (int g = 0; g < group; g++) sums[t][g] = _mm512_dpbf16_ps(sums[t][g], value, part[g]);
        }
    }
    for (int g = 0; g < group; g++) {
        const long rest = left - g * LANES;
        const __mmask16 mask = rest >= LANES ? 0xffff : (__mmask16)((1u << rest) - 1);
        const __m512 more = bias ? _mm512_maskz_loadu_ps(mask, bias + g * LANES) : _mm512_setzero_ps();
        for (int t = 0; t < rows; t++)
            _mm512_mask_storeu_ps(y + t * stride + g * LANES, mask, bias ? _mm512_add_ps(sums[t][g], more) : sums[t][g]);
    }
}

#define RUN(rows, group, near, far) tile(rows, group, near, far, x, pairs, w, next, bias, y, stride, left)
#define CASE(rows, group)                                     \
    case 8 * rows + group:                                    \
        if (near) RUN(rows, group, 1, 0);                     \
        else if (far == 0) RUN(rows, group, 0, 0);            \
        else if (far == 1) RUN(rows, group, 0, 1);            \
        else RUN(rows, group, 0, 2);                          \
        break;
#define CASES(rows) CASE(rows, 1) CASE(rows, 2) CASE(rows, 3) CASE(rows, 4)

static void any_tile(int rows, int group, int near, int far, const uint32_t *x, long pairs, const uint16_t *w, const uint16_t *next,
                     const float *bias, float *y, long stride, long left) {
    switch (8 * rows + group) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
}

static void to_bf16(const float *x, long count, uint16_t *out, long room) {
    for (long k = 0; k < room; k += LANES) {
        const long rest = count - k, space = room - k;
        const __mmask16 mask = rest >= LANES ? 0xffff : rest > 0 ? (__mmask16)((1u << rest) - 1) : 0;
        const __mmask16 kept = space >= LANES ? 0xffff : (__mmask16)((1u << space) - 1);
        const __m256i values = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + k));
        _mm256_mask_storeu_epi16(out + k, kept, values);
    }
}

/* 0, or -1 without memory. */
int bf16_linear(const float *x, long T, const uint16_t *w, const float *bias, float *y, long N, long K) {
    const long pairs = (K + 1) / 2, vectors = (N + LANES - 1) / LANES;
    uint32_t *inputs = malloc((size_t)(T < CHUNK ? T : CHUNK) * pairs * sizeof *inputs);
    if (!inputs) return -1;
    for (long start = 0; start < T; start += CHUNK) {
        const long count = T - start < CHUNK ? T - start : CHUNK;
        for (long t = 0; t < count; t++) to_bf16(x + (start + t) * K, K, (uint16_t *)(inputs + t * pairs), 2 * pairs);
        /* Rows of one tile ask for weights just ahead. With more, a group comes into the second-level cache while the tiles before it
           compute: memory would wait for the later tiles of each group. */
        const int far = count <= TILE ? 0 : count <= 3 * TILE ? 2 : 1;
        for (long v = 0; v < vectors; v += GROUP) {
            const int group = vectors - v < GROUP ? (int)(vectors - v) : GROUP;
            const uint16_t *own = w + v * LANES * 2 * pairs, *next = own + group * LANES * 2 * pairs, *end = next + GROUP * LANES * 2 * pairs;
            for (long t = 0; t < count; t += TILE, next += far * pairs * LINE) {
                const int rows = count - t < TILE ? (int)(count - t) : TILE;
                const int near = t == 0 && (v == 0 || far == 0);
                any_tile(rows, group, near, next < end ? far : 0, inputs + t * pairs, pairs, own, next,
                         bias ? bias + v * LANES : 0, y + (start + t) * N + v * LANES, N, N - v * LANES);
            }
        }
    }
    free(inputs);
    return 0;
}
