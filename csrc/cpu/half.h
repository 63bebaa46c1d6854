/* 16-bit floats to fp32, one at a time and exactly; the reference of the vector conversions. */
#ifndef ZEROINFER_CPU_HALF_H
#define ZEROINFER_CPU_HALF_H

#include <cstdint>
#include <cstring>

namespace zi {

inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float float_of_bf16(uint16_t bits) {
    return float_of_bits(uint32_t(bits) << 16);
}

inline float float_of_half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1F;
    const uint32_t mantissa = bits & 0x3FF;
    if (exponent == 0x1F) {
        /* A quiet NaN stays one, a signalling one becomes quiet, as the processor does it. */
        const uint32_t quiet = mantissa != 0 ? 0x400000 : 0;
        return float_of_bits(sign | 0x7F800000 | quiet | mantissa << 13);
    }
    if (exponent == 0) {
        const float magnitude = float(mantissa) * 0x1p-24F;
        return sign != 0 ? -magnitude : magnitude;
    }
    return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

}  // namespace zi

#endif
