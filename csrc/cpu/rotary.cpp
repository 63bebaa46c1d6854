#include "chunks.h"
#include "rotation.h"

namespace {

template <typename T, typename C>
zi::Rotation<T, T, C> in_place(const zi_rotary_params &p, int64_t row, int64_t head) {
    T *x = static_cast<T *>(p.x) + row * p.row_stride + head * p.head_stride;
    return {p.rotation, row, x, x};
}

template <typename T, typename C>
int rotate_by_definition(const zi_rotary_params &p) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
        for (int64_t head = 0; head < p.num_heads; ++head) {
            in_place<T, C>(p, row, head).rotate_rest(0);
        }
    }
    return 0;
}

#if defined(__x86_64__)

template <typename T, typename C>
ZI_AVX2 void rotate_rows(const zi_rotary_params &p, int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
        for (int64_t head = 0; head < p.num_heads; ++head) {
            zi::rotate(in_place<T, C>(p, row, head));
        }
    }
}

template <typename T, typename C>
int rotate_fast(const zi_rotary_params &p, zi_team *team) {
    const int64_t row_bytes = 2 * p.num_heads * p.rotation.rotary_dim * int64_t(sizeof(T));
    return zi::for_items(team, p.num_rows, row_bytes,
                         [&](int64_t start, int64_t stop) { rotate_rows<T, C>(p, start, stop); });
}

#endif

int check(const zi_rotary_params *p) {
    if (p == nullptr || p->num_rows < 0 || p->num_heads < 0 ||
        !zi::is_activation_dtype(p->dtype) || !zi::is_sound(p->rotation, p->num_rows)) {
        return -EINVAL;
    }
    const bool is_empty = p->num_rows == 0 || p->num_heads == 0 || p->rotation.rotary_dim == 0;
    return p->x != nullptr || is_empty ? 0 : -EINVAL;
}

}  // namespace

int zi_rotary_reference(const zi_rotary_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return zi::with_activations(
        params->dtype, params->rotation.table_dtype, [&](auto element, auto angle) {
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
            params->dtype, params->rotation.table_dtype, [&](auto element, auto angle) {
                return rotate_fast<decltype(element), decltype(angle)>(*params, team);
            });
    }
#endif
    (void)team;
    return zi_rotary_reference(params);
}
