#include "sampling_module.hpp"

#include <nanobind/stl/string.h>

#include <vector>

#include "sampling.hpp"

namespace nb = nanobind;

namespace drumline {

void bind_sampling(nb::module_& module) {
    // Per row: where [logits, count, table or 0], reals [maximum, temperature, floor, top_p,
    // sharpening], words [key low, key high, position, sample, purpose, top_k], all 64 bits wide.
    module.def("draw_places", [](std::uintptr_t where, std::uintptr_t reals, std::uintptr_t words,
                                 std::int64_t count, std::uintptr_t places, int threads,
                                 const std::string& path) {
        const auto* at = reinterpret_cast<const std::int64_t*>(where);
        const auto* real = reinterpret_cast<const double*>(reals);
        const auto* word = reinterpret_cast<const std::int64_t*>(words);
        std::vector<DrawJob> jobs(static_cast<std::size_t>(count));
        for (DrawJob& job : jobs) {
            job.logits = reinterpret_cast<const float*>(at[0]);
            job.count = at[1];
            job.table = reinterpret_cast<const std::int64_t*>(at[2]);
            job.maximum = real[0];
            job.temperature = real[1];
            job.floor = real[2];
            job.top_p = real[3];
            job.sharpening = real[4];
            job.key[0] = static_cast<std::uint32_t>(word[0]);
            job.key[1] = static_cast<std::uint32_t>(word[1]);
            job.position = static_cast<std::uint32_t>(word[2]);
            job.sample = static_cast<std::uint32_t>(word[3]);
            job.purpose = static_cast<std::uint32_t>(word[4]);
            job.top_k = word[5];
            at += 3;
            real += 5;
            word += 6;
        }
        const Path chosen = path_by_name(path);
        const nb::gil_scoped_release unlocked;
        draw_places(jobs.data(), count, reinterpret_cast<std::int64_t*>(places), threads, chosen);
    });
}

}  // namespace drumline
