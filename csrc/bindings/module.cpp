#include "areas.h"

NB_MODULE(_C, m) {
    m.doc() = "Compiled parts of zeroinfer; used through zeroinfer.native alone.";
    // A program that ends without closing its reader is no reason to print.
    nanobind::set_leak_warnings(false);
    bind_io(m);
    bind_linear(m);
    bind_kernels(m);
}
