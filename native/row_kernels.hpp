// The bodies of the row operations. Included once per instruction set, inside a namespace of its
// own (hence no guard), after `wide`, its longest vector; `rows.hpp` says what each function does. Every
// path gives the same bits.

template <typename Vector>
DRUMLINE_INLINE Vector load(const float* from) {
    Vector out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

void rms_norm(const float* x, std::int64_t width, const float* weight, float eps, float* out) {
    v8f squares = splat(0.0F);
    std::int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        const v8f part = load8(x + i);
        squares = squares + part * part;
    }
    float sum = sum8(squares);
    for (; i < width; ++i) {
        sum = sum + x[i] * x[i];
    }
    const float inverse = 1.0F / std::sqrt(sum / static_cast<float>(width) + eps);
    for (i = 0; i + lanes <= width; i += lanes) {
        store8(out + i, load8(x + i) * splat(inverse) * load8(weight + i));
    }
    for (; i < width; ++i) {
        out[i] = x[i] * inverse * weight[i];
    }
}

void silu_and_mul(const float* gate, const float* up, std::int64_t width, float* out) {
    std::int64_t i = 0;
    for (; i + lanes_of<wide> <= width; i += lanes_of<wide>) {
        const wide part = load<wide>(gate + i);
        store(out + i, part / (all<wide>(1.0F) + exponential(-part)) * load<wide>(up + i));
    }
    for (; i < width; ++i) {
        out[i] = gate[i] / (1.0F + exp1(-gate[i])) * up[i];
    }
}

void rope(const float* x, std::int64_t half, const float* cos, const float* sin, float* out) {
    std::int64_t i = 0;
    for (; i + lanes <= half; i += lanes) {
        const v8f low = load8(x + i), high = load8(x + half + i);
        const v8f c = load8(cos + i), s = load8(sin + i);
        store8(out + i, low * c - high * s);
        store8(out + half + i, high * c + low * s);
    }
    for (; i < half; ++i) {
        const float low = x[i], high = x[half + i];
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[i] + low * sin[i];
    }
}

void add(const float* x, const float* y, std::int64_t width, float* out) {
    std::int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        store8(out + i, load8(x + i) + load8(y + i));
    }
    for (; i < width; ++i) {
        out[i] = x[i] + y[i];
    }
}

void add_scaled(const float* x, float scale, std::int64_t width, float* out) {
    std::int64_t i = 0;
    for (; i + lanes <= width; i += lanes) {
        store8(out + i, load8(out + i) + load8(x + i) * splat(scale));
    }
    for (; i < width; ++i) {
        out[i] = out[i] + x[i] * scale;
    }
}

std::int64_t argmax(const float* x, std::int64_t width) {
    constexpr int chains = 4;
    v8f best[chains];
    v8i numbers[chains];
    for (int c = 0; c < chains; ++c) {
        best[c] = splat(-std::numeric_limits<float>::infinity());
        numbers[c] = best[c] == best[c];
    }
    std::int64_t i = 0;
    for (; i + chains * lanes <= width; i += chains * lanes) {
        for (int c = 0; c < chains; ++c) {
            const v8f part = load8(x + i + c * lanes);
            numbers[c] = numbers[c] & (part == part);
            best[c] = part > best[c] ? part : best[c];
        }
    }
    float most = best[0][0];
    bool all_numbers = true;
    for (int c = 0; c < chains; ++c) {
        for (int lane = 0; lane < lanes; ++lane) {
            most = best[c][lane] > most ? best[c][lane] : most;
            all_numbers = all_numbers && numbers[c][lane] != 0;
        }
    }
    for (; i < width; ++i) {
        most = x[i] > most ? x[i] : most;
        all_numbers = all_numbers && x[i] == x[i];
    }
    // Where it first stood, 64 numbers at a time until it is among them.
    const v8f wanted = splat(most);
    for (i = 0; i + 8 * lanes <= width; i += 8 * lanes) {
        v8i found = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int v = 0; v < 8; ++v) {
            const v8f part = load8(x + i + v * lanes);
            found = found | (all_numbers ? part == wanted : part != part);
        }
        std::int32_t any = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            any |= found[lane];
        }
        if (any != 0) {
            break;
        }
    }
    for (; i < width; ++i) {
        if (all_numbers ? x[i] == most : x[i] != x[i]) {
            return i;
        }
    }
    return 0;
}

// Whether candidate `a` comes before `b`: the larger first, not a number before all, ties to the
// lowest id.
inline bool before(float a, std::int64_t a_id, float b, std::int64_t b_id) {
    if (a != a || b != b) {
        return a != a && (b == b || a_id < b_id);
    }
    return a > b || (a == b && a_id < b_id);
}

// Restores the heap whose root is the candidate that comes last, after `at` was replaced.
inline void sink(float* values, std::int64_t* ids, std::int64_t count, std::int64_t at) {
    for (std::int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count &&
            before(values[child], ids[child], values[child + 1], ids[child + 1])) {
            ++child;
        }
        if (!before(values[at], ids[at], values[child], ids[child])) {
            return;
        }
        std::swap(values[at], values[child]);
        std::swap(ids[at], ids[child]);
        at = child;
    }
}

void top_k(const float* x, std::int64_t width, std::int64_t k, float* values, std::int64_t* ids) {
    for (std::int64_t i = 0; i < k; ++i) {
        values[i] = x[i];
        ids[i] = i;
    }
    for (std::int64_t i = k / 2; i-- > 0;) {
        sink(values, ids, k, i);
    }
    for (std::int64_t i = k; i < width;) {
        if (i + lanes <= width) {  // eight at a time while none of them gets in
            const v8i beaten = load8(x + i) <= splat(values[0]);
            std::int32_t all = -1;
            for (int lane = 0; lane < lanes; ++lane) {
                all &= beaten[lane];
            }
            if (all != 0) {
                i += lanes;
                continue;
            }
        }
        const std::int64_t end = std::min(width, i + lanes);
        for (; i < end; ++i) {
            if (before(x[i], i, values[0], ids[0])) {
                values[0] = x[i];
                ids[0] = i;
                sink(values, ids, k, 0);
            }
        }
    }
    for (std::int64_t last = k - 1; last > 0; --last) {  // a heap, read from its end, is in order
        std::swap(values[0], values[last]);
        std::swap(ids[0], ids[last]);
        sink(values, ids, last, 0);
    }
}

const RowKernels kernels = {rms_norm, silu_and_mul, rope, add, add_scaled, argmax, top_k};
