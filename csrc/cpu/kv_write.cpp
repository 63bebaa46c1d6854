#include "chunks.h"
#include "elements.h"
#include "kv_plane.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

namespace {

using zi::load_one;
using zi::store_one;

/* Source and destination of one head of one row. */
template <typename T, typename K>
struct Head {
    const T *values;
    K *token;

    Head(const zi_kv_write_params &p, int64_t row, int64_t head)
        : values(static_cast<const T *>(p.values) + row * p.row_stride + head * p.head_stride),
          token(zi::token_at<K>(p.plane, p.slots[row] / p.plane.block_size, head,
                                p.slots[row] % p.plane.block_size)) {}

    void write_one(int64_t d) const { store_one(token + d, load_one(values + d)); }
};

template <typename T, typename K>
int write_by_definition(const zi_kv_write_params &p) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
        for (int64_t idx = 0; p.slots[row] >= 0 && idx < p.plane.num_heads; ++idx) {
            const Head<T, K> head(p, row, idx);
            for (int64_t d = 0; d < p.plane.head_dim; ++d) {
                head.write_one(d);
            }
        }
    }
    return 0;
}

#if defined(__x86_64__)

template <typename T, typename K>
ZI_AVX2 void write_rows(const zi_kv_write_params &p, int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
        for (int64_t idx = 0; p.slots[row] >= 0 && idx < p.plane.num_heads; ++idx) {
            const Head<T, K> head(p, row, idx);
            int64_t d = 0;
            for (; d + zi::kLanes <= p.plane.head_dim; d += zi::kLanes) {
                zi::store8(head.token + d, zi::load8(head.values + d));
            }
            for (; d < p.plane.head_dim; ++d) {
                head.write_one(d);
            }
        }
    }
}

template <typename T, typename K>
int write_fast(const zi_kv_write_params &p, zi_team *team) {
    const int64_t row_bytes = p.plane.num_heads * p.plane.head_dim * int64_t(sizeof(T) + sizeof(K));
    return zi::for_items(team, p.num_rows, row_bytes,
                         [&](int64_t start, int64_t stop) { write_rows<T, K>(p, start, stop); });
}

#endif

int check(const zi_kv_write_params *p) {
    if (p == nullptr || p->num_rows < 0 || !zi::is_activation_dtype(p->dtype) ||
        !zi::is_sound(p->plane)) {
        return -EINVAL;
    }
    if (p->num_rows > 0 && (p->values == nullptr || p->slots == nullptr)) {
        return -EINVAL;
    }
    const int64_t num_slots = p->plane.num_blocks * p->plane.block_size;
    const auto is_inside = [&](int64_t slot) { return slot < num_slots; };
    return std::all_of(p->slots, p->slots + p->num_rows, is_inside) ? 0 : -EINVAL;
}

}  // namespace

int zi_kv_write_reference(const zi_kv_write_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return zi::with_activations(
        params->dtype, params->plane.dtype, [&](auto element, auto stored) {
            return write_by_definition<decltype(element), decltype(stored)>(*params);
        });
}

int zi_kv_write(const zi_kv_write_params *params, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return zi::with_activations(
            params->dtype, params->plane.dtype, [&](auto element, auto stored) {
                return write_fast<decltype(element), decltype(stored)>(*params, team);
            });
    }
#endif
    (void)team;
    return zi_kv_write_reference(params);
}
