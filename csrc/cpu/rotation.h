/* The rotation of one head, in place or on its way into the KV cache. */
#ifndef ZEROINFER_CPU_ROTATION_H
#define ZEROINFER_CPU_ROTATION_H

#include "elements.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

namespace zi {

inline bool is_sound(const zi_rotation &rotation, int64_t num_rows) {
    if (rotation.rotary_dim < 0 || rotation.rotary_dim % 2 != 0 ||
        !is_activation_dtype(rotation.table_dtype)) {
        return false;
    }
    const bool is_there = rotation.cos != nullptr && rotation.sin != nullptr;
    return is_there || num_rows == 0 || rotation.rotary_dim == 0;
}

/*
 * The pairs of one head, from x to out, which may be x, and their angles. Results are rounded to T
 * before they become K, as if they had been stored in place first.
 */
template <typename T, typename K, typename C>
struct Rotation {
    const T *x;
    K *out;
    const C *cos;
    const C *sin;
    int64_t num_pairs;
    bool is_interleaved;

    Rotation(const zi_rotation &r, int64_t row, const T *source, K *target)
        : x(source),
          out(target),
          cos(static_cast<const C *>(r.cos) + row * r.table_stride),
          sin(static_cast<const C *>(r.sin) + row * r.table_stride),
          num_pairs(r.rotary_dim / 2),
          is_interleaved(r.is_interleaved != 0) {}

    /* Pairs from `pair` on, one by one. */
    void rotate_rest(int64_t pair) const {
        for (; pair < num_pairs; ++pair) {
            const int64_t first = is_interleaved ? 2 * pair : pair;
            const int64_t second = is_interleaved ? first + 1 : pair + num_pairs;
            const float a = load_one(x + first);
            const float b = load_one(x + second);
            const float c = load_one(cos + pair);
            const float s = load_one(sin + pair);
            store_one(out + first, rounded<T>(a * c - b * s));
            store_one(out + second, rounded<T>(b * c + a * s));
        }
    }
};

#if defined(__x86_64__)

template <typename T, typename K, typename C>
ZI_AVX2 void rotate_halves(const Rotation<T, K, C> &r) {
    int64_t pair = 0;
    for (; pair + kLanes <= r.num_pairs; pair += kLanes) {
        const __m256 a = load8(r.x + pair);
        const __m256 b = load8(r.x + r.num_pairs + pair);
        const __m256 c = load8(r.cos + pair);
        const __m256 s = load8(r.sin + pair);
        const __m256 first = _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s));
        const __m256 second = _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s));
        store8(r.out + pair, rounded8<T>(first));
        store8(r.out + r.num_pairs + pair, rounded8<T>(second));
    }
    r.rotate_rest(pair);
}

/* Four pairs of neighbours; c and s hold the angle of each pair twice. */
ZI_AVX2 inline __m256 rotate_four(__m256 x, __m256 c, __m256 s) {
    return _mm256_fmaddsub_ps(x, c, _mm256_mul_ps(_mm256_permute_ps(x, 0xB1), s));
}

template <typename T, typename K, typename C>
ZI_AVX2 void rotate_neighbours(const Rotation<T, K, C> &r) {
    const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    int64_t pair = 0;
    for (; pair + kLanes <= r.num_pairs; pair += kLanes) {
        const __m256 c = load8(r.cos + pair);
        const __m256 s = load8(r.sin + pair);
        const __m256 first = rotate_four(load8(r.x + 2 * pair), _mm256_permutevar8x32_ps(c, low),
                                         _mm256_permutevar8x32_ps(s, low));
        const __m256 second =
            rotate_four(load8(r.x + 2 * pair + kLanes), _mm256_permutevar8x32_ps(c, high),
                        _mm256_permutevar8x32_ps(s, high));
        store8(r.out + 2 * pair, rounded8<T>(first));
        store8(r.out + 2 * pair + kLanes, rounded8<T>(second));
    }
    r.rotate_rest(pair);
}

template <typename T, typename K, typename C>
ZI_AVX2 void rotate(const Rotation<T, K, C> &r) {
    if (r.is_interleaved) {
        rotate_neighbours(r);
    } else {
        rotate_halves(r);
    }
}

#endif

}  // namespace zi

#endif
