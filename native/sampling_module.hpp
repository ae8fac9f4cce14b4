// Python's face of the draws.
#pragma once

#include <nanobind/nanobind.h>

namespace drumline {

void bind_sampling(nanobind::module_& module);

}  // namespace drumline
