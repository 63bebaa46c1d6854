/*
 * Vectors of eight floats: loads and stores of every element type, and the functions that
 * activations and softmax need. Only for functions that carry ZI_AVX2 themselves.
 */
#ifndef ZEROINFER_CPU_VECTORS_H
#define ZEROINFER_CPU_VECTORS_H

#if defined(__x86_64__)

#include <immintrin.h>

#include "elements.h"

#define ZI_AVX2 __attribute__((target("avx2,fma,f16c")))

namespace zi {

constexpr int64_t kLanes = 8;

ZI_AVX2 inline __m256 load8(const float *source) {
    return _mm256_loadu_ps(source);
}

ZI_AVX2 inline __m256 load8(const bf16 *source) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i *>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

ZI_AVX2 inline __m256 load8(const half *source) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(source)));
}

/* Bits of bf16 in the upper halves; see bf16_of_float. The lower halves are left over. */
ZI_AVX2 inline __m256i round_to_bf16(__m256 values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half_up = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7FFF));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_add_epi32(bits, half_up), quiet, is_nan);
}

ZI_AVX2 inline void store8(float *target, __m256 values) {
    _mm256_storeu_ps(target, values);
}

ZI_AVX2 inline void store8(bf16 *target, __m256 values) {
    const __m256i bits = _mm256_srli_epi32(round_to_bf16(values), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(target), _mm256_castsi256_si128(packed));
}

template <typename T>
ZI_AVX2 inline __m256 rounded8(__m256 values);

template <>
ZI_AVX2 inline __m256 rounded8<float>(__m256 values) {
    return values;
}

template <>
ZI_AVX2 inline __m256 rounded8<bf16>(__m256 values) {
    const __m256i upper = _mm256_set1_epi32(int(0xFFFF0000));
    return _mm256_castsi256_ps(_mm256_and_si256(round_to_bf16(values), upper));
}

/* ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
ZI_AVX2 inline float sum8(__m256 values) {
    __m128 sums = _mm_hadd_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    sums = _mm_hadd_ps(sums, sums);
    return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
}

ZI_AVX2 inline float max8(__m256 values) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

/*
 * e^x to 2 units in the last place: exactly 0 below -87.3, at most 2.4e38, NaN for NaN.
 * Source: the reduction and polynomial of Cephes' expf.
 */
ZI_AVX2 inline __m256 exp8(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.33654F);
    const __m256 is_low = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    /* The second operand comes through if one is NaN. */
    x = _mm256_max_ps(lowest, _mm256_min_ps(_mm256_set1_ps(88.37626F), x));
    const __m256 power = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504F)),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 rest = _mm256_fnmadd_ps(power, _mm256_set1_ps(0.693359375F), x);
    rest = _mm256_fnmadd_ps(power, _mm256_set1_ps(-2.12194440E-4F), rest);
    __m256 sum = _mm256_set1_ps(1.9875691500E-4F);
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(1.3981999507E-3F));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(8.3334519073E-3F));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(4.1665795894E-2F));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(1.6666665459E-1F));
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(5.0000001201E-1F));
    sum = _mm256_fmadd_ps(sum, _mm256_mul_ps(rest, rest), rest);
    sum = _mm256_add_ps(sum, _mm256_set1_ps(1.0F));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    const __m256 scaled = _mm256_mul_ps(sum, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    return _mm256_andnot_ps(is_low, scaled);
}

/*
 * The error function to 2e-7.
 * Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
 */
ZI_AVX2 inline __m256 erf8(__m256 x) {
    const __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0F));
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x);
    const __m256 one = _mm256_set1_ps(1.0F);
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(0.3275911F), one));
    __m256 sum = _mm256_set1_ps(1.061405429F);
    sum = _mm256_fmadd_ps(sum, t, _mm256_set1_ps(-1.453152027F));
    sum = _mm256_fmadd_ps(sum, t, _mm256_set1_ps(1.421413741F));
    sum = _mm256_fmadd_ps(sum, t, _mm256_set1_ps(-0.284496736F));
    sum = _mm256_fmadd_ps(sum, t, _mm256_set1_ps(0.254829592F));
    const __m256 decay = exp8(_mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(x, x)));
    return _mm256_or_ps(_mm256_fnmadd_ps(_mm256_mul_ps(sum, t), decay, one), sign);
}

}  // namespace zi

#endif

#endif
