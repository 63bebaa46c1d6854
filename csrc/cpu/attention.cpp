#include "zeroinfer/attention.h"

#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "chunks.h"
#include "elements.h"
#include "kv_plane.h"
#include "vectors.h"

namespace {

using zi::load_one;
using zi::store_one;

constexpr int64_t kMaxDim = ZI_ATTENTION_MAX_HEAD_DIM;
/* Positions are compared as 32-bit lanes. */
constexpr int64_t kMaxPosition = int64_t{1} << 30;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

/* Positions [start, stop). */
struct Range {
    int64_t start;
    int64_t stop;
};

/* The rows of one sequence, and what they may see. */
struct Sequence {
    const zi_attention_params &p;
    zi_sequence_rows rows;
    const int64_t *table;

    Sequence(const zi_attention_params &params, int64_t idx)
        : p(params), rows(params.sequences[idx]), table(params.tables + idx * params.table_width) {}

    Range seen_by(int64_t row) const {
        const int64_t stop = rows.first_position + row + 1;
        return {p.window > 0 ? std::max<int64_t>(stop - p.window, 0) : 0, stop};
    }

    template <typename K>
    const K *token(const zi_kv_plane &plane, int64_t head, int64_t position) const {
        const int64_t block = table[position / plane.block_size];
        return zi::token_at<K>(plane, block, head, position % plane.block_size);
    }

    template <typename T>
    const T *query(int64_t row, int64_t head) const {
        const auto *first = static_cast<const T *>(p.query);
        return first + (rows.first_row + row) * p.query_stride + head * p.key.head_dim;
    }

    template <typename T>
    T *out(int64_t row, int64_t head) const {
        auto *first = static_cast<T *>(p.out);
        return first + (rows.first_row + row) * p.out_stride + head * p.key.head_dim;
    }
};

template <typename T, typename K>
double score_by_definition(const Sequence &sequence, const T *query, int64_t head,
                           int64_t position) {
    const zi_attention_params &p = sequence.p;
    const int64_t group = p.num_heads / p.key.num_heads;
    const K *key = sequence.token<K>(p.key, head / group, position);
    double product = 0;
    for (int64_t d = 0; d < p.key.head_dim; ++d) {
        product += double(load_one(query + d)) * double(load_one(key + d));
    }
    const double bias = p.bias == nullptr ? 0 : double(p.bias[head * p.bias_width + position]);
    return product * double(p.scale) + bias;
}

template <typename T, typename K>
void attend_by_definition(const Sequence &sequence, int64_t row, int64_t head) {
    const zi_attention_params &p = sequence.p;
    const int64_t group = p.num_heads / p.key.num_heads;
    const Range seen = sequence.seen_by(row);
    const T *query = sequence.query<T>(row, head);
    double largest = double(kHidden);
    for (int64_t position = seen.start; position < seen.stop; ++position) {
        largest = std::max(largest, score_by_definition<T, K>(sequence, query, head, position));
    }
    double total = 0;
    double sums[kMaxDim] = {};
    for (int64_t position = seen.start; position < seen.stop; ++position) {
        const double score = score_by_definition<T, K>(sequence, query, head, position);
        const double weight = std::exp(score - largest);
        const K *value = sequence.token<K>(p.value, head / group, position);
        total += weight;
        for (int64_t d = 0; d < p.key.head_dim; ++d) {
            sums[d] += weight * double(load_one(value + d));
        }
    }
    T *out = sequence.out<T>(row, head);
    for (int64_t d = 0; d < p.key.head_dim; ++d) {
        store_one(out + d, float(sums[d] / total));
    }
}

template <typename T, typename K>
int attend_all_by_definition(const zi_attention_params &p) {
    for (int64_t idx = 0; idx < p.num_sequences; ++idx) {
        const Sequence sequence(p, idx);
        for (int64_t row = 0; row < sequence.rows.num_rows; ++row) {
            for (int64_t head = 0; head < p.num_heads; ++head) {
                attend_by_definition<T, K>(sequence, row, head);
            }
        }
    }
    return 0;
}

#if defined(__x86_64__)

/* Keys between two updates of the softmax: their scores stay in the first-level cache. */
constexpr int64_t kTileKeys = 64;
/* Queries, rows times heads, that share the reading of a key. */
constexpr int64_t kMaxQueries = 16;
constexpr int64_t kOctet = zi::kLanes;

constexpr int64_t ceil_div(int64_t value, int64_t step) {
    return (value + step - 1) / step;
}

/* Some rows of a sequence and some query heads, all of one key/value head. */
struct Item {
    int64_t kv_head;
    int64_t first_row;
    int64_t num_rows;
    int64_t first_head;
    int64_t num_heads;
};

/* How the work is cut into items; no cut changes a bit. */
struct Grid {
    int64_t num_kv_heads;
    int64_t group;
    int64_t heads_per_item;
    int64_t rows_per_item;

    explicit Grid(const zi_attention_params &p)
        : num_kv_heads(p.key.num_heads),
          group(p.num_heads / p.key.num_heads),
          heads_per_item(std::min(group, kMaxQueries)),
          rows_per_item(kMaxQueries / heads_per_item) {}

    int64_t num_items(const zi_sequence_rows &rows) const {
        const int64_t head_tiles = ceil_div(group, heads_per_item);
        return num_kv_heads * head_tiles * ceil_div(rows.num_rows, rows_per_item);
    }

    /* Items of one key/value head are neighbours: its keys stay in the second-level cache. */
    Item item(const zi_sequence_rows &rows, int64_t idx) const {
        const int64_t row_tiles = ceil_div(rows.num_rows, rows_per_item);
        const int64_t head_tiles = ceil_div(group, heads_per_item);
        const int64_t first_row = idx % row_tiles * rows_per_item;
        const int64_t first_in_group = idx / row_tiles % head_tiles * heads_per_item;
        const int64_t kv_head = idx / row_tiles / head_tiles;
        return {kv_head, first_row, std::min(rows_per_item, rows.num_rows - first_row),
                kv_head * group + first_in_group, std::min(heads_per_item, group - first_in_group)};
    }
};

/* A row of keys or values as floats, padded with zeros; where it lies if it is so already. */
template <typename K>
ZI_AVX2 const float *as_floats(const K *source, int64_t dim, int64_t stride, float *target) {
    if constexpr (std::is_same_v<K, float>) {
        if (dim == stride) {
            return source;
        }
    }
    int64_t d = 0;
    for (; d + zi::kLanes <= dim; d += zi::kLanes) {
        zi::store8(target + d, zi::load8(source + d));
    }
    for (; d < stride; ++d) {
        target[d] = d < dim ? load_one(source + d) : 0.0F;
    }
    return target;
}

/* Products of a query with eight keys; the lanes of each are added by the tree of sum8. */
ZI_AVX2 __m256 dot_octet(const float *query, const float *const *keys, int64_t stride) {
    __m256 sums[kOctet];
    for (int64_t j = 0; j < kOctet; ++j) {
        sums[j] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < stride; d += zi::kLanes) {
        const __m256 lanes = zi::load8(query + d);
        for (int64_t j = 0; j < kOctet; ++j) {
            sums[j] = _mm256_fmadd_ps(lanes, zi::load8(keys[j] + d), sums[j]);
        }
    }
    const __m256 first =
        _mm256_hadd_ps(_mm256_hadd_ps(sums[0], sums[1]), _mm256_hadd_ps(sums[2], sums[3]));
    const __m256 second =
        _mm256_hadd_ps(_mm256_hadd_ps(sums[4], sums[5]), _mm256_hadd_ps(sums[6], sums[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                         _mm256_permute2f128_ps(first, second, 0x31));
}

/* sums += weights * values, one value after the other. */
ZI_AVX2 void add_octet(float *sums, const float *weights, const float *const *values,
                       int64_t stride) {
    __m256 factors[kOctet];
    for (int64_t j = 0; j < kOctet; ++j) {
        factors[j] = _mm256_broadcast_ss(weights + j);
    }
    for (int64_t d = 0; d < stride; d += zi::kLanes) {
        __m256 sum = zi::load8(sums + d);
        for (int64_t j = 0; j < kOctet; ++j) {
            sum = _mm256_fmadd_ps(factors[j], zi::load8(values[j] + d), sum);
        }
        zi::store8(sums + d, sum);
    }
}

/*
 * One item. Tiles and octets of keys lie at fixed positions, and a query takes part in an octet if
 * it sees a key of it: what it adds, and in which order, follows from its own position alone.
 */
template <typename T, typename K>
struct Work {
    const Sequence &sequence;
    const zi_attention_params &p;
    const Item item;
    const int64_t dim;
    const int64_t stride;
    const int64_t num_queries;
    const Range seen;
    float largest[kMaxQueries];
    float total[kMaxQueries];
    Range ranges[kMaxQueries];
    alignas(32) float weights[kMaxQueries * kTileKeys];
    alignas(32) float octet[kOctet * kMaxDim];
    alignas(32) float queries[kMaxQueries * kMaxDim];
    alignas(32) float sums[kMaxQueries * kMaxDim];

    Work(const Sequence &rows, const Item &work)
        : sequence(rows),
          p(rows.p),
          item(work),
          dim(p.key.head_dim),
          stride(ceil_div(dim, zi::kLanes) * zi::kLanes),
          num_queries(item.num_rows * item.num_heads),
          seen{rows.seen_by(item.first_row).start,
               rows.seen_by(item.first_row + item.num_rows - 1).stop} {}

    int64_t row_of(int64_t query) const { return item.first_row + query / item.num_heads; }
    int64_t head_of(int64_t query) const { return item.first_head + query % item.num_heads; }

    bool sees(int64_t query, int64_t start, int64_t stop) const {
        return start < ranges[query].stop && stop > ranges[query].start;
    }

    ZI_AVX2 void run() {
        load_queries();
        const int64_t first_octet = seen.start / kOctet * kOctet;
        for (int64_t tile = seen.start / kTileKeys * kTileKeys; tile < seen.stop;
             tile += kTileKeys) {
            const Range keys{std::max(tile, first_octet), std::min(tile + kTileKeys, seen.stop)};
            score(keys);
            weigh(keys);
            add_values(keys);
        }
        store();
    }

    ZI_AVX2 void load_queries() {
        for (int64_t idx = 0; idx < num_queries; ++idx) {
            const T *source = sequence.template query<T>(row_of(idx), head_of(idx));
            float *target = queries + idx * stride;
            for (int64_t d = 0; d < stride; ++d) {
                target[d] = d < dim ? load_one(source + d) * p.scale : 0.0F;
                sums[idx * stride + d] = 0.0F;
            }
            ranges[idx] = sequence.seen_by(row_of(idx));
            largest[idx] = kHidden;
            total[idx] = 0.0F;
        }
    }

    /* Eight rows from `position` on; lanes that nobody sees repeat a row that was written. */
    ZI_AVX2 void fetch(const zi_kv_plane &plane, int64_t position, const float **rows) {
        const bool is_seen = position >= seen.start && position + kOctet <= seen.stop;
        if (is_seen && position % plane.block_size + kOctet <= plane.block_size) {
            const K *first = sequence.template token<K>(plane, item.kv_head, position);
            for (int64_t j = 0; j < kOctet; ++j) {
                rows[j] = as_floats(first + j * dim, dim, stride, octet + j * stride);
            }
            return;
        }
        for (int64_t j = 0; j < kOctet; ++j) {
            const int64_t real = std::clamp(position + j, seen.start, seen.stop - 1);
            const K *row = sequence.template token<K>(plane, item.kv_head, real);
            rows[j] = as_floats(row, dim, stride, octet + j * stride);
        }
    }

    /* The table may end within the octet. */
    ZI_AVX2 __m256 bias_octet(int64_t head, int64_t position) const {
        const float *row = p.bias + head * p.bias_width;
        if (position + kOctet <= p.bias_width) {
            return zi::load8(row + position);
        }
        float lanes[kOctet] = {};
        std::copy(row + position, row + p.bias_width, lanes);
        return zi::load8(lanes);
    }

    ZI_AVX2 __m256 octet_scores(int64_t query, int64_t position, const float *const *keys) const {
        const Range &range = ranges[query];
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i positions = _mm256_add_epi32(_mm256_set1_epi32(int(position)), lanes);
        __m256 scores = dot_octet(queries + query * stride, keys, stride);
        if (p.bias != nullptr) {
            scores = _mm256_add_ps(scores, bias_octet(head_of(query), position));
        }
        const __m256i is_late =
            _mm256_cmpgt_epi32(positions, _mm256_set1_epi32(int(range.stop) - 1));
        const __m256i is_early = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(range.start)), positions);
        const __m256 is_hidden = _mm256_castsi256_ps(_mm256_or_si256(is_late, is_early));
        return _mm256_blendv_ps(scores, _mm256_set1_ps(kHidden), is_hidden);
    }

    ZI_AVX2 void score(const Range &keys) {
        for (int64_t position = keys.start; position < keys.stop; position += kOctet) {
            const float *rows[kOctet];
            fetch(p.key, position, rows);
            for (int64_t idx = 0; idx < num_queries; ++idx) {
                float *target = weights + idx * kTileKeys + (position - keys.start);
                const bool is_seen = sees(idx, position, position + kOctet);
                zi::store8(target,
                           is_seen ? octet_scores(idx, position, rows) : _mm256_set1_ps(kHidden));
            }
        }
    }

    /* Scores to weights against the largest score so far; what was summed before is rescaled. */
    ZI_AVX2 void weigh(const Range &keys) {
        const int64_t count = ceil_div(keys.stop - keys.start, kOctet) * kOctet;
        for (int64_t idx = 0; idx < num_queries; ++idx) {
            if (!sees(idx, keys.start, keys.stop)) {
                continue;
            }
            float *row = weights + idx * kTileKeys;
            __m256 top = _mm256_set1_ps(kHidden);
            for (int64_t k = 0; k < count; k += kOctet) {
                top = _mm256_max_ps(zi::load8(row + k), top);
            }
            rescale(idx, std::max(largest[idx], zi::max8(top)));
            __m256 sum = _mm256_setzero_ps();
            for (int64_t k = 0; k < count; k += kOctet) {
                const __m256 below =
                    _mm256_sub_ps(zi::load8(row + k), _mm256_set1_ps(largest[idx]));
                const __m256 weight = zi::exp8(below);
                zi::store8(row + k, weight);
                sum = _mm256_add_ps(sum, weight);
            }
            total[idx] += zi::sum8(sum);
        }
    }

    ZI_AVX2 void rescale(int64_t query, float new_largest) {
        if (new_largest == largest[query]) {
            return;
        }
        const __m256 factor = zi::exp8(_mm256_set1_ps(largest[query] - new_largest));
        float *row = sums + query * stride;
        for (int64_t d = 0; d < stride; d += zi::kLanes) {
            zi::store8(row + d, _mm256_mul_ps(zi::load8(row + d), factor));
        }
        total[query] *= _mm256_cvtss_f32(factor);
        largest[query] = new_largest;
    }

    ZI_AVX2 void add_values(const Range &keys) {
        for (int64_t position = keys.start; position < keys.stop; position += kOctet) {
            const float *rows[kOctet];
            fetch(p.value, position, rows);
            for (int64_t idx = 0; idx < num_queries; ++idx) {
                if (sees(idx, position, position + kOctet)) {
                    const float *factors = weights + idx * kTileKeys + (position - keys.start);
                    add_octet(sums + idx * stride, factors, rows, stride);
                }
            }
        }
    }

    ZI_AVX2 void store() const {
        for (int64_t idx = 0; idx < num_queries; ++idx) {
            T *target = sequence.template out<T>(row_of(idx), head_of(idx));
            const float *row = sums + idx * stride;
            int64_t d = 0;
            for (; d + zi::kLanes <= dim; d += zi::kLanes) {
                zi::store8(target + d,
                           _mm256_div_ps(zi::load8(row + d), _mm256_set1_ps(total[idx])));
            }
            for (; d < dim; ++d) {
                store_one(target + d, row[d] / total[idx]);
            }
        }
    }
};

template <typename T, typename K>
ZI_AVX2 void attend_item(const Sequence &sequence, const Item &item) {
    Work<T, K> work(sequence, item);
    work.run();
}

/* Memory and arithmetic of an item, counted as bytes: four queries read a key as fast as one. */
int64_t bytes_of(const zi_attention_params &p, const zi_sequence_rows &rows, int64_t num_queries) {
    const int64_t stop = rows.first_position + rows.num_rows;
    const int64_t length = p.window > 0 ? std::min(stop, p.window + rows.num_rows) : stop;
    const int64_t token_bytes = 2 * p.key.head_dim * (p.key.dtype == ZI_F32 ? 4 : 2);
    return length * token_bytes * std::max<int64_t>(num_queries / 4, 1);
}

template <typename T, typename K>
int attend_fast(const zi_attention_params &p, zi_team *team) {
    const Grid grid(p);
    const size_t num_borders = size_t(p.num_sequences) + 1;
    const std::unique_ptr<int64_t[]> first_item(new (std::nothrow) int64_t[num_borders]);
    if (first_item == nullptr) {
        return -ENOMEM;
    }
    int64_t num_items = 0;
    int64_t num_bytes = 0;
    for (int64_t idx = 0; idx < p.num_sequences; ++idx) {
        const zi_sequence_rows &rows = p.sequences[idx];
        const int64_t count = grid.num_items(rows);
        const int64_t num_queries =
            std::min(rows.num_rows, grid.rows_per_item) * grid.heads_per_item;
        first_item[size_t(idx)] = num_items;
        num_items += count;
        num_bytes += count * bytes_of(p, rows, num_queries);
    }
    first_item[num_borders - 1] = num_items;
    const int64_t *borders = first_item.get();
    const auto body = [&](int64_t start, int64_t stop) {
        for (int64_t idx = start; idx < stop; ++idx) {
            const int64_t owner =
                std::upper_bound(borders, borders + num_borders, idx) - borders - 1;
            const Sequence sequence(p, owner);
            attend_item<T, K>(sequence, grid.item(sequence.rows, idx - borders[owner]));
        }
    };
    return zi::for_items(team, num_items, num_bytes / std::max<int64_t>(num_items, 1), body);
}

#endif

bool is_same_shape(const zi_kv_plane &a, const zi_kv_plane &b) {
    return a.dtype == b.dtype && a.num_blocks == b.num_blocks && a.num_heads == b.num_heads &&
           a.block_size == b.block_size && a.head_dim == b.head_dim;
}

bool is_sound_sequence(const zi_attention_params &p, int64_t idx) {
    const zi_sequence_rows &rows = p.sequences[idx];
    if (rows.first_row < 0 || rows.num_rows < 0 || rows.first_position < 0 ||
        rows.first_position > kMaxPosition || rows.num_rows > p.num_rows ||
        rows.first_row > p.num_rows - rows.num_rows) {
        return false;
    }
    const int64_t stop = rows.first_position + rows.num_rows;
    const int64_t num_blocks = (stop + p.key.block_size - 1) / p.key.block_size;
    const bool is_in_bias = p.bias == nullptr || stop <= p.bias_width;
    if (stop > kMaxPosition || num_blocks > p.table_width || !is_in_bias) {
        return false;
    }
    const int64_t *table = p.tables + idx * p.table_width;
    return std::all_of(table, table + num_blocks,
                       [&](int64_t block) { return block >= 0 && block < p.key.num_blocks; });
}

int check(const zi_attention_params *p) {
    if (p == nullptr || !zi::is_activation_dtype(p->dtype) || !zi::is_sound(p->key) ||
        !zi::is_sound(p->value) || !is_same_shape(p->key, p->value)) {
        return -EINVAL;
    }
    if (p->num_heads < 1 || p->num_heads % p->key.num_heads != 0 || p->key.head_dim > kMaxDim) {
        return -EINVAL;
    }
    if (p->num_rows < 0 || p->window < 0 || p->num_sequences < 0 || p->table_width < 0) {
        return -EINVAL;
    }
    const bool is_there =
        p->query != nullptr && p->out != nullptr && p->sequences != nullptr && p->tables != nullptr;
    if (p->num_sequences > 0 && !is_there) {
        return -EINVAL;
    }
    for (int64_t idx = 0; idx < p->num_sequences; ++idx) {
        if (!is_sound_sequence(*p, idx)) {
            return -EINVAL;
        }
    }
    return 0;
}

}  // namespace

int zi_attention_reference(const zi_attention_params *params) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
    return zi::with_activations(
        params->dtype, params->key.dtype, [&](auto element, auto stored) {
            return attend_all_by_definition<decltype(element), decltype(stored)>(*params);
        });
}

int zi_attention(const zi_attention_params *params, zi_team *team) {
    const int error = check(params);
    if (error != 0) {
        return error;
    }
#if defined(__x86_64__)
    if (zi_kernels_are_fast()) {
        return zi::with_activations(
            params->dtype, params->key.dtype, [&](auto element, auto stored) {
                return attend_fast<decltype(element), decltype(stored)>(*params, team);
            });
    }
#endif
    (void)team;
    return zi_attention_reference(params);
}
