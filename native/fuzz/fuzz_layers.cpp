// Decoder layers and row operations: random shapes, caches and batches, in memory that ends where it
// must; a token's bits are its own whatever shares the call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../layer.hpp"
#include "../rows.hpp"
#include "fuzz.hpp"

namespace drumline::fuzz {
namespace {

bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof a) == 0;
}

std::vector<float> numbers(Random& random, std::int64_t count, float scale) {
    std::vector<float> out(static_cast<std::size_t>(count));
    for (float& value : out) {
        value = scale * random.normal();
    }
    return out;
}

// Layers, and the memory that their addresses point into.
struct Model {
    std::int64_t hidden, heads, kv_heads, dim;
    Stack stack;
    std::vector<std::unique_ptr<std::vector<float>>> kept;

    const float* keep(std::vector<float> values) {
        kept.push_back(std::make_unique<std::vector<float>>(std::move(values)));
        return kept.back()->data();
    }

    Dense dense(Random& random, std::int64_t outputs, std::int64_t columns, bool bias) {
        const auto raw = numbers(random, outputs * columns, 1.0F / std::sqrt(float(columns)));
        Dense out;
        out.parts.push_back(std::make_shared<PackedLinear>(
            WeightKind::f32,
            std::vector<const std::uint8_t*>{reinterpret_cast<const std::uint8_t*>(raw.data())},
            std::vector<std::int64_t>{outputs}, columns));
        out.bias = bias ? keep(numbers(random, outputs, 0.3F)) : nullptr;
        out.outputs = outputs;
        out.columns = columns;
        return out;
    }
};

std::shared_ptr<const MixtureOfExperts> mixture(Random& random, Model& model, std::int64_t width) {
    auto all = std::make_shared<Experts>();
    const std::int64_t count = random.whole(1, 5);
    for (std::int64_t expert = 0; expert < count; ++expert) {
        all->experts.push_back({model.dense(random, 2 * width, model.hidden, false),
                                model.dense(random, model.hidden, width, false)});
    }
    auto out = std::make_shared<MixtureOfExperts>();
    out->norm = model.keep(numbers(random, model.hidden, 1.0F));
    out->router = model.dense(random, count, model.hidden, false);
    out->experts = all;
    out->per_token = random.whole(1, count);
    out->normalize = random.one_in(2);
    out->eps = 1e-5F;
    return out;
}

Model draw_model(Random& random) {
    Model model;
    model.kv_heads = random.whole(1, 3);
    model.heads = model.kv_heads * random.of<std::int64_t>({1, 1, 2, 3, 4, 13});
    model.dim = 2 * random.whole(1, 20);
    model.hidden = random.whole(1, 40);
    const std::int64_t half = random.whole(1, model.dim / 2), width = random.whole(1, 30);
    const std::int64_t q = model.heads * model.dim, kv = model.kv_heads * model.dim;
    model.stack.rope = {model.keep(numbers(random, 400 * half, 1.0F)),
                        model.keep(numbers(random, 400 * half, 1.0F)), half};
    for (std::int64_t layer = random.whole(1, 2); layer > 0; --layer) {
        const bool bias = random.one_in(2), head_norms = random.one_in(2);
        auto attention = std::make_shared<Attention>();
        attention->norm = model.keep(numbers(random, model.hidden, 1.0F));
        attention->qkv = model.dense(random, q + 2 * kv, model.hidden, bias);
        attention->q_norm = head_norms ? model.keep(numbers(random, model.dim, 1.0F)) : nullptr;
        attention->k_norm = head_norms ? model.keep(numbers(random, model.dim, 1.0F)) : nullptr;
        attention->o = model.dense(random, model.hidden, q, bias);
        attention->heads = model.heads;
        attention->kv_heads = model.kv_heads;
        attention->head_dim = model.dim;
        attention->eps = 1e-5F;
        if (random.one_in(3)) {
            model.stack.layers.push_back({attention, nullptr, mixture(random, model, width)});
            continue;
        }
        auto dense = std::make_shared<FeedForward>();
        dense->norm = model.keep(numbers(random, model.hidden, 1.0F));
        dense->gate_up = model.dense(random, 2 * width, model.hidden, bias);
        dense->down = model.dense(random, model.hidden, width, bias);
        dense->eps = 1e-5F;
        model.stack.layers.push_back({attention, dense, nullptr});
    }
    return model;
}

// A cache of just its size, and block tables of some sequences in it.
struct Memory {
    std::vector<std::uint8_t> keys, values;
    std::vector<float> key_scales, value_scales;
    KVCache cache;
    std::vector<std::int64_t> lengths, tables, starts;

    Memory(Random& random, const Model& model, KVType type, std::int64_t size)
        : Memory(random, model, type, size, random.whole(1, 3)) {}

    Memory(Random& random, const Model& model, KVType type, std::int64_t size,
           std::int64_t sequences) {
        for (std::int64_t i = 0; i < sequences; ++i) {
            lengths.push_back(random.whole(1, random.of<std::int64_t>({5, 40, 300})));
            starts.push_back(static_cast<std::int64_t>(tables.size()));
            for (std::int64_t at = 0; at < lengths.back(); at += size) {
                tables.push_back(static_cast<std::int64_t>(tables.size()));
            }
        }
        for (std::size_t i = tables.size(); i > 1; --i) {
            std::swap(tables[i - 1],
                      tables[static_cast<std::size_t>(
                          random.whole(0, static_cast<std::int64_t>(i) - 1))]);
        }
        const auto layers = static_cast<std::int64_t>(model.stack.layers.size());
        const auto rows = static_cast<std::size_t>(
            static_cast<std::int64_t>(tables.size()) * layers * model.kv_heads * size);
        const std::size_t bytes = type == KVType::f32 ? 4 : type == KVType::i8 ? 1 : 2;
        keys.resize(rows * static_cast<std::size_t>(model.dim) * bytes);
        values.resize(keys.size());
        key_scales.resize(type == KVType::i8 ? rows : 0);
        value_scales.resize(key_scales.size());
        cache = {keys.data(), values.data(), nullptr, nullptr, type,
                 layers, model.kv_heads, model.dim, size};
        if (type == KVType::i8) {
            cache.key_scales = key_scales.data();
            cache.value_scales = value_scales.data();
        }
    }

    void clear() {
        // No numbers: nobody may see what nobody has written.
        std::fill(keys.begin(), keys.end(), std::uint8_t{0xFF});
        std::fill(values.begin(), values.end(), std::uint8_t{0xFF});
        std::fill(key_scales.begin(), key_scales.end(), NAN);
        std::fill(value_scales.begin(), value_scales.end(), NAN);
    }
};

struct Piece {
    std::size_t sequence;
    std::int64_t begin, end;
};

// The pieces' tokens through all layers, in place of their rows of `streams`.
void pass(Random& random, const Model& model, const Memory& memory,
          const std::vector<Piece>& pieces, std::vector<std::vector<float>>& streams, int threads,
          Workspace& space) {
    std::vector<std::int64_t> positions, slots, starts;
    std::vector<float> x;
    for (const Piece& piece : pieces) {
        for (std::int64_t p = piece.begin; p < piece.end; ++p) {
            const std::int64_t start = memory.starts[piece.sequence], size = memory.cache.block_size;
            positions.push_back(p);
            starts.push_back(start);
            slots.push_back(memory.tables[static_cast<std::size_t>(start + p / size)] * size +
                            p % size);
            const auto row = streams[piece.sequence].begin() + p * model.hidden;
            x.insert(x.end(), row, row + model.hidden);
        }
    }
    const auto tokens = static_cast<std::int64_t>(positions.size());
    const Places places = {tokens, positions.data(), slots.data(), memory.tables.data(),
                           starts.data(), 0};
    std::vector<float> tapped(x.size()), some = x;
    const auto layers = static_cast<std::int64_t>(model.stack.layers.size());
    model.stack.run({space, threads}, memory.cache, places, x.data(), nullptr, 0,
                    {{layers, tapped.data()}});
    // Again, and a few rows of it are read: keys and values are written anew, and are the same.
    std::vector<std::int64_t> read;
    for (std::int64_t token = 0; token < tokens; ++token) {
        if (random.one_in(4)) {
            read.push_back(token);
        }
    }
    const Reads reads = {read.data(), static_cast<std::int64_t>(read.size())};
    model.stack.run({space, threads}, memory.cache, places, some.data(), nullptr, 0, {}, &reads);
    for (const std::int64_t token : read) {
        const auto at = token * model.hidden;
        expect(std::equal(x.begin() + at, x.begin() + at + model.hidden, some.begin() + at, same),
               "a row depends on what is left out");
    }
    auto from = x.begin();
    for (const Piece& piece : pieces) {
        const std::int64_t count = (piece.end - piece.begin) * model.hidden;
        std::copy(from, from + count, streams[piece.sequence].begin() + piece.begin * model.hidden);
        from += count;
    }
    expect(std::equal(x.begin(), x.end(), tapped.begin(), same), "a tap differs from the end");
}

}  // namespace

void layers(Random& random) {
    const Model model = draw_model(random);
    const KVType type = random.of({KVType::f32, KVType::f16, KVType::bf16, KVType::i8});
    Memory memory(random, model, type, random.of<std::int64_t>({1, 3, 8, 16, 40, 130}));
    std::vector<std::vector<float>> streams;
    for (const std::int64_t length : memory.lengths) {
        streams.emplace_back(static_cast<std::size_t>(length * model.hidden));
        for (float& value : streams.back()) {
            value = random.activation();
        }
    }
    for (const std::string& name : available_paths()) {
        Workspace space(path_by_name(name), true);
        memory.clear();
        auto whole = streams;
        for (std::size_t i = 0; i < whole.size(); ++i) {
            pass(random, model, memory, {{i, 0, memory.lengths[i]}}, whole, 1, space);
        }
        memory.clear();
        auto pieced = streams;
        std::vector<std::int64_t> done(streams.size(), 0);
        for (;;) {
            std::vector<Piece> pieces;
            for (std::size_t i = 0; i < streams.size(); ++i) {
                if (done[i] < memory.lengths[i] && !random.one_in(3)) {
                    const std::int64_t most = random.of<std::int64_t>({1, 4, 40, 200});
                    const std::int64_t end =
                        std::min(memory.lengths[i], done[i] + random.whole(1, most));
                    pieces.push_back({i, done[i], end});
                    done[i] = end;
                }
            }
            if (!pieces.empty()) {
                pass(random, model, memory, pieces, pieced, random.of({1, 2, 3}), space);
            } else if (done == memory.lengths) {
                break;
            }
        }
        for (std::size_t i = 0; i < streams.size(); ++i) {
            expect(std::equal(whole[i].begin(), whole[i].end(), pieced[i].begin(), same),
                   name + ": a token's bits depend on its company");
        }
    }
}

void rows(Random& random) {
    const std::int64_t width = random.whole(1, 150), k = random.whole(1, width);
    std::vector<float> x(static_cast<std::size_t>(width)), other = numbers(random, width, 1.0F);
    for (float& value : x) {
        value = random.one_in(4) ? std::round(random.normal()) : random.activation();
    }
    std::vector<std::int64_t> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        const float left = x[static_cast<std::size_t>(a)], right = x[static_cast<std::size_t>(b)];
        return std::isnan(left) ? !std::isnan(right) : left > right;
    });
    std::vector<std::vector<float>> results;
    for (const std::string& name : available_paths()) {
        const RowKernels& kernels = row_kernels(path_by_name(name));
        std::vector<float> values(static_cast<std::size_t>(k)), out(x.size()), sum = other;
        std::vector<std::int64_t> ids(static_cast<std::size_t>(k));
        kernels.top_k(x.data(), width, k, values.data(), ids.data());
        expect(std::equal(ids.begin(), ids.end(), order.begin()), name + ": top_k");
        expect(kernels.argmax(x.data(), width) == order[0], name + ": argmax");
        results.emplace_back();
        const auto note = [&] {
            results.back().insert(results.back().end(), out.begin(), out.end());
        };
        kernels.rms_norm(x.data(), width, other.data(), 1e-5F, out.data());
        note();
        kernels.silu_and_mul(x.data(), other.data(), width, out.data());
        note();
        kernels.rope(x.data(), width / 2, other.data(), other.data() + width / 2, out.data());
        note();
        kernels.add(x.data(), other.data(), width, out.data());
        note();
        kernels.add_scaled(x.data(), 0.5F, width, sum.data());
        out = sum;
        note();
        const auto& first = results.front();
        expect(std::equal(first.begin(), first.end(), results.back().begin(), same),
               name + ": a row's bits depend on the instruction set");
    }
}

}  // namespace drumline::fuzz
