// Python's face of the probes.
#pragma once

#include <nanobind/nanobind.h>

namespace drumline {

void bind_probe(nanobind::module_& module);

}  // namespace drumline
