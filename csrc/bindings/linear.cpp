#include "zeroinfer/linear.h"

#include <cerrno>
#include <stdexcept>
#include <string>

#include "areas.h"
#include "arrays.h"

namespace nb = nanobind;

namespace {

zi_linear_params params_of(const ConstArray &x, const ConstArray &weight, const Array &out,
                           bool is_accumulated) {
    require_dtype(x, "x", ZI_F32);
    require_dtype(out, "out", ZI_F32);
    require_shape(x, "x", {-1, -1});
    require_shape(weight, "weight", {-1, int64_t(x.shape(1))});
    require_shape(out, "out", {int64_t(x.shape(0)), int64_t(weight.shape(0))});
    require_dense(x, "x", 1);
    require_dense(out, "out", 1);
    zi_linear_params params{};
    params.num_rows = int64_t(x.shape(0));
    params.num_outputs = int64_t(weight.shape(0));
    params.num_columns = int64_t(x.shape(1));
    params.x = static_cast<const float *>(x.data());
    params.x_stride = x.stride(0);
    params.weight = weight.data();
    params.weight_dtype = dtype_of(weight, "weight", true);
    params.weight_stride = weight.stride(0);
    params.weight_column_stride = weight.shape(1) < 2 ? 1 : weight.stride(1);
    params.out = static_cast<float *>(out.data());
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

void linear(const ConstArray &x, const ConstArray &weight, const Array &out, const Array &scratch,
            int num_threads, bool is_accumulated) {
    require_dtype(scratch, "scratch", ZI_F32);
    require_shape(scratch, "scratch", {-1});
    require_dense(scratch, "scratch", 1);
    const zi_linear_params params = params_of(x, weight, out, is_accumulated);
    if (num_threads < 1) {
        throw std::invalid_argument("num_threads must be at least 1, got " +
                                    std::to_string(num_threads));
    }
    int error;
    {
        nb::gil_scoped_release release;
        /* Asked for here, since it waits for a kernel that another thread runs. */
        zi_team *team = zi_team_shared(num_threads);
        error = zi_linear(&params, scratch.data(), scratch.nbytes(), team);
    }
    raise_for(error);
}

void linear_reference(const ConstArray &x, const ConstArray &weight, const Array &out,
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
}
