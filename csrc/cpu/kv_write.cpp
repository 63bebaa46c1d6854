#include "chunks.h"
#include "kv_plane.h"
#include "rotation.h"

namespace {

/* One head of one row: where its values lie, and where they are stored. */
template <typename T, typename K>
struct Head {
    const T *values;
    K *token;

    Head(const zi_kv_write_params &p, int64_t row, int64_t head)
        : values(static_cast<const T *>(p.values) + row * p.row_stride + head * p.head_stride),
          token(zi::token_at<K>(p.plane, p.slots[row] / p.plane.block_size, head,
                                p.slots[row] % p.plane.block_size)) {}

    /* Elements [start, stop), one by one. */
    void write_rest(int64_t start, int64_t stop) const {
        for (int64_t d = start; d < stop; ++d) {
            zi::store_one(token + d, zi::load_one(values + d));
        }
    }
};

template <typename T, typename K, typename C>
int write_by_definition(const zi_kv_write_params &p) {
    for (int64_t row = 0; row < p.num_rows; ++row) {
        for (int64_t idx = 0; p.slots[row] >= 0 && idx < p.plane.num_heads; ++idx) {
            const Head<T, K> head(p, row, idx);
            zi::Rotation<T, K, C>(p.rotation, row, head.values, head.token).rotate_rest(0);
            head.write_rest(p.rotation.rotary_dim, p.plane.head_dim);
        }
    }
    return 0;
}

#if defined(__x86_64__)

template <typename T, typename K, typename C>
ZI_AVX2 void write_rows(const zi_kv_write_params &p, int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) {
        for (int64_t idx = 0; p.slots[row] >= 0 && idx < p.plane.num_heads; ++idx) {
            const Head<T, K> head(p, row, idx);
            zi::rotate(zi::Rotation<T, K, C>(p.rotation, row, head.values, head.token));
            int64_t d = p.rotation.rotary_dim;
            for (; d + zi::kLanes <= p.plane.head_dim; d += zi::kLanes) {
                zi::store8(head.token + d, zi::load8(head.values + d));
            }
            head.write_rest(d, p.plane.head_dim);
        }
    }
}

template <typename T, typename K, typename C>
int write_fast(const zi_kv_write_params &p, zi_team *team) {
    const int64_t row_bytes = p.plane.num_heads * p.plane.head_dim * int64_t(sizeof(T) + sizeof(K));
    return zi::for_items(team, p.num_rows, row_bytes, [&](int64_t start, int64_t stop) {
        write_rows<T, K, C>(p, start, stop);
    });
}

#endif

int check(const zi_kv_write_params *p) {
    if (p == nullptr || p->num_rows < 0 || !zi::is_activation_dtype(p->dtype) ||
        !zi::is_sound(p->plane)) {
        return -EINVAL;
    }
    if (!zi::is_sound(p->rotation, p->num_rows) || p->rotation.rotary_dim > p->plane.head_dim) {
        return -EINVAL;
    }
    if (p->num_rows > 0 && (p->values == nullptr || p->slots == nullptr)) {
        return -EINVAL;
    }
    const int64_t num_slots = p->plane.num_blocks * p->plane.block_size;
    const auto is_inside = [&](int64_t slot) { return slot < num_slots; };
    return std::all_of(p->slots, p->slots + p->num_rows, is_inside) ? 0 : -EINVAL;
}

/* Call fn with values of the element types of values, plane and angles. */
template <typename Fn>
int with_types(const zi_kv_write_params &p, const Fn &fn) {
    return zi::with_activations(p.dtype, p.plane.dtype, [&](auto element, auto stored) {
        return zi::with_activation(p.rotation.table_dtype,
                                   [&](auto angle) { return fn(element, stored, angle); });
    });
}

}  // namespace

int zi_kv_write_reference(const zi_kv_write_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return with_types(*params, [&](auto element, auto stored, auto angle) {
        return write_by_definition<decltype(element), decltype(stored), decltype(angle)>(*params);
    });
}

int zi_kv_write(const zi_kv_write_params *params, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return with_types(*params, [&](auto element, auto stored, auto angle) {
            return write_fast<decltype(element), decltype(stored), decltype(angle)>(*params, team);
        });
    }
#endif
    (void)team;
    return zi_kv_write_reference(params);
}
