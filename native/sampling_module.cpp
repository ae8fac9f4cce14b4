#include "sampling_module.hpp"

#include <nanobind/stl/string.h>

#include <vector>

#include "sampling.hpp"

namespace nb = nanobind;

namespace drumline {
namespace {

// What a request asks of every draw, read once: `draw` without a position and logits.
struct Recipe {
    DrawJob draw;
    bool greedy = false;
};

// Reused from call to call, so that a step allocates nothing once it has seen its size.
struct MatchScratch {
    std::vector<MatchJob> jobs;
    std::vector<std::int64_t> drafts, tokens;
};

// Per window (recipe, position of its first token, drafts, its first row of the logits
// [rows, count]) → its tokens.
nb::list match(const nb::list& windows, std::uintptr_t logits, std::int64_t count, int threads,
               const std::string& path) {
    static thread_local MatchScratch scratch;
    auto& [jobs, drafts, tokens] = scratch;
    jobs.clear();
    drafts.clear();
    for (const nb::handle window : windows) {
        const auto one = nb::borrow<nb::tuple>(window);
        const auto& recipe = nb::cast<const Recipe&>(one[0]);
        MatchJob job = {recipe.draw, recipe.greedy};
        job.draw.position = nb::cast<std::uint32_t>(one[1]);
        job.draw.logits =
            reinterpret_cast<const float*>(logits) + nb::cast<std::int64_t>(one[3]) * count;
        job.draw.count = count;
        for (const nb::handle draft : nb::borrow<nb::tuple>(one[2])) {
            drafts.push_back(nb::cast<std::int64_t>(draft));
            ++job.draft_count;
        }
        jobs.push_back(job);
    }
    tokens.resize(drafts.size() + jobs.size());
    std::int64_t at = 0;
    for (std::size_t index = 0; index < jobs.size(); ++index) {
        jobs[index].drafts = drafts.data() + at;
        jobs[index].tokens = tokens.data() + at + static_cast<std::int64_t>(index);
        at += jobs[index].draft_count;
    }
    const Path chosen = path_by_name(path);
    {
        const nb::gil_scoped_release unlocked;
        match_windows(jobs.data(), static_cast<std::int64_t>(jobs.size()), threads, chosen);
    }
    nb::list found;
    for (const MatchJob& job : jobs) {
        nb::tuple row = nb::steal<nb::tuple>(PyTuple_New(job.token_count));
        for (std::int64_t i = 0; i < job.token_count; ++i) {
            PyTuple_SET_ITEM(row.ptr(), i, PyLong_FromLongLong(job.tokens[i]));
        }
        found.append(row);
    }
    return found;
}

void bind_match(nb::module_& module) {
    nb::class_<Recipe>(module, "Recipe")
        .def("__init__", [](Recipe* self, bool greedy, double temperature, double floor,
                            std::int64_t top_k, double top_p, double sharpening,
                            std::uint32_t key_low, std::uint32_t key_high, std::uint32_t sample,
                            std::uintptr_t table) {
            new (self) Recipe();
            self->greedy = greedy;
            self->draw.temperature = temperature;
            self->draw.floor = floor;
            self->draw.top_k = top_k;
            self->draw.top_p = top_p;
            self->draw.sharpening = sharpening;
            self->draw.key[0] = key_low;
            self->draw.key[1] = key_high;
            self->draw.sample = sample;
            self->draw.table = reinterpret_cast<const std::int64_t*>(table);
        });
    module.def("match_windows", &match);
}

}  // namespace

void bind_sampling(nb::module_& module) {
    bind_match(module);
    // Per row: where [logits, count, table or 0], reals [maximum, temperature, floor, top_p,
    // sharpening], words [key low, key high, position, sample, purpose, top_k], and out of it its
    // place; all 64 bits wide. Returns a byte per row: which Way its draw went.
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
        std::vector<Way> ways(jobs.size(), Way::whole);
        {
            const nb::gil_scoped_release unlocked;
            draw_places(jobs.data(), count, reinterpret_cast<std::int64_t*>(places), ways.data(),
                        threads, chosen);
        }
        return nb::bytes(ways.data(), ways.size());
    });
}

}  // namespace drumline
