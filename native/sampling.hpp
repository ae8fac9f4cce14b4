// Gumbel-max draws from rows of logits: the compiled twin of sampling/draw.py and processors.py.
//
// A row gives its token by the same rules as there: scaled = (logit - maximum) / temperature, what
// min_p, top_k and top_p leave, and the largest of scaled * sharpening + noise, ties to the lowest
// place. Random bits are the same integers (Philox4x32-10 by seed, position, sample and purpose).
// Exponentials and logarithms are computed here, so a draw has the same bits on every processor.
// Knows rows of numbers and keys; no requests and no histories.
#pragma once

#include <cstdint>

#include "linear.hpp"

namespace drumline {

struct DrawJob {
    const float* logits = nullptr;  // [count], what bans and penalties left; the maximum is finite
    std::int64_t count = 0;
    const std::int64_t* table = nullptr;  // [count] token id of each place, ascending; null: itself
    double maximum = 0;
    double temperature = 1;  // positive and no more than 1e30
    double floor = 0;  // keep scaled >= floor; -infinity keeps all (log of min_p)
    double top_p = 1;
    double sharpening = 1;
    std::int64_t top_k = 0;  // 0: no limit
    std::uint32_t key[2] = {0, 0};
    std::uint32_t position = 0;
    std::uint32_t sample = 0;
    std::uint32_t purpose = 0;
};

// How a draw came to its end. The place is the same in every way.
enum class Way : std::uint8_t {
    whole = 0,   // no top_p
    proved = 1,  // what stands before the winner leaves it in the nucleus, by bounds of masses
    sorted = 2,  // the bounds did not tell, so the nucleus was sorted out
};

// The place each job draws, and how, in `places` and `ways` [jobs]. Rows are spread over threads.
void draw_places(const DrawJob* jobs, std::int64_t count, std::int64_t* places, Way* ways,
                 int threads, Path path);

// Drafts, and what a request says at the positions over them: the compiled twin of match
// acceptance (sampling/accept.py) for requests whose parameters leave the logits as they are.
struct MatchJob {
    DrawJob draw;         // of the first position; its maximum is found here
    bool greedy = false;  // the best token at every position; else draws
    const std::int64_t* drafts = nullptr;
    std::int64_t draft_count = 0;  // logits are [draft_count + 1, draw.count]
    std::int64_t* tokens = nullptr;  // room for draft_count + 1
    std::int64_t token_count = 0;    // out
};

// Per job the tokens up to and with the first that is not the draft, and none at or after a
// position whose largest logit is no finite number. Jobs are spread over threads.
void match_windows(MatchJob* jobs, std::int64_t count, int threads, Path path);

}  // namespace drumline
