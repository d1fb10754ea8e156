/* What lies between a decoder layer's products, one row at a time, fp32; see row_passes.py. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"

#define LANES 16
#define MOST_HEAD_DIM 256

static inline __mmask16 inside(long left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }

/* 1 / sqrt(mean of squares + eps) */
static inline float scale_of(const float *x, long width, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < width; i += LANES) {
        const __m512 part = _mm512_maskz_loadu_ps(inside(width - i), x + i);
        sum = _mm512_fmadd_ps(part, part, sum);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / width + eps);
}

/* y [rows, width] = x scaled to a root mean square of 1, times weight [width] if there is one */
void rms_norm(const float *x, const float *weight, float eps, float *y, long rows, long width) {
    for (long row = 0; row < rows; row++, x += width, y += width) {
        const __m512 scale = _mm512_set1_ps(scale_of(x, width, eps));
        for (long i = 0; i < width; i += LANES) {
            const __mmask16 mask = inside(width - i);
            __m512 part = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
            if (weight) part = _mm512_mul_ps(part, _mm512_maskz_loadu_ps(mask, weight + i));
            _mm512_mask_storeu_ps(y + i, mask, part);
        }
    }
}

/* out [rows, width] = silu(both[:, :width]) * both[:, width:] */
void silu_gate(const float *both, float *out, long rows, long width) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (long row = 0; row < rows; row++, both += 2 * width, out += width)
        for (long i = 0; i < width; i += LANES) {
            const __mmask16 mask = inside(width - i);
            const __m512 gate = _mm512_maskz_loadu_ps(mask, both + i), up = _mm512_maskz_loadu_ps(mask, both + width + i);
            const __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
            _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(_mm512_div_ps(gate, below), up));
        }
}

/* One head: normed if `norm` is given, then x * cos + (x rolled by half) * signed_sin */
static inline void rotate_head(const float *x, const float *norm, float eps, const float *cos, const float *sin, long dim, float *out) {
    float twice[2 * MOST_HEAD_DIM];
    const __m512 scale = _mm512_set1_ps(norm ? scale_of(x, dim, eps) : 1.0f);
    for (long i = 0; i < dim; i += LANES) {
        __m512 part = _mm512_loadu_ps(x + i);
        if (norm) part = _mm512_mul_ps(_mm512_mul_ps(part, scale), _mm512_loadu_ps(norm + i));
        _mm512_storeu_ps(twice + i, part);
        _mm512_storeu_ps(twice + dim + i, part);
    }
    for (long i = 0; i < dim; i += LANES) {
        const __m512 plain = _mm512_mul_ps(_mm512_loadu_ps(twice + i), _mm512_loadu_ps(cos + i));
        _mm512_storeu_ps(out + i, _mm512_fmadd_ps(_mm512_loadu_ps(twice + dim / 2 + i), _mm512_loadu_ps(sin + i), plain));
    }
}

/* qkv [rows, heads + 2 kv_heads, dim]: rotated queries into query [rows, heads, dim], rotated keys and the values into
   cache [num_slots, 2, kv_heads, dim] at the rows' slots. 0, or -1 at a slot outside. */
int rotate_and_store(const float *qkv, const float *norms, float eps, const float *cos, const float *sin, const int64_t *slots,
                     long num_slots, float *query, float *cache, long rows, long heads, long kv_heads, long dim) {
    for (long row = 0; row < rows; row++)
        if (slots[row] < 0 || slots[row] >= num_slots) return -1;
    for (long row = 0; row < rows; row++, cos += dim, sin += dim, query += heads * dim, qkv += (heads + 2 * kv_heads) * dim) {
        float *keys = cache + slots[row] * 2 * kv_heads * dim;
        for (long head = 0; head < heads + kv_heads; head++) {
            float *out = head < heads ? query + head * dim : keys + (head - heads) * dim;
            rotate_head(qkv + head * dim, norms ? norms + head * dim : 0, eps, cos, sin, dim, out);
        }
        memcpy(keys + kv_heads * dim, qkv + (heads + kv_heads) * dim, kv_heads * dim * sizeof *keys);
    }
    return 0;
}
