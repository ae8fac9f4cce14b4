#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "pool.hpp"
#include "rows.hpp"
#include "vec.hpp"

#if defined(__x86_64__)
#define DRUMLINE_AVX2 __attribute__((target("avx2,fma,f16c")))
#define DRUMLINE_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#else
#define DRUMLINE_AVX2
#define DRUMLINE_AVX512
#endif

namespace drumline {
namespace {

typedef double v8d __attribute__((vector_size(64)));
typedef std::uint64_t v8l __attribute__((vector_size(64)));

constexpr double infinity = std::numeric_limits<double>::infinity();

// Above the relative error of exponentials in float32 of arguments in float32, and of their sum in
// float64 if the largest is 1: 2e-7 of the value, 2e-7 of an argument down to -50, and no more than
// exp(-50) from there.
constexpr double blur = 1e-5;

// ---- Philox4x32-10 (Salmon et al. 2011) ------------------------------------------------------

constexpr std::uint64_t multiplier[2] = {0xD2511F53U, 0xCD9E8D57U};
constexpr std::uint64_t weyl[2] = {0x9E3779B9U, 0xBB67AE85U};
constexpr std::uint64_t low32 = 0xFFFFFFFFU;
constexpr int rounds = 10;
constexpr int words_per_block = 4;

// Words is a 64-bit integer or a vector of them, each holding 32 bits.
template <typename Words>
DRUMLINE_INLINE void philox(Words (&c)[4], const std::uint32_t* key) {
    std::uint64_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < rounds; ++round) {
        const Words p0 = c[0] * multiplier[0];
        const Words p1 = c[2] * multiplier[1];
        c[0] = (p1 >> 32) ^ c[1] ^ k0;
        c[1] = p1 & low32;
        c[2] = (p0 >> 32) ^ c[3] ^ k1;
        c[3] = p0 & low32;
        k0 = (k0 + weyl[0]) & low32;
        k1 = (k1 + weyl[1]) & low32;
    }
}

std::uint32_t bits_of(const DrawJob& job, std::int64_t token) {
    std::uint64_t c[4] = {static_cast<std::uint64_t>(token / words_per_block), job.position,
                          job.sample, job.purpose};
    philox(c, job.key);
    return static_cast<std::uint32_t>(c[token % words_per_block]);
}

// ---- exponential and logarithm ---------------------------------------------------------------

// e to the x for x <= 700: Cody and Waite reduction by log 2, then the series to the 12th power,
// whose rest is below 1e-16 of the sum. Of one number or of eight, the same bits. 0 below -700.
template <typename Real, typename Whole>
DRUMLINE_INLINE Real exp_of(Real x) {
    const Real zero = Real{};
    const Real bounded = x < -700.0 ? zero - 700.0 : x;
    const Real shifted = bounded * 1.4426950408889634 + 6755399441055744.0;  // 1.5 * 2^52 rounds
    const Real n = shifted - 6755399441055744.0;
    const Real r = (bounded - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    Real p = r * (1.0 / 479001600.0) + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    Whole exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    Whole bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits = bits + (exponent << 52);  // the low bits of `shifted` are n
    std::memcpy(&p, &bits, sizeof p);
    return x < -700.0 ? zero : p;
}

DRUMLINE_INLINE v8d exp8d(v8d x) { return exp_of<v8d, v8l>(x); }

// Unsigned, because shifting the sign of a negative number out is no business of a signed one.
DRUMLINE_INLINE double exp1d(double x) { return exp_of<double, std::uint64_t>(x); }

// log x for positive, normal x: the method of fdlibm's e_log.c (Sun Microsystems 1993): x = 2^k
// (1 + f), s = f / (2 + f), log(1 + f) = f - s (f - R(s^2)), R of degree 7 in s^2.
double log1d(double x) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof bits);
    auto k = static_cast<std::int64_t>(bits >> 52) - 1023;
    std::uint64_t mantissa = (bits & 0xFFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL;
    if ((mantissa & 0xFFFFFFFFFFFFFULL) >= 0x6A09E667F3BCDULL) {  // keep 1 + f below sqrt 2
        mantissa -= 1ULL << 52;
        ++k;
    }
    double m = 0;
    std::memcpy(&m, &mantissa, sizeof m);
    const double f = m - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double r = 1.479819860511658591e-01;
    r = r * z + 1.531383769920937332e-01;
    r = r * z + 1.818357216161805012e-01;
    r = r * z + 2.222219843214978396e-01;
    r = r * z + 2.857142874366239149e-01;
    r = r * z + 3.999999999940941908e-01;
    r = r * z + 6.666666666666735130e-01;
    r = r * z;
    const double half = 0.5 * f * f;
    const auto n = static_cast<double>(k);
    const double tail = s * (half + r) + n * 1.90821492927058770002e-10;
    return n * 6.93147180369123816490e-01 - ((half - tail) - f);
}

// Standard Gumbel noise of 32 bits, rounded to float32 as sampling/noise.py rounds it.
double gumbel(std::uint32_t bits) {
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
    return static_cast<float>(-log1d(-log1d(uniform)));
}

// ---- what is kept ----------------------------------------------------------------------------

// What lies near the maximum of a row: `count` places, ascending, their logits, and about
// exp(scaled) of each. Room for more behind them, where a whole vector reads logits of -infinity.
struct Near {
    std::vector<std::int32_t> places;
    std::vector<float> logits, weights;
    std::size_t count = 0;

    void make_room(std::size_t most) {
        if (places.size() < most + 2 * lanes) {
            places.resize(most + 2 * lanes);
            logits.resize(most + 2 * lanes);
            weights.resize(most + 2 * lanes);
        }
        count = 0;
    }
    // Without a branch: whether it stays is as good as random.
    DRUMLINE_INLINE void add(std::int32_t place, float logit, bool stays) {
        places[count] = place;
        logits[count] = logit;
        count += stays ? 1 : 0;
    }
};

struct Scratch {
    std::vector<std::int32_t> kept;
    std::vector<std::int32_t> places;
    std::vector<std::uint64_t> keys, spare;
    std::vector<double> weights;
    std::vector<float> peaks;
    std::vector<std::int32_t> candidates;
    Near near;
};

DRUMLINE_INLINE double scaled(const DrawJob& job, std::int64_t place) {
    return (static_cast<double>(job.logits[place]) - job.maximum) / job.temperature;
}

// Ascends as the logit descends, then by place. Adding 0 makes the two zeros equal.
DRUMLINE_INLINE std::uint64_t order_key(float logit, std::int64_t place) {
    const float value = logit + 0.0F;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t key = (bits >> 31) != 0 ? bits : bits ^ 0x7FFFFFFFU;
    return static_cast<std::uint64_t>(key) << 32 | static_cast<std::uint64_t>(place);
}

std::int32_t low_half(std::uint64_t key) { return static_cast<std::int32_t>(key & low32); }

// Keys whose places ascend → the whole order. Three stable passes by 11 bits of the logit's half.
void sort_keys(std::vector<std::uint64_t>& keys, std::vector<std::uint64_t>& spare) {
    if (keys.size() < 1024) {
        std::sort(keys.begin(), keys.end());
        return;
    }
    spare.resize(keys.size());
    for (int shift = 32; shift < 64; shift += 11) {
        std::size_t starts[2049] = {0};
        for (const std::uint64_t key : keys) {
            ++starts[(key >> shift & 2047) + 1];
        }
        for (int digit = 0; digit < 2048; ++digit) {
            starts[digit + 1] += starts[digit];
        }
        for (const std::uint64_t key : keys) {
            spare[starts[key >> shift & 2047]++] = key;
        }
        keys.swap(spare);
    }
}

// In registers: through memory, word by word, it takes a third longer.
DRUMLINE_INLINE bool any_of(v8i hit) {
    typedef std::int64_t v2l __attribute__((vector_size(16)));
    v2l halves[2];
    std::memcpy(halves, &hit, sizeof halves);
    const v2l both = halves[0] | halves[1];
    return (both[0] | both[1]) != 0;
}

// Appends the places whose logit is at least `bound`, ascending.
DRUMLINE_INLINE void collect(const DrawJob& job, float bound, std::vector<std::int32_t>& to) {
    const float* logits = job.logits;
    std::int64_t place = 0;
    const v8f least = splat(bound);
    for (; place + 2 * lanes <= job.count; place += 2 * lanes) {
        if (!any_of((load8(logits + place) >= least) | (load8(logits + place + lanes) >= least))) {
            continue;
        }
        for (std::int64_t one = place; one < place + 2 * lanes; ++one) {
            if (logits[one] >= bound) {
                to.push_back(static_cast<std::int32_t>(one));
            }
        }
    }
    for (; place < job.count; ++place) {
        if (logits[place] >= bound) {
            to.push_back(static_cast<std::int32_t>(place));
        }
    }
}

// A logit that everything with scaled > -depth reaches, with room for rounding.
float logit_at(const DrawJob& job, double depth) {
    const double value = job.maximum - depth * job.temperature;
    return static_cast<float>(value - 1e-6 * (std::fabs(value) + std::fabs(job.maximum) + 1e-30));
}

DRUMLINE_INLINE double sum8d(v8d v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The sum of exp(scaled) over all places, by 8 lanes and then over the lanes. What trails the
// maximum by more than 16 is added in float32 and what trails it by 40 left out: together less than
// a billionth of the sum.
DRUMLINE_INLINE double mass_of_all(const DrawJob& job) {
    const v8f near = splat(logit_at(job, 16.0)), far = splat(logit_at(job, 40.0));
    const v8f most = splat(static_cast<float>(job.maximum));
    const double factor = 1.0 / job.temperature;
    const v8f narrow = splat(static_cast<float>(factor));
    v8d total = v8d{};
    v8f tail = splat(0.0F);
    std::int64_t place = 0;
    for (; place + lanes <= job.count; place += lanes) {
        const v8f part = load8(job.logits + place);
        if (any_of(part >= near)) {
            total = total + exp8d((__builtin_convertvector(part, v8d) - job.maximum) * factor);
        } else if (any_of(part >= far)) {
            tail = tail + exp8((part - most) * narrow);
        }
    }
    double rest = sum8(tail);
    for (; place < job.count; ++place) {
        rest = rest + exp1d((static_cast<double>(job.logits[place]) - job.maximum) * factor);
    }
    return sum8d(total) + rest;
}

// The k first places of the order, ascending, of all or of what is kept.
DRUMLINE_INLINE void keep_top_k(const DrawJob& job, bool any, Scratch& scratch) {
    auto& keys = scratch.keys;
    keys.clear();
    const std::int64_t k = job.top_k;
    if (any) {
        for (const std::int32_t place : scratch.kept) {
            keys.push_back(order_key(job.logits[place], place));
        }
    } else {
        constexpr std::int64_t width = 128;  // the k-th of the blocks' peaks bounds the k-th of all
        float bound = -std::numeric_limits<float>::infinity();
        if (k <= job.count / width) {
            scratch.peaks.clear();
            for (std::int64_t at = 0; at + width <= job.count; at += width) {
                v8f peak = load8(job.logits + at);
                for (std::int64_t i = lanes; i < width; i += lanes) {
                    const v8f part = load8(job.logits + at + i);
                    peak = part > peak ? part : peak;
                }
                float most = peak[0];
                for (int lane = 1; lane < lanes; ++lane) {
                    most = peak[lane] > most ? peak[lane] : most;
                }
                scratch.peaks.push_back(most);
            }
            std::nth_element(scratch.peaks.begin(), scratch.peaks.begin() + (k - 1),
                             scratch.peaks.end(), std::greater<>());
            bound = scratch.peaks[static_cast<std::size_t>(k - 1)];
        }
        scratch.kept.clear();
        collect(job, bound, scratch.kept);
        for (const std::int32_t place : scratch.kept) {
            keys.push_back(order_key(job.logits[place], place));
        }
    }
    if (static_cast<std::int64_t>(keys.size()) > k) {
        std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
        keys.resize(static_cast<std::size_t>(k));
    }
    scratch.kept.clear();
    for (const std::uint64_t key : keys) {
        scratch.kept.push_back(low_half(key));
    }
    std::sort(scratch.kept.begin(), scratch.kept.end());
}

// The smallest leading part of the order whose probability reaches top_p, of all or of what is
// kept. Only tokens near the maximum are sorted, deeper in steps until they reach it; the sums down
// the order, and with them the result, do not depend on how deep that was.
DRUMLINE_INLINE void keep_nucleus(const DrawJob& job, bool any, Scratch& scratch) {
    static constexpr double depths[] = {3.0, 6.0, 9.0, 12.0, 16.0, 24.0, infinity};
    std::vector<std::int32_t>& kept = scratch.kept;
    double mass = 0;
    if (any) {
        for (const std::int32_t place : kept) {
            mass = mass + exp1d(scaled(job, place));
        }
    } else {
        mass = mass_of_all(job);
    }
    const double target = job.top_p * mass;
    for (const double depth : depths) {
        if (!any) {
            kept.clear();
            collect(job, depth == infinity ? -std::numeric_limits<float>::infinity()
                                           : logit_at(job, depth), kept);
        }
        // Keys hold the index of the weight, which ascends with the place.
        scratch.keys.clear();
        scratch.weights.clear();
        scratch.places.clear();
        double reached = 0;
        for (const std::int32_t place : kept) {
            const double value = scaled(job, place);
            if (value > -depth || depth == infinity) {
                const double weight = exp1d(value);
                const auto index = static_cast<std::int64_t>(scratch.weights.size());
                scratch.keys.push_back(order_key(job.logits[place], index));
                scratch.weights.push_back(weight);
                scratch.places.push_back(place);
                reached = reached + weight;
            }
        }
        if (reached < target && depth < infinity && scratch.keys.size() < kept.size() + !any) {
            continue;  // a guess that may be off by rounding; the sum down the order decides
        }
        sort_keys(scratch.keys, scratch.spare);
        std::size_t count = 0;
        double sum = 0;
        while (count < scratch.keys.size() && (count == 0 || sum < target)) {
            sum = sum + scratch.weights[static_cast<std::size_t>(low_half(scratch.keys[count]))];
            ++count;
        }
        if (sum >= target || depth == infinity) {
            kept.clear();
            for (std::size_t at = 0; at < count; ++at) {
                kept.push_back(
                    scratch.places[static_cast<std::size_t>(low_half(scratch.keys[at]))]);
            }
            std::sort(kept.begin(), kept.end());
            return;
        }
    }
}

// ---- drawing ---------------------------------------------------------------------------------

struct Best {
    double score = -infinity;
    std::int64_t place = -1;

    // Places come in ascending order, so the first of equals stays.
    DRUMLINE_INLINE void offer(double value, std::int64_t at) {
        if (value > score || place < 0) {
            score = value;
            place = at;
        }
    }
};

DRUMLINE_INLINE double sharpened(const DrawJob& job, std::int64_t place) {
    const double value = scaled(job, place);
    return job.sharpening == 1.0 ? value : value * job.sharpening;
}

// Noise lies between that of no bits and that of all: who trails the maximum by more cannot win.
double noise_reach() {
    static const double reach = gumbel(0xFFFFFFFFU) - gumbel(0) + 1e-3;
    return reach;
}

std::int64_t token_at(const DrawJob& job, std::int64_t place) {
    return job.table == nullptr ? place : job.table[place];
}

// Bits below this give less noise than `noise`: g = -log(-log u) >= noise and 1 - u <= -log u need
// 1 - u <= exp(-noise).
std::uint32_t bits_needed(double noise) {
    const double tail = std::ceil(exp1d(std::min(1e-3 - noise, 0.0)) * 0x1p32);
    return tail >= 4294967295.0 ? 0 : 0xFFFFFFFFU - static_cast<std::uint32_t>(tail);
}

// Least bits that could carry a token so many whole nats behind the maximum past a score.
struct Thresholds {
    static constexpr int depths = 32;
    std::uint64_t least[depths];

    explicit Thresholds(double score) {
        for (int depth = 0; depth < depths; ++depth) {
            least[depth] = bits_needed(score + depth);
        }
    }
    std::uint64_t at(double behind) const {
        return least[static_cast<int>(std::min(behind, depths - 1.0))];
    }
};

double score_of(const DrawJob& job, std::int64_t place) {
    return sharpened(job, place) + gumbel(bits_of(job, token_at(job, place)));
}

// The bits of eight tokens, each in 64.
DRUMLINE_INLINE v8l bits_of_eight(const DrawJob& job, v8l token) {
    v8l c[4] = {token / words_per_block, v8l{} + job.position, v8l{} + job.sample,
                v8l{} + job.purpose};
    philox(c, job.key);
    const v8l word = token % words_per_block;
    const v8l low = word == 0 ? c[0] : c[1], high = word == 2 ? c[2] : c[3];
    return word < 2 ? low : high;
}

// The bits of eight places at a time, and logarithms only where those could carry it past one of
// the first scores: where 2^32 - 1 - bits is at most exp(sharpened - score) 2^32, see bits_needed.
DRUMLINE_INLINE std::int64_t draw_kept(const DrawJob& job, const std::vector<std::int32_t>& kept) {
    constexpr std::size_t tried = 16;
    Best best;
    if (kept.size() <= 2 * tried) {
        for (const std::int32_t place : kept) {
            if (sharpened(job, place) >= -noise_reach()) {
                best.offer(score_of(job, place), place);
            }
        }
        return best.place;
    }
    double first = -infinity;
    std::size_t scores = 0;
    for (std::size_t at = 0; at < kept.size() && scores < tried; ++at) {
        if (sharpened(job, kept[at]) >= -3.0) {
            first = std::max(first, score_of(job, kept[at]));
            ++scores;
        }
    }
    const double reach = noise_reach(), share = exp1d(2e-3 - first) * 0x1p32;
    for (std::size_t begin = 0; begin < kept.size(); begin += lanes) {
        const std::size_t count = std::min<std::size_t>(lanes, kept.size() - begin);
        std::uint64_t tokens[lanes] = {0};
        double values[lanes];
        std::fill(values, values + lanes, -infinity);
        for (std::size_t lane = 0; lane < count; ++lane) {
            const std::int32_t place = kept[begin + lane];
            tokens[lane] = static_cast<std::uint64_t>(token_at(job, place));
            values[lane] = static_cast<double>(job.logits[place]);
        }
        v8l token;
        std::memcpy(&token, tokens, sizeof token);
        v8d value;
        std::memcpy(&value, values, sizeof value);
        value = (value - job.maximum) / job.temperature;
        value = job.sharpening == 1.0 ? value : value * job.sharpening;
        const v8l bits = bits_of_eight(job, token);
        const v8l exact = bits | 0x4330000000000000ULL;  // 2^52 + bits, as a double
        v8d behind;
        std::memcpy(&behind, &exact, sizeof behind);
        behind = (0x1p52 + 4294967295.0) - behind;
        const v8d limit =
            __builtin_convertvector(exp8(__builtin_convertvector(value, v8f)), v8d) * share + 2.0;
        const auto hit = (behind <= limit) & (value >= -reach);
        std::uint64_t hits[lanes], words[lanes];
        std::memcpy(hits, &hit, sizeof hits);
        if ((hits[0] | hits[1] | hits[2] | hits[3] | hits[4] | hits[5] | hits[6] | hits[7]) == 0) {
            continue;
        }
        std::memcpy(words, &bits, sizeof words);
        for (std::size_t lane = 0; lane < count; ++lane) {
            if (hits[lane] != 0) {
                const std::int64_t place = kept[begin + lane];
                best.offer(sharpened(job, place) + gumbel(static_cast<std::uint32_t>(words[lane])),
                           place);
            }
        }
    }
    return best.place;
}

// The largest logit of places begin .. begin + 32, as far as there are.
DRUMLINE_INLINE float peak_of(const DrawJob& job, std::int64_t begin) {
    constexpr std::int64_t width = lanes * words_per_block;
    float most = job.logits[begin];
    if (begin + width > job.count) {
        for (std::int64_t place = begin + 1; place < job.count; ++place) {
            most = std::max(most, job.logits[place]);
        }
        return most;
    }
    v8f peak = load8(job.logits + begin);
    for (std::int64_t i = lanes; i < width; i += lanes) {
        const v8f part = load8(job.logits + begin + i);
        peak = part > peak ? part : peak;
    }
    for (int lane = 0; lane < lanes; ++lane) {
        most = std::max(most, peak[lane]);
    }
    return most;
}

// The whole vocabulary, eight counter blocks at a time: bits only where the noise could carry the
// largest logit among them past the best so far, logarithms only where the bits do.
DRUMLINE_INLINE std::int64_t draw_all(const DrawJob& job, std::vector<std::int32_t>& near) {
    near.clear();
    collect(job, logit_at(job, 3.0 / std::max(job.sharpening, 1.0)), near);
    const std::int64_t first = draw_kept(job, near);
    const double most = score_of(job, first);
    const double noise_most = gumbel(0xFFFFFFFFU) + 1e-3;
    const Thresholds thresholds(most);
    Best best;
    for (std::int64_t begin = 0; begin < job.count; begin += lanes * words_per_block) {
        const double behind = (job.maximum - static_cast<double>(peak_of(job, begin))) /
                              job.temperature * job.sharpening * (1 - 1e-12);
        if (!(most + behind <= noise_most)) {
            continue;
        }
        const std::uint64_t needed = thresholds.at(behind);
        v8l c[4];
        for (int lane = 0; lane < lanes; ++lane) {
            c[0][lane] = static_cast<std::uint64_t>(begin / words_per_block + lane);
        }
        c[1] = v8l{} + job.position;
        c[2] = v8l{} + job.sample;
        c[3] = v8l{} + job.purpose;
        philox(c, job.key);
        const auto hit = (c[0] >= needed) | (c[1] >= needed) | (c[2] >= needed) | (c[3] >= needed);
        std::uint64_t words[lanes];
        std::memcpy(words, &hit, sizeof words);
        if ((words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] |
             words[7]) == 0) {
            continue;
        }
        for (int at = 0; at < lanes * words_per_block; ++at) {
            const std::int64_t place = begin + at;
            const std::uint64_t bits = c[at % words_per_block][at / words_per_block];
            if (place < job.count && bits >= needed) {
                best.offer(sharpened(job, place) + gumbel(static_cast<std::uint32_t>(bits)), place);
            }
        }
    }
    return best.place;
}

// ---- drawing from a nucleus that nobody sorts ------------------------------------------------

// What the sum of exp(scaled) lies between.
struct Bounds {
    double low = 0, high = 0;
};

// Fills in the weights of what is near, in float32, and returns their sum, good to `blur`.
DRUMLINE_INLINE double weigh(const DrawJob& job, Near& near) {
    const v8f most = splat(static_cast<float>(job.maximum));
    const v8f factor = splat(static_cast<float>(1.0 / job.temperature));
    store8(near.logits.data() + near.count, splat(-std::numeric_limits<float>::infinity()));
    v8d total = v8d{};
    for (std::size_t at = 0; at < near.count; at += lanes) {
        const v8f weight = exp8((load8(near.logits.data() + at) - most) * factor);
        store8(near.weights.data() + at, weight);
        total = total + __builtin_convertvector(weight, v8d);
    }
    return sum8d(total);
}

// Finds what is near: all that trails the maximum by less than `depth`. Returns the rest's sum of
// exp(scaled) by the bits of the exponent with the mantissa as a straight line, which is at most
// 1.0615 times the exponential and never less.
DRUMLINE_INLINE double find_near(const DrawJob& job, double depth, Near& near) {
    constexpr std::int64_t strip = 4096;  // the sum of so many in float32 is good to 1e-4
    const float bound = logit_at(job, depth);
    const v8f least = splat(bound), most = splat(static_cast<float>(job.maximum));
    const v8f octaves = splat(static_cast<float>(1.4426950408889634 / job.temperature));
    const v8f none = splat(0.0F);
    const auto line = [&](v8f logits) __attribute__((always_inline)) {
        v8f behind = (logits - most) * octaves;
        behind = behind > -126.0F ? behind : splat(-126.0F);
        const v8i bits = __builtin_convertvector(behind * 0x1p23F, v8i) + (127 << 23);
        v8f value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    };
    near.make_room(static_cast<std::size_t>(job.count));
    double rest = 0;
    std::int64_t place = 0;
    while (place + 2 * lanes <= job.count) {
        const std::int64_t end = std::min(place + strip, job.count - 2 * lanes + 1);
        v8f tail = none;
        for (; place < end; place += 2 * lanes) {
            const v8f one = load8(job.logits + place), two = load8(job.logits + place + lanes);
            const v8i hit_one = one >= least, hit_two = two >= least;
            if (!any_of(hit_one | hit_two)) {
                tail = tail + (line(one) + line(two));
                continue;
            }
            tail = tail + ((hit_one ? none : line(one)) + (hit_two ? none : line(two)));
            for (std::int64_t at = place; at < place + 2 * lanes; ++at) {
                near.add(static_cast<std::int32_t>(at), job.logits[at], job.logits[at] >= bound);
            }
        }
        rest = rest + static_cast<double>(sum8(tail));
    }
    for (; place < job.count; ++place) {
        const bool hit = job.logits[place] >= bound;
        near.add(static_cast<std::int32_t>(place), job.logits[place], hit);
        rest = rest + (hit ? 0.0 : exp1d(scaled(job, place)));
    }
    return rest;
}

// The weights, among what is near, of what is above a logit, or at it and ahead of index `index`.
DRUMLINE_INLINE double mass_before(const Near& near, float logit, std::size_t index) {
    const v8f level = splat(logit), none = splat(0.0F);
    v8d total = v8d{};
    for (std::size_t at = 0; at < near.count; at += lanes) {
        const v8f logits = load8(near.logits.data() + at);
        const bool ahead = at + lanes <= index;
        v8i before = ahead ? logits >= level : logits > level;
        for (std::size_t lane = 0; !ahead && at + lane < index; ++lane) {
            before[lane] |= logits[lane] == logit ? -1 : 0;
        }
        const v8f weights = load8(near.weights.data() + at);
        total = total + __builtin_convertvector(before ? weights : none, v8d);
    }
    return sum8d(total);
}

// A logit that the whole nucleus reaches and not much more does, by halving what is left between
// the maximum and `depth`. What is near reaches `mass`.
DRUMLINE_INLINE float logit_reached(const DrawJob& job, const Near& near, double depth,
                                    double mass) {
    double low = 0, high = depth;
    for (int step = 0; step < 4; ++step) {
        const double middle = (low + high) / 2;
        if (mass_before(near, logit_at(job, middle), 0) * (1 - blur) >= mass) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return high < depth ? logit_at(job, high) : -std::numeric_limits<float>::infinity();
}

// The winner of the nucleus, which is some leading part of what is near, and of which `target`
// bounds the mass it has to reach; -1 if the bounds do not tell. A winner is in the nucleus if what
// stands before it in the order does not reach the target; if that does, the nucleus is part of it.
DRUMLINE_INLINE std::int64_t draw_near(const DrawJob& job, Bounds target, float bound,
                                       Scratch& scratch) {
    const Near& near = scratch.near;
    auto& candidates = scratch.candidates;
    candidates.resize(near.count);
    std::size_t count = 0;
    for (std::size_t at = 0; at < near.count; ++at) {
        candidates[count] = near.places[at];
        count += near.logits[at] >= bound ? 1 : 0;
    }
    candidates.resize(count);
    for (;;) {
        const std::int64_t place = draw_kept(job, candidates);
        const float logit = job.logits[place];
        const auto end = near.places.begin() + static_cast<std::ptrdiff_t>(near.count);
        const auto at = std::lower_bound(near.places.begin(), end, place);
        const double mass =
            mass_before(near, logit, static_cast<std::size_t>(at - near.places.begin()));
        if (mass * (1 + blur) < target.low) {
            return place;
        }
        if (mass * (1 - blur) < target.high) {
            return -1;
        }
        std::erase_if(candidates, [&](std::int32_t one) {
            return job.logits[one] < logit || (job.logits[one] == logit && one >= place);
        });
    }
}

// The winner as `draw_near` finds it, among all or among what is kept.
DRUMLINE_INLINE std::int64_t draw_proved(const DrawJob& job, bool any, Scratch& scratch) {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    Near& near = scratch.near;
    if (job.temperature < 1e-30) {
        return -1;  // its reciprocal is no float32
    }
    if (any) {
        near.make_room(scratch.kept.size());
        for (const std::int32_t place : scratch.kept) {
            near.add(place, job.logits[place], true);
        }
        const double mass = job.top_p * weigh(job, near);
        return draw_near(job, {mass * (1 - blur), mass * (1 + blur)}, lowest, scratch);
    }
    for (const double depth : {8.0, 16.0}) {
        if (job.top_p > 1 - 3 * blur) {
            break;  // no sum of such weights is sure to reach it
        }
        const double rest = find_near(job, depth, near);
        const double mass = weigh(job, near);
        const Bounds target = {
            job.top_p * (mass * (1 - blur) + rest / 1.0615 * (1 - 1e-3)),
            job.top_p * (mass * (1 + blur) + rest * (1 + 1e-3)),
        };
        if (mass * (1 - blur) >= target.high) {
            const bool few = near.count <= 128;
            const float bound = few ? lowest : logit_reached(job, near, depth, target.high);
            return draw_near(job, target, bound, scratch);
        }
    }
    return -1;
}

DRUMLINE_INLINE std::int64_t draw_row(const DrawJob& job, Way& way) {
    static thread_local Scratch scratch;
    way = Way::whole;
    bool any = false;
    if (job.floor > -infinity) {
        scratch.kept.clear();
        const double depth = -job.floor + 1e-9;
        collect(job, logit_at(job, depth), scratch.kept);
        std::erase_if(scratch.kept,
                      [&](std::int32_t place) { return !(scaled(job, place) >= job.floor); });
        any = true;
    }
    if (job.top_k > 0 && job.top_k < job.count) {
        keep_top_k(job, any, scratch);
        any = true;
    }
    if (job.top_p < 1.0) {
        const std::int64_t place = draw_proved(job, any, scratch);
        if (place >= 0) {
            way = Way::proved;
            return place;
        }
        way = Way::sorted;
        keep_nucleus(job, any, scratch);
        any = true;
    }
    if (!any && job.table != nullptr) {
        scratch.kept.clear();
        collect(job, logit_at(job, noise_reach() / std::max(job.sharpening, 1.0)), scratch.kept);
        any = true;
    }
    return any ? draw_kept(job, scratch.kept) : draw_all(job, scratch.kept);
}

std::int64_t draw_row_plain(const DrawJob& job, Way& way) { return draw_row(job, way); }

DRUMLINE_AVX2 std::int64_t draw_row_avx2(const DrawJob& job, Way& way) {
    return draw_row(job, way);
}

DRUMLINE_AVX512 std::int64_t draw_row_avx512(const DrawJob& job, Way& way) {
    return draw_row(job, way);
}

using DrawRow = std::int64_t (*)(const DrawJob& job, Way& way);

DrawRow draw_of(Path path) {
    return path == Path::portable ? draw_row_plain
           : path == Path::avx2   ? draw_row_avx2
                                  : draw_row_avx512;
}

std::int64_t match_window(const MatchJob& window, const RowKernels& kernels, DrawRow draw) {
    DrawJob job = window.draw;
    for (std::int64_t ahead = 0;; ++ahead, ++job.position, job.logits += job.count) {
        std::int64_t place = kernels.argmax(job.logits, job.count);
        job.maximum = static_cast<double>(job.logits[place]);
        if (!std::isfinite(job.maximum)) {
            return ahead;
        }
        if (!window.greedy) {
            Way way;
            place = draw(job, way);
        }
        window.tokens[ahead] = token_at(job, place);
        if (ahead == window.draft_count || window.drafts[ahead] != window.tokens[ahead]) {
            return ahead + 1;
        }
    }
}

// parts never outnumber what a pool takes
template <typename Body>
void each(std::int64_t count, int threads, const Body& body) {
    const int parts = static_cast<int>(std::min<std::int64_t>(count, Pool::parts_max));
    Pool::instance().run(threads, parts, [&](int part) {
        for (std::int64_t at = part; at < count; at += parts) {
            body(at);
        }
    });
}

}  // namespace

void draw_places(const DrawJob* jobs, std::int64_t count, std::int64_t* places, Way* ways,
                 int threads, Path path) {
    const DrawRow draw = draw_of(path);
    each(count, threads, [&](std::int64_t row) { places[row] = draw(jobs[row], ways[row]); });
}

void match_windows(MatchJob* jobs, std::int64_t count, int threads, Path path) {
    const DrawRow draw = draw_of(path);
    const RowKernels& kernels = row_kernels(path);
    each(count, threads, [&](std::int64_t at) {
        jobs[at].token_count = match_window(jobs[at], kernels, draw);
    });
}

}  // namespace drumline
