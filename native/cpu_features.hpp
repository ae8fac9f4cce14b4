// Which instruction sets this processor has and the operating system lets us use.
#pragma once

#include <utility>
#include <vector>

namespace drumline {

// Name and presence, in a fixed order. The names are the kernel's spelling in /proc/cpuinfo
// without punctuation, so that the Python twin (drumline.core.cpu) reads the same ones.
using CpuFeatures = std::vector<std::pair<const char *, bool>>;

CpuFeatures cpu_features();

}  // namespace drumline
