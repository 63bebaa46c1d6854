/* The areas of the module _C; each has a file of its own here. */
#ifndef ZEROINFER_BINDINGS_AREAS_H
#define ZEROINFER_BINDINGS_AREAS_H

#include <nanobind/nanobind.h>

void bind_io(nanobind::module_ &m);
void bind_linear(nanobind::module_ &m);
void bind_kernels(nanobind::module_ &m);

#endif
