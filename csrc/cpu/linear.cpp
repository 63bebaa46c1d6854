#include "zeroinfer/linear.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "elements.h"
#include "vectors.h"
#include "zeroinfer/kernels.h"

/*
 * The grid of sums, part of every result: terms are added in blocks of kBlockColumns columns, each
 * block in kLanes partial sums (column k goes to lane k % kLanes, in rising order), the lanes by
 * the tree of sum_lanes, and the blocks one after the other. Everything else below may be tuned
 * without changing a bit.
 */
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kBlockColumns = 512;

/* Rows of x that one pass over the weights serves: their packed copy stays in the last cache. */
constexpr int64_t kPassRows = 384;
/* Rows of x that stay in the second-level cache while a block of weights is used on them. */
constexpr int64_t kCachedRows = 48;
/* Outputs of a chunk; a chunk of more rows earns a larger block. */
constexpr int64_t kFewOutputs = 32;
constexpr int64_t kManyOutputs = 64;
constexpr int64_t kFewRows = 96;
/* The register tile: kTileRows x kTileOutputs sums of kLanes fill 12 of 16 vector registers. */
constexpr int64_t kTileRows = 3;
constexpr int64_t kTileOutputs = 4;

constexpr int64_t align_up(int64_t value, int64_t step) {
    return (value + step - 1) / step * step;
}

/* Columns [start, stop) of one block of sums. */
struct Block {
    int64_t start;
    int64_t width;

    Block(int64_t first, int64_t num_columns)
        : start(first), width(std::min(kBlockColumns, num_columns - first)) {}

    /* Floats between packed rows; the padding is zero and adds nothing. */
    int64_t stride() const { return align_up(width, kLanes); }
    bool is_first() const { return start == 0; }
};

const char *weight_at(const zi_linear_params &p, int64_t output, int64_t column) {
    const int64_t element = output * p.weight_stride + column * p.weight_column_stride;
    return static_cast<const char *>(p.weight) + element * (p.weight_dtype == ZI_F32 ? 4 : 2);
}

float load_weight(const char *source, int dtype) {
    switch (dtype) {
        case ZI_F32:
            return zi::load_one(reinterpret_cast<const float *>(source));
        case ZI_BF16:
            return zi::load_one(reinterpret_cast<const zi::bf16 *>(source));
        default:
            return zi::load_one(reinterpret_cast<const zi::half *>(source));
    }
}

float sum_lanes(const float *lane) {
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) +
           ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

float block_sum(const zi_linear_params &p, const Block &block, int64_t row, int64_t output) {
    float lanes[kLanes] = {};
    for (int64_t k = 0; k < block.width; ++k) {
        const float w = load_weight(weight_at(p, output, block.start + k), p.weight_dtype);
        const float x = p.x[row * p.x_stride + block.start + k];
        lanes[k % kLanes] = std::fma(w, x, lanes[k % kLanes]);
    }
    return sum_lanes(lanes);
}

int check(const zi_linear_params *p) {
    if (p == nullptr || p->num_rows < 0 || p->num_outputs < 0 || p->num_columns < 1) {
        return -EINVAL;
    }
    if (!zi::is_weight_dtype(p->weight_dtype)) {
        return -EINVAL;
    }
    const bool is_apart = p->x_stride >= p->num_columns && p->out_stride >= p->num_outputs;
    return is_apart || p->num_rows < 2 ? 0 : -EINVAL;
}

#if defined(__x86_64__)

template <typename T>
ZI_AVX2 void widen_row(const char *source, int64_t width, float *target) {
    const T *values = reinterpret_cast<const T *>(source);
    int64_t k = 0;
    for (; k + 2 * kLanes <= width; k += 2 * kLanes) {
        /* The next block of this row: its first lines would otherwise be waited for. */
        _mm_prefetch(source + int64_t(sizeof(T)) * (k + kBlockColumns), _MM_HINT_T1);
        _mm256_store_ps(target + k, zi::load8(values + k));
        _mm256_store_ps(target + k + kLanes, zi::load8(values + k + kLanes));
    }
    for (; k < width; ++k) {
        target[k] = zi::load_one(values + k);
    }
}

/* Weights of a block, widened: rows of outputs on a stride of block.stride() floats. */
ZI_AVX2 void widen_block(const zi_linear_params &p, const Block &block, int64_t first_output,
                         int64_t num_outputs, float *target) {
    const int64_t stride = block.stride();
    const int64_t padded_outputs = align_up(num_outputs, kTileOutputs);
    for (int64_t n = 0; n < padded_outputs; ++n) {
        const bool is_real = n < num_outputs && p.weight_column_stride == 1;
        const int64_t width = is_real ? block.width : 0;
        float *row = target + n * stride;
        if (is_real) {
            const char *source = weight_at(p, first_output + n, block.start);
            if (p.weight_dtype == ZI_BF16) {
                widen_row<zi::bf16>(source, width, row);
            } else if (p.weight_dtype == ZI_F16) {
                widen_row<zi::half>(source, width, row);
            } else {
                widen_row<float>(source, width, row);
            }
        }
        std::fill(row + width, row + stride, 0.0F);
    }
    if (p.weight_column_stride == 1) {
        return;
    }
    for (int64_t k = 0; k < block.width; ++k) {
        for (int64_t n = 0; n < num_outputs; ++n) {
            const char *source = weight_at(p, first_output + n, block.start + k);
            target[n * stride + k] = load_weight(source, p.weight_dtype);
        }
    }
}

/* Four sums of eight lanes each, by the tree of sum_lanes. */
ZI_AVX2 __m128 sum_four(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
}

/* Sums of one block for `Rows` rows and kTileOutputs outputs, all on the same stride. */
template <int Rows>
ZI_AVX2 void sum_tile(const float *x, const float *w, int64_t stride, float *sums) {
    __m256 lanes[Rows][kTileOutputs];
#pragma GCC unroll 4
    for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 4
        for (int n = 0; n < kTileOutputs; ++n) {
            lanes[m][n] = _mm256_setzero_ps();
        }
    }
    for (int64_t k = 0; k < stride; k += kLanes) {
        __m256 x_lanes[Rows];
#pragma GCC unroll 4
        for (int m = 0; m < Rows; ++m) {
            x_lanes[m] = _mm256_loadu_ps(x + m * stride + k);
        }
#pragma GCC unroll 4
        for (int n = 0; n < kTileOutputs; ++n) {
            const __m256 w_lanes = _mm256_load_ps(w + n * stride + k);
#pragma GCC unroll 4
            for (int m = 0; m < Rows; ++m) {
                lanes[m][n] = _mm256_fmadd_ps(w_lanes, x_lanes[m], lanes[m][n]);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < Rows; ++m) {
        const __m128 four = sum_four(lanes[m][0], lanes[m][1], lanes[m][2], lanes[m][3]);
        _mm_storeu_ps(sums + m * kTileOutputs, four);
    }
}

/* One pass over the weights, for up to kPassRows rows. */
struct Pass {
    const zi_linear_params &p;
    int64_t first_row;
    int64_t num_rows;
    float *packed_x;

    int64_t chunk_outputs() const { return num_rows > kFewRows ? kManyOutputs : kFewOutputs; }

    int64_t num_chunks() const { return (p.num_outputs + chunk_outputs() - 1) / chunk_outputs(); }

    /* Packed rows of a block. */
    float *block_x(const Block &block) const { return packed_x + num_rows * block.start; }

    void pack_block(const Block &block) const {
        for (int64_t m = 0; m < num_rows; ++m) {
            const float *source = p.x + (first_row + m) * p.x_stride + block.start;
            float *target = block_x(block) + m * block.stride();
            std::copy(source, source + block.width, target);
            std::fill(target + block.width, target + block.stride(), 0.0F);
        }
    }

    /* Whether sums of this block come on top of what out holds. */
    bool is_added(const Block &block) const { return p.is_accumulated || !block.is_first(); }

    ZI_AVX2 void store(const Block &block, int64_t row, int64_t output, int64_t count,
                       const float *sums) const {
        float *out = p.out + (first_row + row) * p.out_stride + output;
        if (count == kTileOutputs) {
            const __m128 four = _mm_loadu_ps(sums);
            _mm_storeu_ps(out, is_added(block) ? _mm_add_ps(_mm_loadu_ps(out), four) : four);
            return;
        }
        for (int64_t n = 0; n < count; ++n) {
            out[n] = is_added(block) ? out[n] + sums[n] : sums[n];
        }
    }

    template <int Rows>
    ZI_AVX2 void multiply_tile(const Block &block, int64_t row, int64_t output, int64_t count,
                               const float *w) const {
        float sums[Rows * kTileOutputs];
        sum_tile<Rows>(block_x(block) + row * block.stride(), w, block.stride(), sums);
        for (int m = 0; m < Rows; ++m) {
            store(block, row + m, output, count, sums + m * kTileOutputs);
        }
    }

    /* Rows [start, stop) times kTileOutputs widened outputs, `count` of them real. */
    ZI_AVX2 void multiply_panel(const Block &block, int64_t start, int64_t stop, int64_t output,
                                int64_t count, const float *w) const {
        int64_t m = start;
        for (; m + kTileRows <= stop; m += kTileRows) {
            multiply_tile<kTileRows>(block, m, output, count, w);
        }
        if (stop - m == 2) {
            multiply_tile<2>(block, m, output, count, w);
        } else if (stop - m == 1) {
            multiply_tile<1>(block, m, output, count, w);
        }
    }

    ZI_AVX2 void multiply_chunk(int64_t chunk) const {
        alignas(64) static thread_local float widened[kManyOutputs * kBlockColumns];
        const int64_t first = chunk * chunk_outputs();
        const int64_t num_outputs = std::min(chunk_outputs(), p.num_outputs - first);
        for (int64_t start = 0; start < p.num_columns; start += kBlockColumns) {
            const Block block(start, p.num_columns);
            widen_block(p, block, first, num_outputs, widened);
            for (int64_t row = 0; row < num_rows; row += kCachedRows) {
                const int64_t stop = std::min(row + kCachedRows, num_rows);
                for (int64_t n = 0; n < num_outputs; n += kTileOutputs) {
                    const int64_t count = std::min(kTileOutputs, num_outputs - n);
                    multiply_panel(block, row, stop, first + n, count,
                                   widened + n * block.stride());
                }
            }
        }
    }
};

void pack_task(void *context, int64_t start, int64_t stop) {
    const Pass &pass = *static_cast<Pass *>(context);
    for (int64_t idx = start; idx < stop; ++idx) {
        pass.pack_block(Block(idx * kBlockColumns, pass.p.num_columns));
    }
}

void multiply_task(void *context, int64_t start, int64_t stop) {
    for (int64_t chunk = start; chunk < stop; ++chunk) {
        static_cast<Pass *>(context)->multiply_chunk(chunk);
    }
}

/* One row is packed sooner than a thread wakes. */
int pack(Pass &pass, zi_team *team) {
    const int64_t num_blocks = (pass.p.num_columns + kBlockColumns - 1) / kBlockColumns;
    if (pass.num_rows < 16) {
        pack_task(&pass, 0, num_blocks);
        return 0;
    }
    return zi_team_run(team, num_blocks, pack_task, &pass);
}

int multiply_fast(const zi_linear_params &p, float *scratch, zi_team *team) {
    for (int64_t row = 0; row < p.num_rows; row += kPassRows) {
        Pass pass{p, row, std::min(kPassRows, p.num_rows - row), scratch};
        int error = pack(pass, team);
        if (error == 0) {
            error = zi_team_run(team, pass.num_chunks(), multiply_task, &pass);
        }
        if (error != 0) {
            return error;
        }
    }
    return 0;
}

#endif

}  // namespace

size_t zi_linear_scratch_bytes(int64_t num_rows, int64_t num_columns) {
    return size_t(std::min(num_rows, kPassRows) * align_up(num_columns, kLanes)) * sizeof(float);
}

int zi_linear_reference(const zi_linear_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    const zi_linear_params &p = *params;
    for (int64_t m = 0; m < p.num_rows; ++m) {
        for (int64_t n = 0; n < p.num_outputs; ++n) {
            float &out = p.out[m * p.out_stride + n];
            for (int64_t start = 0; start < p.num_columns; start += kBlockColumns) {
                const Block block(start, p.num_columns);
                const float sum = block_sum(p, block, m, n);
                out = p.is_accumulated || !block.is_first() ? out + sum : sum;
            }
        }
    }
    return 0;
}

int zi_linear(const zi_linear_params *params, void *scratch, size_t scratch_bytes, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    if (scratch_bytes < zi_linear_scratch_bytes(params->num_rows, params->num_columns)) {
        return -ENOSPC;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return multiply_fast(*params, static_cast<float *>(scratch), team);
    }
#endif
    (void)scratch;
    (void)team;
    return zi_linear_reference(params);
}
