#include <cmath>

#include "chunks.h"
#include "elements.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

namespace {

using zi::load_one;
using zi::store_one;

/* What is taken from every element of a row, and what the rest is multiplied with. */
struct Scale {
    float mean;
    float factor;
};

template <typename T, typename W>
struct Row {
    T *x;
    const T *residual;
    T *out;
    const W *weight;
    const W *bias;
    int64_t num_columns;

    Row(const zi_norm_params &p, int64_t row)
        : x(static_cast<T *>(p.x) + row * p.x_stride),
          residual(p.residual == nullptr
                       ? nullptr
                       : static_cast<const T *>(p.residual) + row * p.residual_stride),
          out(static_cast<T *>(p.out) + row * p.out_stride),
          weight(static_cast<const W *>(p.weight)),
          bias(static_cast<const W *>(p.bias)),
          num_columns(p.num_columns) {}

    void add_one(int64_t k) const { store_one(x + k, load_one(x + k) + load_one(residual + k)); }

    void scale_one(int64_t k, const Scale &scale, bool is_rms) const {
        float value = (load_one(x + k) - scale.mean) * scale.factor;
        if (is_rms) {
            value = zi::rounded<T>(value);
        }
        value *= load_one(weight + k);
        store_one(out + k, bias == nullptr ? value : value + load_one(bias + k));
    }
};

template <typename T>
double mean_by_definition(const T *x, int64_t num_columns) {
    double sum = 0;
    for (int64_t k = 0; k < num_columns; ++k) {
        sum += double(load_one(x + k));
    }
    return sum / double(num_columns);
}

template <typename T>
double mean_square_by_definition(const T *x, int64_t num_columns, double mean) {
    double sum = 0;
    for (int64_t k = 0; k < num_columns; ++k) {
        const double rest = double(load_one(x + k)) - mean;
        sum += rest * rest;
    }
    return sum / double(num_columns);
}

template <typename T, typename W>
int normalize_by_definition(const zi_norm_params &p) {
    for (int64_t idx = 0; idx < p.num_rows; ++idx) {
        const Row<T, W> row(p, idx);
        for (int64_t k = 0; row.residual != nullptr && k < p.num_columns; ++k) {
            row.add_one(k);
        }
        const double mean = p.is_rms ? 0 : mean_by_definition(row.x, p.num_columns);
        const double square = mean_square_by_definition(row.x, p.num_columns, mean);
        const Scale scale{float(mean), float(1 / std::sqrt(square + double(p.eps)))};
        for (int64_t k = 0; k < p.num_columns; ++k) {
            row.scale_one(k, scale, p.is_rms);
        }
    }
    return 0;
}

#if defined(__x86_64__)

constexpr int64_t kStep = 4 * zi::kLanes;

template <typename T, typename W>
ZI_AVX2 void add_residual(const Row<T, W> &row) {
    int64_t k = 0;
    for (; k + zi::kLanes <= row.num_columns; k += zi::kLanes) {
        zi::store8(row.x + k, _mm256_add_ps(zi::load8(row.x + k), zi::load8(row.residual + k)));
    }
    for (; k < row.num_columns; ++k) {
        row.add_one(k);
    }
}

/* Four vectors of partial sums hide the latency of an addition. */
ZI_AVX2 float sum_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    return zi::sum8(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)));
}

template <typename T>
ZI_AVX2 float sum_row(const T *x, int64_t num_columns) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                      _mm256_setzero_ps()};
    int64_t k = 0;
    for (; k + kStep <= num_columns; k += kStep) {
        for (int idx = 0; idx < 4; ++idx) {
            sums[idx] = _mm256_add_ps(sums[idx], zi::load8(x + k + idx * zi::kLanes));
        }
    }
    float rest = 0;
    for (; k < num_columns; ++k) {
        rest += load_one(x + k);
    }
    return sum_of(sums[0], sums[1], sums[2], sums[3]) + rest;
}

template <typename T>
ZI_AVX2 float sum_squares(const T *x, int64_t num_columns, float mean) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                      _mm256_setzero_ps()};
    int64_t k = 0;
    for (; k + kStep <= num_columns; k += kStep) {
        for (int idx = 0; idx < 4; ++idx) {
            const __m256 value = zi::load8(x + k + idx * zi::kLanes);
            const __m256 part = _mm256_sub_ps(value, _mm256_set1_ps(mean));
            sums[idx] = _mm256_fmadd_ps(part, part, sums[idx]);
        }
    }
    float rest = 0;
    for (; k < num_columns; ++k) {
        const float part = load_one(x + k) - mean;
        rest += part * part;
    }
    return sum_of(sums[0], sums[1], sums[2], sums[3]) + rest;
}

template <typename T, typename W>
ZI_AVX2 void scale_row(const Row<T, W> &row, const Scale &scale, bool is_rms) {
    const __m256 mean = _mm256_set1_ps(scale.mean);
    const __m256 factor = _mm256_set1_ps(scale.factor);
    int64_t k = 0;
    for (; k + zi::kLanes <= row.num_columns; k += zi::kLanes) {
        __m256 value = _mm256_mul_ps(_mm256_sub_ps(zi::load8(row.x + k), mean), factor);
        if (is_rms) {
            value = zi::rounded8<T>(value);
        }
        value = _mm256_mul_ps(value, zi::load8(row.weight + k));
        if (row.bias != nullptr) {
            value = _mm256_add_ps(value, zi::load8(row.bias + k));
        }
        zi::store8(row.out + k, value);
    }
    for (; k < row.num_columns; ++k) {
        row.scale_one(k, scale, is_rms);
    }
}

template <typename T, typename W>
ZI_AVX2 void normalize_rows(const zi_norm_params &p, int64_t start, int64_t stop) {
    const float count = float(p.num_columns);
    for (int64_t idx = start; idx < stop; ++idx) {
        const Row<T, W> row(p, idx);
        if (row.residual != nullptr) {
            add_residual(row);
        }
        const float mean = p.is_rms ? 0 : sum_row(row.x, p.num_columns) / count;
        const float square = sum_squares(row.x, p.num_columns, mean) / count;
        scale_row(row, Scale{mean, 1 / std::sqrt(square + p.eps)}, p.is_rms);
    }
}

template <typename T, typename W>
int normalize_fast(const zi_norm_params &p, zi_team *team) {
    const int64_t row_bytes = 2 * p.num_columns * int64_t(sizeof(T));
    return zi::for_items(team, p.num_rows, row_bytes, [&](int64_t start, int64_t stop) {
        normalize_rows<T, W>(p, start, stop);
    });
}

#endif

int check(const zi_norm_params *p) {
    if (p == nullptr || p->num_rows < 0 || p->num_columns < 1) {
        return -EINVAL;
    }
    if (!zi::is_activation_dtype(p->dtype) || !zi::is_weight_dtype(p->weight_dtype)) {
        return -EINVAL;
    }
    const bool is_there = p->x != nullptr && p->out != nullptr && p->weight != nullptr;
    return is_there || p->num_rows == 0 ? 0 : -EINVAL;
}

}  // namespace

int zi_norm_reference(const zi_norm_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return zi::with_activation_and_weight(
        params->dtype, params->weight_dtype, [&](auto element, auto weight) {
            return normalize_by_definition<decltype(element), decltype(weight)>(*params);
        });
}

int zi_norm(const zi_norm_params *params, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return zi::with_activation_and_weight(
            params->dtype, params->weight_dtype, [&](auto element, auto weight) {
                return normalize_fast<decltype(element), decltype(weight)>(*params, team);
            });
    }
#endif
    (void)team;
    return zi_norm_reference(params);
}
