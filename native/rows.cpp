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
using wide = v8f;
#include "row_kernels.hpp"
}  // namespace portable_rows

#if DRUMLINE_HAS_X86
DRUMLINE_BEGIN_AVX2
namespace avx2_rows {
using wide = v8f;
#include "row_kernels.hpp"
}  // namespace avx2_rows
DRUMLINE_END
DRUMLINE_BEGIN_AVX512
namespace avx512_rows {
typedef float wide __attribute__((vector_size(64)));
#include "row_kernels.hpp"
}  // namespace avx512_rows
DRUMLINE_END
#endif

}  // namespace

const RowKernels& row_kernels(Path path) {
#if DRUMLINE_HAS_X86
    if (path == Path::avx512_vnni) {
        return avx512_rows::kernels;
    }
    if (path == Path::avx2) {
        return avx2_rows::kernels;
    }
#endif
    (void)path;
    return portable_rows::kernels;
}

}  // namespace drumline
