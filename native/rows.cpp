#include "rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "instruction_sets.hpp"
#include "vec.hpp"

namespace drumline {
namespace {

namespace portable_rows {
#include "row_kernels.hpp"
}  // namespace portable_rows

#if DRUMLINE_HAS_AVX2
DRUMLINE_BEGIN_AVX2
namespace avx2_rows {
#include "row_kernels.hpp"
}  // namespace avx2_rows
DRUMLINE_END_AVX2
#endif

}  // namespace

const RowKernels& row_kernels(Path path) {
#if DRUMLINE_HAS_AVX2
    if (path != Path::portable) {
        return avx2_rows::kernels;
    }
#endif
    (void)path;
    return portable_rows::kernels;
}

}  // namespace drumline
