#include <cmath>

#include "chunks.h"
#include "elements.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

namespace {

using zi::load_one;
using zi::store_one;

constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
constexpr double kTanhCubic = 0.044715;

double by_definition(int activation, double x) {
    switch (activation) {
        case ZI_RELU:
            return std::isnan(x) || x > 0 ? x : 0;
        case ZI_SILU:
            return x / (1 + std::exp(-x));
        case ZI_GELU:
            return 0.5 * x * (1 + std::erf(x * kSqrtHalf));
        case ZI_GELU_TANH:
            return 0.5 * x * (1 + std::tanh(kSqrtTwoOverPi * (x + kTanhCubic * x * x * x)));
    }
    return 0;
}

template <typename T, typename B>
struct Row {
    const T *x;
    const B *bias;
    const T *up;
    T *out;
    int64_t num_columns;

    Row(const zi_activation_params &p, int64_t row)
        : x(static_cast<const T *>(p.x) + row * p.x_stride),
          bias(static_cast<const B *>(p.bias)),
          up(p.up == nullptr ? nullptr : static_cast<const T *>(p.up) + row * p.up_stride),
          out(static_cast<T *>(p.out) + row * p.out_stride),
          num_columns(p.num_columns) {}

    void activate_one(int activation, int64_t k) const {
        const float x_k = load_one(x + k) + (bias == nullptr ? 0.0F : load_one(bias + k));
        const double value = by_definition(activation, double(x_k));
        store_one(out + k, float(up == nullptr ? value : value * double(load_one(up + k))));
    }
};

template <typename T, typename B>
int activate_by_definition(const zi_activation_params &p) {
    for (int64_t idx = 0; idx < p.num_rows; ++idx) {
        const Row<T, B> row(p, idx);
        for (int64_t k = 0; k < p.num_columns; ++k) {
            row.activate_one(p.activation, k);
        }
    }
    return 0;
}

#if defined(__x86_64__)

/* x / (1 + e^-slope). */
ZI_AVX2 inline __m256 times_sigmoid(__m256 x, __m256 slope) {
    const __m256 decay = zi::exp8(_mm256_sub_ps(_mm256_setzero_ps(), slope));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0F), decay));
}

template <zi_activation Activation>
ZI_AVX2 inline __m256 activate8(__m256 x) {
    if constexpr (Activation == ZI_RELU) {
        /* The second operand comes through if it is NaN. */
        return _mm256_max_ps(_mm256_setzero_ps(), x);
    } else if constexpr (Activation == ZI_SILU) {
        return times_sigmoid(x, x);
    } else if constexpr (Activation == ZI_GELU) {
        const __m256 erf = zi::erf8(_mm256_mul_ps(x, _mm256_set1_ps(float(kSqrtHalf))));
        const __m256 half_x = _mm256_mul_ps(x, _mm256_set1_ps(0.5F));
        return _mm256_fmadd_ps(half_x, erf, half_x);
    } else {
        /* (1 + tanh(u)) / 2 is the sigmoid of 2 u. */
        const __m256 cubic = _mm256_mul_ps(_mm256_mul_ps(x, x), x);
        const __m256 inner = _mm256_fmadd_ps(cubic, _mm256_set1_ps(float(kTanhCubic)), x);
        return times_sigmoid(x, _mm256_mul_ps(inner, _mm256_set1_ps(float(2 * kSqrtTwoOverPi))));
    }
}

/* A row's rest goes through a vector of its own, so that a column's place changes no bit. */
template <zi_activation Activation, typename T, typename B>
ZI_AVX2 void activate_rest(const Row<T, B> &row, int64_t start) {
    float x[zi::kLanes] = {};
    for (int64_t k = start; k < row.num_columns; ++k) {
        x[k - start] = load_one(row.x + k) + (row.bias == nullptr ? 0.0F : load_one(row.bias + k));
    }
    zi::store8(x, activate8<Activation>(zi::load8(x)));
    for (int64_t k = start; k < row.num_columns; ++k) {
        const float value = x[k - start];
        store_one(row.out + k, row.up == nullptr ? value : value * load_one(row.up + k));
    }
}

template <zi_activation Activation, typename T, typename B>
ZI_AVX2 void activate_rows(const zi_activation_params &p, int64_t start, int64_t stop) {
    for (int64_t idx = start; idx < stop; ++idx) {
        const Row<T, B> row(p, idx);
        int64_t k = 0;
        for (; k + zi::kLanes <= row.num_columns; k += zi::kLanes) {
            __m256 value = zi::load8(row.x + k);
            if (row.bias != nullptr) {
                value = _mm256_add_ps(value, zi::load8(row.bias + k));
            }
            value = activate8<Activation>(value);
            if (row.up != nullptr) {
                value = _mm256_mul_ps(value, zi::load8(row.up + k));
            }
            zi::store8(row.out + k, value);
        }
        if (k < row.num_columns) {
            activate_rest<Activation>(row, k);
        }
    }
}

template <zi_activation Activation, typename T, typename B>
int share_rows(const zi_activation_params &p, zi_team *team) {
    const int64_t row_bytes = (p.up == nullptr ? 2 : 3) * p.num_columns * int64_t(sizeof(T));
    return zi::for_items(team, p.num_rows, row_bytes, [&](int64_t start, int64_t stop) {
        activate_rows<Activation, T, B>(p, start, stop);
    });
}

template <typename T, typename B>
int activate_fast(const zi_activation_params &p, zi_team *team) {
    switch (p.activation) {
        case ZI_RELU:
            return share_rows<ZI_RELU, T, B>(p, team);
        case ZI_SILU:
            return share_rows<ZI_SILU, T, B>(p, team);
        case ZI_GELU:
            return share_rows<ZI_GELU, T, B>(p, team);
        case ZI_GELU_TANH:
            return share_rows<ZI_GELU_TANH, T, B>(p, team);
    }
    return -EINVAL;
}

#endif

int check(const zi_activation_params *p) {
    if (p == nullptr || p->num_rows < 0 || p->num_columns < 0) {
        return -EINVAL;
    }
    if (!zi::is_activation_dtype(p->dtype) || p->activation < ZI_RELU ||
        p->activation > ZI_GELU_TANH) {
        return -EINVAL;
    }
    if (p->bias != nullptr && !zi::is_weight_dtype(p->bias_dtype)) {
        return -EINVAL;
    }
    const bool is_empty = p->num_rows == 0 || p->num_columns == 0;
    return (p->x != nullptr && p->out != nullptr) || is_empty ? 0 : -EINVAL;
}

int bias_dtype(const zi_activation_params &p) {
    return p.bias == nullptr ? int(ZI_F32) : p.bias_dtype;
}

}  // namespace

int zi_activate_reference(const zi_activation_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return zi::with_activation_and_weight(
        params->dtype, bias_dtype(*params), [&](auto element, auto bias) {
            return activate_by_definition<decltype(element), decltype(bias)>(*params);
        });
}

int zi_activate(const zi_activation_params *params, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return zi::with_activation_and_weight(
            params->dtype, bias_dtype(*params), [&](auto element, auto bias) {
                return activate_fast<decltype(element), decltype(bias)>(*params, team);
            });
    }
#endif
    (void)team;
    return zi_activate_reference(params);
}
