#include "chunks.h"
#include "elements.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

namespace {

using zi::load_one;
using zi::store_one;

/* One head of one row, with the angles of its pairs. */
template <typename T, typename C>
struct Head {
    T *x;
    const C *cos;
    const C *sin;
    int64_t num_pairs;

    Head(const zi_rotary_params &p, int64_t row, int64_t head)
        : x(static_cast<T *>(p.x) + row * p.row_stride + head * p.head_stride),
          cos(static_cast<const C *>(p.cos) + row * p.table_stride),
          sin(static_cast<const C *>(p.sin) + row * p.table_stride),
          num_pairs(p.rotary_dim / 2) {}

    void rotate_one(int64_t pair, T *first, T *second) const {
        const float a = load_one(first);
        const float b = load_one(second);
        const float c = load_one(cos + pair);
        const float s = load_one(sin + pair);
        store_one(first, a * c - b * s);
        store_one(second, b * c + a * s);
    }

    /* Pairs from `pair` on, one by one. */
    void rotate_rest(int64_t pair, bool is_interleaved) const {
        for (; pair < num_pairs; ++pair) {
            if (is_interleaved) {
                rotate_one(pair, x + 2 * pair, x + 2 * pair + 1);
            } else {
                rotate_one(pair, x + pair, x + pair + num_pairs);
            }
        }
    }
};

template <typename T, typename C>
int rotate_by_definition(const zi_rotary_params &p) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
        for (int64_t head = 0; head < p.num_heads; ++head) {
            Head<T, C>(p, row, head).rotate_rest(0, p.is_interleaved);
        }
    }
    return 0;
}

#if defined(__x86_64__)

template <typename T, typename C>
ZI_AVX2 void rotate_halves(const Head<T, C> &head) {
    T *second = head.x + head.num_pairs;
    int64_t pair = 0;
    for (; pair + zi::kLanes <= head.num_pairs; pair += zi::kLanes) {
        const __m256 a = zi::load8(head.x + pair);
        const __m256 b = zi::load8(second + pair);
        const __m256 c = zi::load8(head.cos + pair);
        const __m256 s = zi::load8(head.sin + pair);
        zi::store8(head.x + pair, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        zi::store8(second + pair, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
    head.rotate_rest(pair, false);
}

/* Eight pairs a turn: angle 0 stands beside elements 0 and 1, angle 1 beside 2 and 3, and so on. */
template <typename T, typename C>
ZI_AVX2 void rotate_interleaved(const Head<T, C> &head) {
    const __m256i low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    int64_t pair = 0;
    for (; pair + zi::kLanes <= head.num_pairs; pair += zi::kLanes) {
        const __m256 c = zi::load8(head.cos + pair);
        const __m256 s = zi::load8(head.sin + pair);
        T *x = head.x + 2 * pair;
        const __m256 first = zi::load8(x);
        const __m256 second = zi::load8(x + zi::kLanes);
        const __m256 first_turn =
            _mm256_mul_ps(_mm256_permute_ps(first, 0xB1), _mm256_permutevar8x32_ps(s, low));
        const __m256 second_turn =
            _mm256_mul_ps(_mm256_permute_ps(second, 0xB1), _mm256_permutevar8x32_ps(s, high));
        zi::store8(x, _mm256_fmaddsub_ps(first, _mm256_permutevar8x32_ps(c, low), first_turn));
        zi::store8(x + zi::kLanes,
                   _mm256_fmaddsub_ps(second, _mm256_permutevar8x32_ps(c, high), second_turn));
    }
    head.rotate_rest(pair, true);
}

template <typename T, typename C>
ZI_AVX2 void rotate_rows(const zi_rotary_params &p, int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
        for (int64_t idx = 0; idx < p.num_heads; ++idx) {
            const Head<T, C> head(p, row, idx);
            if (p.is_interleaved) {
                rotate_interleaved(head);
            } else {
                rotate_halves(head);
            }
        }
    }
}

template <typename T, typename C>
int rotate_fast(const zi_rotary_params &p, zi_team *team) {
    const int64_t row_bytes = 2 * p.num_heads * p.rotary_dim * int64_t(sizeof(T));
    return zi::for_items(team, p.num_rows, row_bytes,
                         [&](int64_t start, int64_t stop) { rotate_rows<T, C>(p, start, stop); });
}

#endif

int check(const zi_rotary_params *p) {
    if (p == nullptr || p->num_rows < 0 || p->num_heads < 0 || p->rotary_dim < 0) {
        return -EINVAL;
    }
    if (p->rotary_dim % 2 != 0 || !zi::is_activation_dtype(p->dtype) ||
        !zi::is_activation_dtype(p->table_dtype)) {
        return -EINVAL;
    }
    const bool is_there = p->x != nullptr && p->cos != nullptr && p->sin != nullptr;
    const bool is_empty = p->num_rows == 0 || p->num_heads == 0 || p->rotary_dim == 0;
    return is_there || is_empty ? 0 : -EINVAL;
}

}  // namespace

int zi_rotary_reference(const zi_rotary_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return zi::with_activations(
        params->dtype, params->table_dtype, [&](auto element, auto angle) {
            return rotate_by_definition<decltype(element), decltype(angle)>(*params);
        });
}

int zi_rotary(const zi_rotary_params *params, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return zi::with_activations(
            params->dtype, params->table_dtype, [&](auto element, auto angle) {
                return rotate_fast<decltype(element), decltype(angle)>(*params, team);
            });
    }
#endif
    (void)team;
    return zi_rotary_reference(params);
}
