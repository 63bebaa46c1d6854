#include "zeroinfer/kernels.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <cerrno>
#include <new>
#include <optional>
#include <string>

#include "areas.h"
#include "arrays.h"
#include "zeroinfer/attention.h"

namespace nb = nanobind;

namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntegerTable = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatTable = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

/* Call a kernel, or its reference where num_threads is 0, without the interpreter's lock. */
template <typename Params>
void call(int (*kernel)(const Params *, zi_team *), int (*reference)(const Params *),
          const Params &params, int num_threads) {
    int error;
    {
        nb::gil_scoped_release release;
        error = num_threads > 0 ? kernel(&params, zi_team_shared(num_threads)) : reference(&params);
    }
    if (error == -ENOMEM) {
        throw std::bad_alloc();
    }
    if (error != 0) {
        throw nb::value_error("the kernel refused sizes, slots or block tables");
    }
}

template <typename A>
const void *optional_data(const std::optional<A> &array) {
    return array ? array->data() : nullptr;
}

void norm(const Array &x, const Array &out, const ConstArray &weight,
          const std::optional<ConstArray> &bias, const std::optional<ConstArray> &residual,
          float eps, bool is_rms, int num_threads) {
    require_shape(x, "x", {-1, -1});
    const int64_t num_rows = int64_t(x.shape(0));
    const int64_t num_columns = int64_t(x.shape(1));
    zi_norm_params params{};
    params.num_rows = num_rows;
    params.num_columns = num_columns;
    params.dtype = dtype_of(x, "x");
    params.weight_dtype = dtype_of(weight, "weight", true);
    require_shape(out, "out", {num_rows, num_columns});
    require_shape(weight, "weight", {num_columns});
    require_dtype(out, "out", params.dtype);
    require_dense(x, "x", 1);
    require_dense(out, "out", 1);
    require_dense(weight, "weight", 1);
    if (bias) {
        require_shape(*bias, "bias", {num_columns});
        require_dtype(*bias, "bias", params.weight_dtype);
        require_dense(*bias, "bias", 1);
    }
    if (residual) {
        require_shape(*residual, "residual", {num_rows, num_columns});
        require_dtype(*residual, "residual", params.dtype);
        require_dense(*residual, "residual", 1);
        params.residual_stride = residual->stride(0);
    }
    params.x = x.data();
    params.x_stride = x.stride(0);
    params.residual = optional_data(residual);
    params.out = out.data();
    params.out_stride = out.stride(0);
    params.weight = weight.data();
    params.bias = optional_data(bias);
    params.eps = eps;
    params.is_rms = is_rms;
    call(zi_norm, zi_norm_reference, params, num_threads);
}

/* Angles of the rows of heads; cos and sin are (rows, pairs). */
zi_rotation rotation_of(const ConstArray &cos, const ConstArray &sin, bool is_interleaved,
                        int64_t num_rows, int64_t head_dim) {
    require_shape(cos, "cos", {num_rows, -1});
    require_shape(sin, "sin", {num_rows, int64_t(cos.shape(1))});
    zi_rotation rotation{};
    rotation.table_dtype = dtype_of(cos, "cos");
    require_dtype(sin, "sin", rotation.table_dtype);
    require_dense(cos, "cos", 2);
    require_dense(sin, "sin", 2);
    rotation.table_stride = int64_t(cos.shape(1));
    rotation.rotary_dim = 2 * rotation.table_stride;
    if (rotation.rotary_dim > head_dim) {
        throw nb::value_error(("cos: more pairs than a head has: got " +
                               std::to_string(rotation.table_stride) + ", need at most " +
                               std::to_string(head_dim / 2))
                                  .c_str());
    }
    rotation.cos = cos.data();
    rotation.sin = sin.data();
    rotation.is_interleaved = is_interleaved;
    return rotation;
}

void rotary(const Array &x, const ConstArray &cos, const ConstArray &sin, bool is_interleaved,
            int num_threads) {
    require_shape(x, "x", {-1, -1, -1});
    require_dense(x, "x", 1);
    zi_rotary_params params{};
    params.num_rows = int64_t(x.shape(0));
    params.num_heads = int64_t(x.shape(1));
    params.dtype = dtype_of(x, "x");
    params.x = x.data();
    params.row_stride = x.stride(0);
    params.head_stride = x.stride(1);
    params.rotation = rotation_of(cos, sin, is_interleaved, params.num_rows, int64_t(x.shape(2)));
    call(zi_rotary, zi_rotary_reference, params, num_threads);
}

void activate(int activation, const ConstArray &x, const std::optional<ConstArray> &bias,
              const std::optional<ConstArray> &up, const Array &out, int num_threads) {
    require_shape(x, "x", {-1, -1});
    const int64_t num_rows = int64_t(x.shape(0));
    const int64_t num_columns = int64_t(x.shape(1));
    zi_activation_params params{};
    params.activation = activation;
    params.dtype = dtype_of(x, "x");
    require_shape(out, "out", {num_rows, num_columns});
    require_dtype(out, "out", params.dtype);
    require_dense(x, "x", 1);
    require_dense(out, "out", 1);
    if (bias) {
        require_shape(*bias, "bias", {num_columns});
        require_dense(*bias, "bias", 1);
        params.bias_dtype = dtype_of(*bias, "bias", true);
    }
    if (up) {
        require_shape(*up, "up", {num_rows, num_columns});
        require_dtype(*up, "up", params.dtype);
        require_dense(*up, "up", 1);
        params.up_stride = up->stride(0);
    }
    params.num_rows = num_rows;
    params.num_columns = num_columns;
    params.x = x.data();
    params.x_stride = x.stride(0);
    params.bias = optional_data(bias);
    params.up = optional_data(up);
    params.out = out.data();
    params.out_stride = out.stride(0);
    call(zi_activate, zi_activate_reference, params, num_threads);
}

zi_kv_plane plane_of(const Array &plane, const char *name) {
    require_shape(plane, name, {-1, -1, -1, -1});
    require_dense(plane, name, 4);
    zi_kv_plane result{};
    result.data = plane.data();
    result.dtype = dtype_of(plane, name);
    result.num_blocks = int64_t(plane.shape(0));
    result.num_heads = int64_t(plane.shape(1));
    result.block_size = int64_t(plane.shape(2));
    result.head_dim = int64_t(plane.shape(3));
    return result;
}

void kv_write(const ConstArray &values, const Integers &slots, const Array &plane,
              const std::optional<ConstArray> &cos, const std::optional<ConstArray> &sin,
              bool is_interleaved, int num_threads) {
    zi_kv_write_params params{};
    params.plane = plane_of(plane, "plane");
    require_shape(values, "values", {-1, params.plane.num_heads, params.plane.head_dim});
    require_shape(slots, "slots", {int64_t(values.shape(0))});
    require_dense(values, "values", 1);
    if (cos.has_value() != sin.has_value()) {
        throw nb::value_error("cos and sin: need both or neither");
    }
    params.num_rows = int64_t(values.shape(0));
    params.dtype = dtype_of(values, "values");
    params.values = values.data();
    params.row_stride = values.stride(0);
    params.head_stride = values.stride(1);
    params.slots = slots.data();
    if (cos) {
        params.rotation =
            rotation_of(*cos, *sin, is_interleaved, params.num_rows, params.plane.head_dim);
    }
    call(zi_kv_write, zi_kv_write_reference, params, num_threads);
}

void attention(const ConstArray &query, const Array &out, const Array &key, const Array &value,
               const IntegerTable &sequences, const IntegerTable &tables,
               const std::optional<FloatTable> &bias, float scale, int64_t window,
               int num_threads) {
    static_assert(sizeof(zi_sequence_rows) == 3 * sizeof(int64_t));
    zi_attention_params params{};
    params.key = plane_of(key, "key");
    params.value = plane_of(value, "value");
    require_shape(query, "query", {-1, -1, params.key.head_dim});
    params.num_rows = int64_t(query.shape(0));
    params.num_heads = int64_t(query.shape(1));
    require_shape(out, "out", {params.num_rows, params.num_heads, params.key.head_dim});
    require_shape(sequences, "sequences", {-1, 3});
    require_shape(tables, "tables", {int64_t(sequences.shape(0)), -1});
    if (bias) {
        require_shape(*bias, "bias", {params.num_heads, -1});
        params.bias = bias->data();
        params.bias_width = int64_t(bias->shape(1));
    }
    params.dtype = dtype_of(query, "query");
    require_dtype(out, "out", params.dtype);
    require_dense(query, "query", 2);
    require_dense(out, "out", 2);
    params.query = query.data();
    params.query_stride = query.stride(0);
    params.out = out.data();
    params.out_stride = out.stride(0);
    params.num_sequences = int64_t(sequences.shape(0));
    params.sequences = reinterpret_cast<const zi_sequence_rows *>(sequences.data());
    params.tables = tables.data();
    params.table_width = int64_t(tables.shape(1));
    params.scale = scale;
    params.window = window;
    call(zi_attention, zi_attention_reference, params, num_threads);
}

void half_to_bf16(const ConstArray &source, const Array &target, int num_threads) {
    if (!is_dtype(source.dtype(), nb::dlpack::dtype_code::Float, 16)) {
        throw nb::type_error("source: need fp16");
    }
    require_shape(source, "source", {-1});
    require_shape(target, "target", {int64_t(source.shape(0))});
    require_dtype(target, "target", ZI_BF16);
    require_dense(source, "source", 1);
    require_dense(target, "target", 1);
    const int64_t count = int64_t(source.shape(0));
    nb::gil_scoped_release release;
    if (num_threads > 0) {
        zi_half_to_bf16(source.data(), target.data(), count, zi_team_shared(num_threads));
    } else {
        zi_half_to_bf16_reference(source.data(), target.data(), count);
    }
}

}  // namespace

void bind_kernels(nb::module_ &m) {
    m.def(
        "kernels_are_fast", [] { return zi_kernels_are_fast() != 0; },
        "Whether this processor has the vector variants of the kernels.");
    m.attr("attention_max_head_dim") = ZI_ATTENTION_MAX_HEAD_DIM;
    m.def("norm", &norm, nb::arg("x").noconvert(), nb::arg("out").noconvert(),
          nb::arg("weight").noconvert(), nb::arg("bias").noconvert().none(),
          nb::arg("residual").noconvert().none(), nb::arg("eps"), nb::arg("is_rms"),
          nb::arg("num_threads"),
          "Set out (T, N) to the norm of x, after x += residual; 0 threads: the reference.");
    m.def("rotary", &rotary, nb::arg("x").noconvert(), nb::arg("cos").noconvert(),
          nb::arg("sin").noconvert(), nb::arg("is_interleaved"), nb::arg("num_threads"),
          "Rotate the first 2 C columns of every head of x (T, H, D); cos and sin are (T, C).");
    m.def("activate", &activate, nb::arg("activation"), nb::arg("x").noconvert(),
          nb::arg("bias").noconvert().none(), nb::arg("up").noconvert().none(),
          nb::arg("out").noconvert(), nb::arg("num_threads"),
          "Set out (T, N) to activation(x + bias) * up: 0 relu, 1 silu, 2 gelu, 3 tanh gelu.");
    m.def("kv_write", &kv_write, nb::arg("values").noconvert(), nb::arg("slots").noconvert(),
          nb::arg("plane").noconvert(), nb::arg("cos").noconvert().none(),
          nb::arg("sin").noconvert().none(), nb::arg("is_interleaved"), nb::arg("num_threads"),
          "Store values (T, V, D) at their slots of plane (blocks, V, block size, D), rotated if "
          "there are cos and sin, (T, C).");
    m.def("attention", &attention, nb::arg("query").noconvert(), nb::arg("out").noconvert(),
          nb::arg("key").noconvert(), nb::arg("value").noconvert(),
          nb::arg("sequences").noconvert(), nb::arg("tables").noconvert(),
          nb::arg("bias").noconvert().none(), nb::arg("scale"), nb::arg("window"),
          nb::arg("num_threads"),
          "Attend with query (T, H, D) over the planes; sequences lists row, rows, position.");
    m.def("half_to_bf16", &half_to_bf16, nb::arg("source").noconvert(),
          nb::arg("target").noconvert(), nb::arg("num_threads"),
          "Convert fp16 to bf16, in place or between arrays.");
}
