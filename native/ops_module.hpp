// Python's face of the layers and of single operations.
#pragma once

#include <nanobind/nanobind.h>

namespace drumline {

void bind_ops(nanobind::module_& module);

}  // namespace drumline
