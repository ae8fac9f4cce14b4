// Binds ShmGroup; apart from module.cpp because it is about processes, not about numbers.
#pragma once

#include <nanobind/nanobind.h>

namespace drumline {

void bind_shm(nanobind::module_& module);

}  // namespace drumline
