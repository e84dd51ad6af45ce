// Attention (equation 1) over sentences that lie end to end in a row, on a CPU, and its gradients.
//
// The weights of a few queries of a sentence stay in the cache from the first product to the last one. They are not
// stored: the backward pass computes them again from the logarithm of each query's normalizer. One head of a sentence at
// a time is copied to contiguous rows, which are read faster, and converted from bfloat16 to float32. All sums are in
// float32. A sentence's results do not depend on the others or on the number of threads.
// C++17, no library; compile with
//     g++ -std=c++17 -O3 -march=native -fPIC -shared -pthread attention.cpp -o attention.so

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t QUERIES = 32;  // queries of a sentence at a time, so that their weights stay in the cache
constexpr int64_t SCORES_PER_THREAD = 1 << 14;  // with fewer, starting a thread takes longer than its work

// A matrix whose rows are contiguous; row i begins at at + i * row.
template <class Number>
struct MatrixOf {
    Number* at;
    int64_t row;

    MatrixOf from(int64_t i, int64_t j) const { return {at + i * row + j, row}; }
};

using Matrix = MatrixOf<float>;

// Copy [rows, columns], and convert them if the types differ. The number of columns is a multiple of LANES.
template <class From, class To>
void copy(MatrixOf<From> from, MatrixOf<To> to, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; j += LANES) write(to.from(i, j).at, read(from.from(i, j).at));
}

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

// Do the same for all rows: ROWS at a time as long as there are as many, then half as many at a time.
template <bool TRANSPOSED, int ROWS, int VECTORS>
void multiply_columns(Matrix a, Matrix b, Matrix c, int64_t rows, int64_t depth, bool add) {
    int64_t i = 0;
    const auto from = [&] { return TRANSPOSED ? a.from(0, i) : a.from(i, 0); };
    for (; i + ROWS <= rows; i += ROWS) multiply_tile<TRANSPOSED, ROWS, VECTORS>(from(), b, c.from(i, 0), depth, add);
    if constexpr (ROWS > 1)
        if (i < rows) multiply_columns<TRANSPOSED, ROWS / 2, VECTORS>(from(), b, c.from(i, 0), rows - i, depth, add);
}

// c = a b or, if `add`, c += a b. The number of columns is a multiple of LANES. A tile has eight sums, about as many as
// keep a processor busy.
template <bool TRANSPOSED>
void multiply(Matrix a, Matrix b, Matrix c, int64_t rows, int64_t depth, int64_t columns, bool add = false) {
    int64_t j = 0;
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        multiply_columns<TRANSPOSED, 4, 2>(a, b.from(0, j), c.from(0, j), rows, depth, add);
    if (j < columns) multiply_columns<TRANSPOSED, 8, 1>(a, b.from(0, j), c.from(0, j), rows, depth, add);
}

inline int64_t whole_vectors(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

// Write the transpose of [rows, columns], times a factor. Its rows are filled up to whole vectors with their last number.
void transpose(Matrix from, Matrix to, int64_t rows, int64_t columns, float factor) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) {
            Floats square[LANES];
            for (int k = 0; k < LANES; ++k) square[k] = load(from.from(std::min(i + k, rows - 1), j).at);
            transpose(square);
            for (int k = 0; k < LANES; ++k) store(to.from(j + k, i).at, square[k] * factor);
        }
}

// Replace all but the first `count` numbers by 0, by a mask: a vector that was written in parts is slow to load.
inline Floats first_of(Floats x, int64_t count) {
    Integers lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    return lane < int32_t(count) ? x : Floats{};
}

// Replace the first `count` scores by weights, and those up to `end`, a multiple of LANES, by zeros. Return the
// logarithm of the normalizer. It and the weights are NaN if a score is not finite.
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

struct Tensor {
    void* at;
    int64_t row;
};

struct Request {
    Tensor queries, keys, values;                 // [R, H * K], [M, H * K], [M, H * V]
    Tensor result, gradient;                      // [R, H * V]; the gradient is read in the backward pass
    Tensor grad_queries, grad_keys, grad_values;  // written in the backward pass
    Matrix normalizers;                           // [R, H], their logarithms, in float32; read in the backward pass
    const int32_t *query_offsets, *key_offsets;   // [sentences + 1]
    int64_t num_sentences, num_heads, key_size, value_size, longest;  // longest: keys of a sentence at most
    int64_t is_causal, is_backward, is_bfloat16, num_threads;
};

// One head of one sentence, of floats or bfloat16.
template <class Number>
class Head {
public:
    // `memory` has space for `size(request)` numbers.
    Head(const Request& request, int64_t sentence, int64_t head, float* memory)
        : request_(request), head_(head), key_size_(request.key_size), value_size_(request.value_size) {
        first_query_ = request.query_offsets[sentence], first_key_ = request.key_offsets[sentence];
        num_queries_ = request.query_offsets[sentence + 1] - first_query_;
        num_keys_ = request.key_offsets[sentence + 1] - first_key_;
        const int64_t width = whole_vectors(request.longest);
        const auto take = [&](int64_t rows, int64_t columns) {
            const Matrix matrix = {memory, columns};
            memory += rows * columns;
            return matrix;
        };
        weights_ = take(QUERIES, width), grad_weights_ = take(QUERIES, width);
        keys_transposed_ = take(key_size_, width), values_transposed_ = take(value_size_, width);
        queries_ = take(QUERIES, key_size_), grad_queries_ = take(QUERIES, key_size_);
        result_ = take(QUERIES, value_size_);
        keys_ = take(width, key_size_), grad_keys_ = take(width, key_size_);
        values_ = take(width, value_size_), grad_values_ = take(width, value_size_);
    }

    static int64_t size(const Request& request) {
        const int64_t width = whole_vectors(request.longest), sizes = request.key_size + request.value_size;
        return QUERIES * (2 * width + sizes + request.key_size) + 3 * width * sizes;
    }

    void forward() {
        read_keys_and_values();
        for (int64_t first = 0; first < num_queries_; first += QUERIES) {
            const int64_t count = std::min(QUERIES, num_queries_ - first), seen = visible(first + count - 1);
            multiply_scores(first, count, seen);
            for (int64_t i = 0; i < count; ++i)
                *normalizer(first + i) = softmax(weights_.from(i, 0).at, visible(first + i), whole_vectors(seen));
            multiply<false>(weights_, values_, result_, count, seen, value_size_);
            copy(result_, part(request_.result, first_query_ + first, value_size_), count, value_size_);
        }
    }

    void backward() {
        read_keys_and_values();
        transpose(values_, values_transposed_, num_keys_, value_size_, 1.0f);
        std::fill_n(grad_keys_.at, num_keys_ * key_size_, 0.0f);
        std::fill_n(grad_values_.at, num_keys_ * value_size_, 0.0f);
        for (int64_t first = 0; first < num_queries_; first += QUERIES) {
            const int64_t count = std::min(QUERIES, num_queries_ - first), seen = visible(first + count - 1);
            const int64_t end = whole_vectors(seen);
            const Matrix gradient = result_;
            copy(part(request_.gradient, first_query_ + first, value_size_), gradient, count, value_size_);
            multiply_scores(first, count, seen);
            multiply<false>(gradient, values_transposed_, grad_weights_, count, value_size_, end);
            for (int64_t i = 0; i < count; ++i) {
                float* const weights = weights_.from(i, 0).at;
                softmax(weights, visible(first + i), end, *normalizer(first + i));
                softmax_gradient(weights, grad_weights_.from(i, 0).at, end, scale());
            }
            multiply<true>(weights_, gradient, grad_values_, seen, count, value_size_, true);
            multiply<false>(grad_weights_, keys_, grad_queries_, count, seen, key_size_);
            multiply<true>(grad_weights_, queries_, grad_keys_, seen, count, key_size_, true);
            copy(grad_queries_, part(request_.grad_queries, first_query_ + first, key_size_), count, key_size_);
        }
        copy(grad_keys_, part(request_.grad_keys, first_key_, key_size_), num_keys_, key_size_);
        copy(grad_values_, part(request_.grad_values, first_key_, value_size_), num_keys_, value_size_);
    }

private:
    const Request& request_;
    int64_t head_, key_size_, value_size_, first_query_, first_key_, num_queries_, num_keys_;
    Matrix weights_, grad_weights_, keys_transposed_, values_transposed_;
    Matrix queries_, grad_queries_, result_;             // of a few queries; the result or its gradient
    Matrix keys_, values_, grad_keys_, grad_values_;  // of the whole sentence

    float scale() const { return 1.0f / std::sqrt(float(key_size_)); }

    // Number of keys that a query attends to.
    int64_t visible(int64_t query) const { return request_.is_causal ? query + 1 : num_keys_; }

    float* normalizer(int64_t query) const { return request_.normalizers.from(first_query_ + query, head_).at; }

    // The `width` columns of this head, from a row on.
    MatrixOf<Number> part(Tensor of, int64_t row, int64_t width) const {
        return MatrixOf<Number>{static_cast<Number*>(of.at), of.row}.from(row, head_ * width);
    }

    void read_keys_and_values() {
        copy(part(request_.keys, first_key_, key_size_), keys_, num_keys_, key_size_);
        copy(part(request_.values, first_key_, value_size_), values_, num_keys_, value_size_);
        transpose(keys_, keys_transposed_, num_keys_, key_size_, scale());
    }

    void multiply_scores(int64_t first, int64_t count, int64_t seen) {
        copy(part(request_.queries, first_query_ + first, key_size_), queries_, count, key_size_);
        multiply<false>(queries_, keys_transposed_, weights_, count, key_size_, whole_vectors(seen));
    }
};

template <class Number>
void compute(const Request& request, int64_t sentence, float* memory) {
    for (int64_t head = 0; head < request.num_heads; ++head) {
        Head<Number> one(request, sentence, head, memory);
        request.is_backward ? one.backward() : one.forward();
    }
}

}  // namespace

// Compute the forward or the backward pass of all heads of all sentences. A query of one without keys gets zeros.
// Return 0, or -1 if there is not enough memory.
extern "C" int64_t compute_attention(const Request* request) {
    const int64_t count = request->num_sentences * request->num_heads;
    const int64_t scores = request->query_offsets[request->num_sentences] * request->longest * request->num_heads;
    const int64_t num_threads = std::min({request->num_threads, count, 1 + scores / SCORES_PER_THREAD});
    try {
        const int64_t size = request->is_bfloat16 ? Head<Bfloat16>::size(*request) : Head<float>::size(*request);
        std::vector<float> memory(size * num_threads);
        std::atomic<int64_t> next{0};
        run_in_threads(num_threads, [&](int64_t number) {
            float* const own = memory.data() + number * size;
            for (int64_t one; (one = next++) < request->num_sentences;)
                request->is_bfloat16 ? compute<Bfloat16>(*request, one, own) : compute<float>(*request, one, own);
        });
    } catch (const std::exception&) {
        return -1;
    }
    return 0;
}
