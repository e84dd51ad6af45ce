// Attention (equation 1) over sentences that lie end to end in a row, on a CPU in float32, and its gradients.
//
// A sentence's weights of a few queries are in the cache from the first product to the last one. They are not kept: the
// backward pass computes them again from the logarithm of each query's normalizer. Products are of the sentence's own
// queries and keys, while PyTorch's are of whole blocks of sentences. A sentence's results do not depend on the others
// or on the number of threads. C++17, no library; compile with
//     g++ -std=c++17 -O3 -march=native -fPIC -shared -pthread attention.cpp -o attention.so

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t QUERIES = 32;                // of a sentence at a time, so that their weights stay in the cache
constexpr int64_t SCORES_PER_THREAD = 1 << 14;  // with fewer, starting a thread takes longer than its work

// A matrix whose rows are contiguous; row i begins at at + i * row.
struct Matrix {
    float* at;
    int64_t row;

    Matrix from(int64_t i, int64_t j) const { return {at + i * row + j, row}; }
};

// c = a b or, if `add`, c += a b, for ROWS rows and VECTORS vectors of columns of c. If TRANSPOSED, a is the transpose
// of the matrix that is given.
template <bool TRANSPOSED, int ROWS, int VECTORS>
inline void multiply_tile(Matrix a, Matrix b, Matrix c, int64_t depth, bool add) {
    Floats sums[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < depth; ++k) {
        Floats columns[VECTORS];
        for (int v = 0; v < VECTORS; ++v) columns[v] = load(b.at + k * b.row + v * LANES);
        for (int i = 0; i < ROWS; ++i) {
            const float factor = TRANSPOSED ? a.at[k * a.row + i] : a.at[i * a.row + k];
            for (int v = 0; v < VECTORS; ++v) sums[i][v] += columns[v] * factor;
        }
    }
    for (int i = 0; i < ROWS; ++i)
        for (int v = 0; v < VECTORS; ++v) {
            float* const place = c.at + i * c.row + v * LANES;
            store(place, add ? load(place) + sums[i][v] : sums[i][v]);
        }
}

template <bool TRANSPOSED, int ROWS>
inline void multiply_rows(Matrix a, Matrix b, Matrix c, int64_t depth, int64_t columns, bool add) {
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        multiply_tile<TRANSPOSED, ROWS, 2>(a, b.from(0, j), c.from(0, j), depth, add);
    if (j < columns) multiply_tile<TRANSPOSED, ROWS, 1>(a, b.from(0, j), c.from(0, j), depth, add);
}

// c = a b or, if `add`, c += a b. The number of columns is a multiple of LANES.
template <bool TRANSPOSED>
void multiply(Matrix a, Matrix b, Matrix c, int64_t rows, int64_t depth, int64_t columns, bool add = false) {
    const auto from = [&](int64_t i) { return TRANSPOSED ? a.from(0, i) : a.from(i, 0); };
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) multiply_rows<TRANSPOSED, 4>(from(i), b, c.from(i, 0), depth, columns, add);
    switch (rows - i) {
        case 3: return multiply_rows<TRANSPOSED, 3>(from(i), b, c.from(i, 0), depth, columns, add);
        case 2: return multiply_rows<TRANSPOSED, 2>(from(i), b, c.from(i, 0), depth, columns, add);
        case 1: return multiply_rows<TRANSPOSED, 1>(from(i), b, c.from(i, 0), depth, columns, add);
    }
}

inline int64_t whole_vectors(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Write the transpose of [rows, columns], times a factor. Its rows are filled up to whole vectors with their last number.
void transpose(Matrix from, Matrix to, int64_t rows, int64_t columns, float factor) {
    for (int64_t i = 0; i < rows; i += LANES) {
        const float* sources[LANES];
        for (int lane = 0; lane < LANES; ++lane) sources[lane] = from.from(std::min(i + lane, rows - 1), 0).at;
        for (int64_t j = 0; j < columns; ++j) {
            Floats value;  // Stored whole, since a load of several stores would wait for them.
            for (int lane = 0; lane < LANES; ++lane) value[lane] = sources[lane][j];
            store(to.from(j, i).at, value * factor);
        }
    }
}

// Replace all but the first `count` numbers by 0. Masks, since a vector that was written in parts is slow to load.
inline Floats first_of(Floats x, int64_t count) {
    Integers lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    return lane < int32_t(count) ? x : Floats{};
}

// Turn the first `count` scores into weights, and those from there to `end` into zeros. `end` is a multiple of LANES.
// Return the logarithm of the normalizer; it and the weights are NaN if a score is not finite.
float softmax(float* scores, int64_t count, int64_t end) {
    Floats largest = all(scores[0]), total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats difference = load(scores + i) - scores[0];
        largest = larger(first_of(difference, count - i) + scores[0], largest);
        total += difference - difference;  // NaN unless all are finite
    }
    const float shift = maximum(largest);
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats e = first_of(exponential(load(scores + i) - shift), count - i);
        store(scores + i, e);
        total += e;
    }
    const float normalizer = sum(total), factor = 1.0f / normalizer;
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, load(scores + i) * factor);
    for (int64_t i = whole_vectors(count); i < end; i += LANES) store(scores + i, Floats{});
    return shift + std::log(normalizer);
}

// Do the same for a normalizer that is known.
void softmax(float* scores, int64_t count, int64_t end, float log_normalizer) {
    for (int64_t i = 0; i < count; i += LANES)
        store(scores + i, first_of(exponential(load(scores + i) - log_normalizer), count - i));
    for (int64_t i = whole_vectors(count); i < end; i += LANES) store(scores + i, Floats{});
}

// Turn the gradient of weights into that of scores, times a factor.
void softmax_gradient(const float* weights, float* gradient, int64_t end, float factor) {
    Floats total = {};
    for (int64_t i = 0; i < end; i += LANES) total += load(weights + i) * load(gradient + i);
    const float mean = sum(total);
    for (int64_t i = 0; i < end; i += LANES)
        store(gradient + i, load(weights + i) * (load(gradient + i) - mean) * factor);
}

struct Request {
    Matrix queries, keys, values;                 // [R, H * K], [M, H * K], [M, H * V]
    Matrix result, normalizers;                   // [R, H * V]; [R, H], their logarithms
    Matrix gradient;                              // of the result; read in the backward pass, like the normalizers
    Matrix grad_queries, grad_keys, grad_values;  // written in the backward pass
    const int32_t *query_offsets, *key_offsets;   // [segments + 1]
    int64_t num_segments, num_heads, key_size, value_size, longest;  // the last: number of keys of a segment
    int64_t is_causal, is_backward, num_threads;
};

// One head of one segment.
class Head {
public:
    // `memory` has space for `size(request)` numbers.
    Head(const Request& request, int64_t segment, int64_t head, float* memory) : request_(request) {
        const int64_t first_query = request.query_offsets[segment], first_key = request.key_offsets[segment];
        num_queries_ = request.query_offsets[segment + 1] - first_query;
        num_keys_ = request.key_offsets[segment + 1] - first_key;
        const auto part = [&](Matrix of, int64_t row, int64_t width) { return of.from(row, head * width); };
        queries_ = part(request.queries, first_query, request.key_size);
        keys_ = part(request.keys, first_key, request.key_size);
        values_ = part(request.values, first_key, request.value_size);
        result_ = part(request.result, first_query, request.value_size);
        normalizers_ = part(request.normalizers, first_query, 1);
        gradient_ = part(request.gradient, first_query, request.value_size);
        grad_queries_ = part(request.grad_queries, first_query, request.key_size);
        grad_keys_ = part(request.grad_keys, first_key, request.key_size);
        grad_values_ = part(request.grad_values, first_key, request.value_size);
        weights_ = {memory, whole_vectors(num_keys_)};
        grad_weights_ = weights_.from(QUERIES, 0);
        keys_transposed_ = grad_weights_.from(QUERIES, 0);
        values_transposed_ = keys_transposed_.from(request.key_size, 0);
    }

    static int64_t size(const Request& request) {
        return (2 * QUERIES + request.key_size + request.value_size) * whole_vectors(request.longest);
    }

    void forward() {
        begin();
        for (int64_t first = 0; first < num_queries_; first += QUERIES) {
            const int64_t count = std::min(QUERIES, num_queries_ - first), seen = visible(first + count - 1);
            multiply_scores(first, count, seen);
            for (int64_t i = 0; i < count; ++i)
                *normalizers_.from(first + i, 0).at =
                    softmax(weights_.from(i, 0).at, visible(first + i), whole_vectors(seen));
            multiply<false>(weights_, values_, result_.from(first, 0), count, seen, request_.value_size);
        }
    }

    void backward() {
        begin();
        transpose(values_, values_transposed_, num_keys_, request_.value_size, 1.0f);
        for (int64_t j = 0; j < num_keys_; ++j) {
            std::fill_n(grad_keys_.from(j, 0).at, request_.key_size, 0.0f);
            std::fill_n(grad_values_.from(j, 0).at, request_.value_size, 0.0f);
        }
        for (int64_t first = 0; first < num_queries_; first += QUERIES) {
            const int64_t count = std::min(QUERIES, num_queries_ - first), seen = visible(first + count - 1);
            const int64_t end = whole_vectors(seen), key_size = request_.key_size, value_size = request_.value_size;
            const Matrix gradient = gradient_.from(first, 0);
            multiply_scores(first, count, seen);
            multiply<false>(gradient, values_transposed_, grad_weights_, count, value_size, end);
            for (int64_t i = 0; i < count; ++i) {
                float* const weights = weights_.from(i, 0).at;
                softmax(weights, visible(first + i), end, *normalizers_.from(first + i, 0).at);
                softmax_gradient(weights, grad_weights_.from(i, 0).at, end, scale());
            }
            multiply<true>(weights_, gradient, grad_values_, seen, count, value_size, true);
            multiply<false>(grad_weights_, keys_, grad_queries_.from(first, 0), count, seen, key_size);
            multiply<true>(grad_weights_, queries_.from(first, 0), grad_keys_, seen, count, key_size, true);
        }
    }

private:
    const Request& request_;
    int64_t num_queries_, num_keys_;
    Matrix queries_, keys_, values_, result_, normalizers_, gradient_, grad_queries_, grad_keys_, grad_values_;
    Matrix weights_, grad_weights_, keys_transposed_, values_transposed_;

    float scale() const { return 1.0f / std::sqrt(float(request_.key_size)); }

    // Number of keys that a query attends to.
    int64_t visible(int64_t query) const { return request_.is_causal ? query + 1 : num_keys_; }

    void begin() { transpose(keys_, keys_transposed_, num_keys_, request_.key_size, scale()); }

    void multiply_scores(int64_t first, int64_t count, int64_t seen) {
        multiply<false>(queries_.from(first, 0), keys_transposed_, weights_, count, request_.key_size, whole_vectors(seen));
    }
};

}  // namespace

// Compute the forward or the backward pass of all heads of all segments. A query of a segment without keys gets zeros.
// Return 0, or -1 if there is not enough memory.
extern "C" int64_t compute_attention(const Request* request) {
    const int64_t num_heads = request->num_heads, count = request->num_segments * num_heads;
    const int64_t scores = request->query_offsets[request->num_segments] * request->longest * num_heads;
    const int64_t num_threads = std::min({request->num_threads, count, 1 + scores / SCORES_PER_THREAD});
    try {
        std::vector<float> memory(Head::size(*request) * num_threads);
        std::atomic<int64_t> next{0};
        const auto work = [&](int64_t number) {
            for (int64_t segment; (segment = next++) < request->num_segments;)
                for (int64_t head = 0; head < num_heads; ++head) {
                    Head one(*request, segment, head, memory.data() + number * Head::size(*request));
                    request->is_backward ? one.backward() : one.forward();
                }
        };
        std::vector<std::thread> threads;
        threads.reserve(num_threads);
        try {
            for (int64_t i = 1; i < num_threads; ++i) threads.emplace_back(work, i);
        } catch (const std::exception&) {  // No more threads: those that are there do the work.
        }
        work(0);
        for (std::thread& thread : threads) thread.join();
    } catch (const std::exception&) {
        return -1;
    }
    return 0;
}
