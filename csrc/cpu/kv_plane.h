/* Addresses in a plane of the KV cache: blocks of (heads, tokens, head_dim). */
#ifndef ZEROINFER_CPU_KV_PLANE_H
#define ZEROINFER_CPU_KV_PLANE_H

#include "elements.h"
#include "zeroinfer/kernels.h"

namespace zi {

inline bool is_sound(const zi_kv_plane &plane) {
    const bool is_sized =
        plane.num_blocks >= 0 && plane.num_heads > 0 && plane.block_size > 0 && plane.head_dim > 0;
    return is_sized && plane.data != nullptr && is_activation_dtype(plane.dtype);
}

/* The first element of a head of a token. */
template <typename K>
K *token_at(const zi_kv_plane &plane, int64_t block, int64_t head, int64_t offset) {
    const int64_t row = (block * plane.num_heads + head) * plane.block_size + offset;
    return static_cast<K *>(plane.data) + row * plane.head_dim;
}

}  // namespace zi

#endif
