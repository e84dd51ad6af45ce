// Vectors of floats, of the size that this processor has, and vectors of bfloat16 as floats; and work in threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

namespace {

// Call work(0) to work(count - 1), each in a thread of its own but for work(0), and wait for them.
template <class Work>
void run_in_threads(int64_t count, Work work) {
    std::vector<std::thread> threads;
    threads.reserve(count);
    int64_t started = 1;
    try {
        for (; started < count; ++started) threads.emplace_back(work, started);
    } catch (const std::exception&) {  // No more threads: this one does what is left.
    }
    work(0);
    for (; started < count; ++started) work(started);
    for (std::thread& thread : threads) thread.join();
}

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t HalfWords __attribute__((vector_size(LANES * sizeof(uint16_t))));

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

struct Bfloat16 {
    uint16_t bits;
};

inline Floats read(const float* from) { return load(from); }

inline Floats read(const Bfloat16* from) {
    HalfWords halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats value;
    std::memcpy(&value, &words, sizeof value);
    return value;
}

inline void write(float* to, Floats value) { store(to, value); }

// Round to nearest, ties to even. What is not finite stays so.
inline void write(Bfloat16* to, Floats value) {
    Words words;
    std::memcpy(&words, &value, sizeof words);
    words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
    const HalfWords halves = __builtin_convertvector(words, HalfWords);
    std::memcpy(to, &halves, sizeof halves);
}

inline Floats all(float value) { return value - Floats{}; }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Return a_0, b_0, a_1, b_1, ... of the lower halves of two vectors or, if HIGH, of the upper ones.
template <bool HIGH, int... I>
inline Floats zip(Floats a, Floats b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (I % 2 * LANES + (HIGH ? LANES / 2 : 0) + I / 2)...);
#else
    return __builtin_shuffle(a, b, Integers{(I % 2 * LANES + (HIGH ? LANES / 2 : 0) + I / 2)...});
#endif
}

// Transpose a square. Each round moves the last bit of a row's number to the front of a column's.
inline void transpose(Floats (&rows)[LANES]) {
    constexpr auto places = std::make_integer_sequence<int, LANES>();
    for (int round = 1; round < LANES; round *= 2) {
        Floats zipped[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            zipped[2 * i] = zip<false>(rows[i], rows[i + LANES / 2], places);
            zipped[2 * i + 1] = zip<true>(rows[i], rows[i + LANES / 2], places);
        }
        std::copy_n(zipped, LANES, rows);
    }
}

// Halve a vector until one element is left.
template <int WIDTH, class Combine>
inline float reduce(const float* lanes, Combine combine) {
    if constexpr (WIDTH == 1) {
        return lanes[0];
    } else {
        typedef float Half __attribute__((vector_size(WIDTH / 2 * sizeof(float))));
        Half low, high;
        std::memcpy(&low, lanes, sizeof low);
        std::memcpy(&high, lanes + WIDTH / 2, sizeof high);
        low = combine(low, high);
        float rest[WIDTH / 2];
        std::memcpy(rest, &low, sizeof rest);
        return reduce<WIDTH / 2>(rest, combine);
    }
}

inline float sum(Floats value) {
    float lanes[LANES];
    store(lanes, value);
    return reduce<LANES>(lanes, [](auto a, auto b) { return a + b; });
}

inline float maximum(Floats value) {
    float lanes[LANES];
    store(lanes, value);
    return reduce<LANES>(lanes, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x for x <= 0, with a relative error of about 1e-7 (Cephes' polynomial). Below -87 the result is about 1e-38.
inline Floats exponential(Floats x) {
    x = larger(x, all(-87.0f));
    const Integers n = __builtin_convertvector(x * 1.44269504088896341f - 0.5f, Integers);  // nearest, as x <= 0
    const Floats whole = __builtin_convertvector(n, Floats);
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    const Integers power = (n + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &power, sizeof scale);
    return y * scale;
}

inline float exponential(float x) { return exponential(all(x))[0]; }

}  // namespace
