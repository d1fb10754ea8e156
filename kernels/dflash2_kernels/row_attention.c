/* Causal attention of rows over paged fp32 keys and values; see row_attention.py. Every row is computed alone, over its own keys in
   blocks of 16 from its first visible key on: its bits depend on nothing else in the call. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#define LANES 16

/* Lane i of the result: sum of v[i]. */
static inline __m512 sums(__m512 v[16]) {
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

/* One row's query heads of one KV head: keys[i], values at keys[i] + apart, i < count; scores has room for groups * ceil16(count). */
static inline __attribute__((always_inline)) void
one_head(const int vectors, const float *query, long groups, const float *const *keys, long offset, long apart, long count,
         float scaling, float *scores, float *out) {
    const long width = vectors * LANES, room = (count + LANES - 1) / LANES * LANES;
    for (long first = 0; first < count; first += LANES) {
        for (long g = 0; g < groups; g++) {
            __m512 parts[16];
            for (int i = 0; i < 16; i++) {
                const float *key = keys[first + i < count ? first + i : first] + offset;
                parts[i] = _mm512_mul_ps(_mm512_loadu_ps(query + g * width), _mm512_loadu_ps(key));
                for (int c = 1; c < vectors; c++)
                    parts[i] = _mm512_fmadd_ps(_mm512_loadu_ps(query + g * width + c * LANES), _mm512_loadu_ps(key + c * LANES), parts[i]);
            }
            _mm512_storeu_ps(scores + g * room + first, _mm512_mul_ps(sums(parts), _mm512_set1_ps(scaling)));
        }
    }
    for (long g = 0; g < groups; g++) {
        float *own = scores + g * room;
        for (long i = count; i < room; i++) own[i] = -__builtin_inff();
        __m512 top = _mm512_loadu_ps(own), total = _mm512_setzero_ps();
        for (long i = LANES; i < room; i += LANES) top = _mm512_max_ps(top, _mm512_loadu_ps(own + i));
        const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
        for (long i = 0; i < room; i += LANES) {
            const __mmask16 seen = count - i >= LANES ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
            const __m512 weight = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(_mm512_loadu_ps(own + i), most)));
            _mm512_storeu_ps(own + i, weight);
            total = _mm512_add_ps(total, weight);
        }
        __m512 mixed[16];
        for (int c = 0; c < vectors; c++) mixed[c] = _mm512_setzero_ps();
        for (long i = 0; i < count; i++) {
            const float *value = keys[i] + offset + apart;
            const __m512 weight = _mm512_set1_ps(own[i]);
            for (int c = 0; c < vectors; c++) mixed[c] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(value + c * LANES), mixed[c]);
        }
        const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
        for (int c = 0; c < vectors; c++) _mm512_storeu_ps(out + g * width + c * LANES, _mm512_mul_ps(mixed[c], share));
    }
}

#define CASE(vectors)                                                                                              \
    case vectors:                                                                                                  \
        one_head(vectors, query, groups, keys, offset, apart, count, scaling, scores, out);                        \
        break;

static void any_head(int vectors, const float *query, long groups, const float *const *keys, long offset, long apart, long count,
                     float scaling, float *scores, float *out) {
    switch (vectors) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(16) }
}

/* spans [num_spans][4]: first row, rows, kv_len, where its pages begin in `pages`. window 0: none. 0, or -1 without memory. */
int row_attention(const float *query, long query_stride, const float *cache, float *out, const int32_t *spans, long num_spans,
                  const int32_t *pages, long page_size, long kv_heads, long groups, long head_dim, float scaling, long window) {
    const long row_size = 2 * kv_heads * head_dim;
    for (long s = 0; s < num_spans; s++) {
        const int32_t *span = spans + 4 * s;
        const long kv_len = span[2], base = kv_len - span[1];
        const float **keys = malloc(kv_len * sizeof *keys);
        float *scores = malloc(groups * (kv_len + LANES) * sizeof *scores);
        if (!keys || !scores) { free(keys); free(scores); return -1; }
        for (long position = 0; position < kv_len; position++)
            keys[position] = cache + ((long)pages[span[3] + position / page_size] * page_size + position % page_size) * row_size;
        for (long row = 0; row < span[1]; row++) {
            const long end = base + row + 1, low = window && end > window ? end - window : 0, at = span[0] + row;
            for (long head = 0; head < kv_heads; head++)
                any_head((int)(head_dim / LANES), query + at * query_stride + head * groups * head_dim, groups, keys + low,
                         head * head_dim, kv_heads * head_dim, end - low, scaling, scores,
                         out + (at * kv_heads + head) * groups * head_dim);
        }
        free(keys);
        free(scores);
    }
    return 0;
}
