#include "zeroinfer/linear.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cerrno>
#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace {

using Matrix = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Weight = nb::ndarray<nb::ro, nb::ndim<2>, nb::device::cpu>;
using Scratch = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

zi_dtype weight_dtype(const Weight &weight) {
    const nb::dlpack::dtype dtype = weight.dtype();
    const auto code = nb::dlpack::dtype_code(dtype.code);
    if (dtype.lanes == 1 && code == nb::dlpack::dtype_code::Float && dtype.bits == 32) {
        return ZI_F32;
    }
    if (dtype.lanes == 1 && code == nb::dlpack::dtype_code::Float && dtype.bits == 16) {
        return ZI_F16;
    }
    if (dtype.lanes == 1 && code == nb::dlpack::dtype_code::Bfloat && dtype.bits == 16) {
        return ZI_BF16;
    }
    throw nb::type_error("weight: need fp32, bf16 or fp16");
}

void check_shapes(const Matrix &x, const Weight &weight, const Matrix &out) {
    const auto shape = [](const auto &array) {
        return "(" + std::to_string(array.shape(0)) + ", " + std::to_string(array.shape(1)) + ")";
    };
    if (x.shape(1) != weight.shape(1) || out.shape(0) != x.shape(0) ||
        out.shape(1) != weight.shape(0)) {
        throw std::invalid_argument("x " + shape(x) + ", weight " + shape(weight) + " and out " +
                                    shape(out) + " do not fit: need (M, K), (N, K), (M, N)");
    }
    const bool is_x_dense = x.stride(1) == 1 || x.shape(1) < 2;
    const bool is_out_dense = out.stride(1) == 1 || out.shape(1) < 2;
    if (!is_x_dense || !is_out_dense) {
        throw std::invalid_argument("x and out need contiguous columns");
    }
}

zi_linear_params params_of(const Matrix &x, const Weight &weight, const Matrix &out,
                           bool is_accumulated) {
    check_shapes(x, weight, out);
    zi_linear_params params{};
    params.num_rows = int64_t(x.shape(0));
    params.num_outputs = int64_t(weight.shape(0));
    params.num_columns = int64_t(x.shape(1));
    params.x = x.data();
    params.x_stride = x.stride(0);
    params.weight = weight.data();
    params.weight_dtype = weight_dtype(weight);
    params.weight_stride = weight.stride(0);
    params.weight_column_stride = weight.shape(1) < 2 ? 1 : weight.stride(1);
    params.out = out.data();
    params.out_stride = out.stride(0);
    params.is_accumulated = is_accumulated;
    return params;
}

void raise_for(int error) {
    if (error == -ENOSPC) {
        throw std::invalid_argument("scratch is smaller than linear_scratch_bytes asks for");
    }
    if (error != 0) {
        throw std::invalid_argument("sizes or strides of x, weight and out make no sense");
    }
}

void linear(const Matrix &x, const Weight &weight, const Matrix &out, const Scratch &scratch,
            int num_threads, bool is_accumulated) {
    const zi_linear_params params = params_of(x, weight, out, is_accumulated);
    zi_team *team = zi_team_shared(num_threads);
    if (team == nullptr) {
        throw std::invalid_argument("num_threads must be at least 1, got " +
                                    std::to_string(num_threads));
    }
    int error;
    {
        nb::gil_scoped_release release;
        error = zi_linear(&params, scratch.data(), scratch.nbytes(), team);
    }
    raise_for(error);
}

void linear_reference(const Matrix &x, const Weight &weight, const Matrix &out,
                      bool is_accumulated) {
    const zi_linear_params params = params_of(x, weight, out, is_accumulated);
    int error;
    {
        nb::gil_scoped_release release;
        error = zi_linear_reference(&params);
    }
    raise_for(error);
}

}  // namespace

void bind_linear(nb::module_ &m) {
    m.def("linear", &linear, nb::arg("x").noconvert(), nb::arg("weight").noconvert(),
          nb::arg("out").noconvert(), nb::arg("scratch").noconvert(), nb::arg("num_threads"),
          nb::arg("is_accumulated"),
          "Set out (M, N) to x (M, K) times weight (N, K), or add to it; sums are fp32.");
    m.def("linear_reference", &linear_reference, nb::arg("x").noconvert(),
          nb::arg("weight").noconvert(), nb::arg("out").noconvert(), nb::arg("is_accumulated"),
          "The scalar reference of linear, with the same bits.");
    m.def("linear_scratch_bytes", &zi_linear_scratch_bytes, nb::arg("num_rows"),
          nb::arg("num_columns"), "Bytes of scratch that linear needs.");
    m.def("linear_is_fast", [] { return zi_linear_is_fast() != 0; },
          "Whether this processor has the vector variant.");
}
