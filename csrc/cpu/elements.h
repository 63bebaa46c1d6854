/* Element types as C++ sees them: one at a time, at any byte alignment. */
#ifndef ZEROINFER_CPU_ELEMENTS_H
#define ZEROINFER_CPU_ELEMENTS_H

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "zeroinfer/types.h"

namespace zi {

struct bf16 {
    uint16_t bits;
};

struct half {
    uint16_t bits;
};

inline float widen(float value) {
    return value;
}

inline float widen(bf16 value) {
    return float_of_bf16(value.bits);
}

inline float widen(half value) {
    return float_of_half(value.bits);
}

/* To nearest, ties to even; a NaN stays one and becomes quiet. */
inline bf16 bf16_of_float(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) {
        return bf16{uint16_t(bits >> 16 | 0x40)};
    }
    return bf16{uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}

template <typename T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

template <>
inline bf16 narrow<bf16>(float value) {
    return bf16_of_float(value);
}

template <typename T>
float load_one(const T *source) {
    T value;
    std::memcpy(&value, source, sizeof value);
    return widen(value);
}

template <typename T>
void store_one(T *target, float value) {
    const T narrowed = narrow<T>(value);
    std::memcpy(target, &narrowed, sizeof narrowed);
}

/* The value as it is once stored as T. */
template <typename T>
float rounded(float value) {
    return widen(narrow<T>(value));
}

inline bool is_activation_dtype(int dtype) {
    return dtype == ZI_F32 || dtype == ZI_BF16;
}

inline bool is_weight_dtype(int dtype) {
    return is_activation_dtype(dtype) || dtype == ZI_F16;
}

/* Call fn with a value of the element type; activations are fp32 or bf16. */
template <typename Fn>
int with_activation(int dtype, const Fn &fn) {
    switch (dtype) {
        case ZI_F32:
            return fn(float{});
        case ZI_BF16:
            return fn(bf16{});
        default:
            return -EINVAL;
    }
}

template <typename Fn>
int with_weight(int dtype, const Fn &fn) {
    return dtype == ZI_F16 ? fn(half{}) : with_activation(dtype, fn);
}

/* Call fn with values of both element types. */
template <typename Fn>
int with_activations(int first, int second, const Fn &fn) {
    return with_activation(first, [&](auto one) {
        return with_activation(second, [&](auto other) { return fn(one, other); });
    });
}

template <typename Fn>
int with_activation_and_weight(int activation, int weight, const Fn &fn) {
    return with_activation(activation, [&](auto one) {
        return with_weight(weight, [&](auto other) { return fn(one, other); });
    });
}

}  // namespace zi

#endif
