/* Arrays as kernels take them, checked by name. */
#ifndef ZEROINFER_BINDINGS_ARRAYS_H
#define ZEROINFER_BINDINGS_ARRAYS_H

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <string>

#include "zeroinfer/types.h"

/* Any element type; the checks below name what was wrong. */
using Array = nanobind::ndarray<nanobind::device::cpu>;
using ConstArray = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;

inline bool is_dtype(nanobind::dlpack::dtype dtype, nanobind::dlpack::dtype_code code, int bits) {
    return dtype.code == uint8_t(code) && dtype.bits == bits && dtype.lanes == 1;
}

/* The element type of a float array; fp16 only where it is allowed. */
template <typename A>
zi_dtype dtype_of(const A &array, const char *name, bool is_fp16_allowed = false) {
    using nanobind::dlpack::dtype_code;
    if (is_dtype(array.dtype(), dtype_code::Float, 32)) {
        return ZI_F32;
    }
    if (is_dtype(array.dtype(), dtype_code::Bfloat, 16)) {
        return ZI_BF16;
    }
    if (is_fp16_allowed && is_dtype(array.dtype(), dtype_code::Float, 16)) {
        return ZI_F16;
    }
    const std::string need = is_fp16_allowed ? "fp32, bf16 or fp16" : "fp32 or bf16";
    throw nanobind::type_error((std::string(name) + ": need " + need).c_str());
}

template <typename A>
void require_dtype(const A &array, const char *name, int dtype) {
    if (dtype_of(array, name, true) != dtype) {
        throw nanobind::type_error((std::string(name) + ": need the dtype of the others").c_str());
    }
}

template <typename A>
std::string shape_of(const A &array) {
    std::string text = "(";
    for (size_t axis = 0; axis < array.ndim(); ++axis) {
        text += (axis == 0 ? "" : ", ") + std::to_string(array.shape(axis));
    }
    return text + ")";
}

/* Sizes by name; -1 stands for any. */
template <typename A>
void require_shape(const A &array, const char *name, std::initializer_list<int64_t> sizes) {
    bool is_right = array.ndim() == sizes.size();
    std::string need;
    size_t axis = 0;
    for (const int64_t size : sizes) {
        is_right = is_right && (size < 0 || int64_t(array.shape(axis)) == size);
        need += (axis == 0 ? "" : ", ") + (size < 0 ? std::string("*") : std::to_string(size));
        ++axis;
    }
    if (!is_right) {
        const std::string message =
            std::string(name) + ": got shape " + shape_of(array) + ", need (" + need + ")";
        throw nanobind::value_error(message.c_str());
    }
}

/* Contiguity of the last `num_axes` axes; axes of one element have no stride that matters. */
template <typename A>
void require_dense(const A &array, const char *name, size_t num_axes) {
    int64_t expected = 1;
    for (size_t axis = array.ndim(); axis-- > array.ndim() - num_axes;) {
        if (array.shape(axis) > 1 && array.stride(axis) != expected) {
            const std::string message = std::string(name) + ": need contiguous rows";
            throw nanobind::value_error(message.c_str());
        }
        expected *= int64_t(array.shape(axis));
    }
}

#endif
