// What model/loss.py computes from logits on a CPU: softmax, cross-entropy, R-Drop's divergence and their gradients.
//
// PyTorch's operators read or write a chunk of logits about eight times, and about twenty times for the divergence.
// This program reads a row twice and a pair of rows three times, while they are in the cache, and overwrites them with
// their gradient. Sums are in float32. A row's results do not depend on the other rows or on the number of threads.
// C++17, no library; compile with
//     g++ -std=c++17 -O3 -march=native -fPIC -shared -pthread loss.cpp -o loss.so

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t LOGITS_PER_THREAD = 1 << 16;  // with fewer, starting a thread takes longer than its work

inline float read_one(const float* from) { return *from; }

inline float read_one(const Bfloat16* from) {
    const uint32_t word = uint32_t(from->bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// A row of logits in whole vectors. The last one is filled up with numbers whose exponentials add nothing to a sum.
template <class Logit>
struct Row {
    Logit* logits;
    int64_t whole;  // number of logits in the vectors before the last one
    int rest;       // number of logits in the last vector
    alignas(64) Logit last[LANES];

    Row(Logit* from, int64_t num_classes)
        : logits(from), whole((num_classes - 1) / LANES * LANES), rest(int(num_classes - whole)) {
        write(last, all(-1e38f));
        std::memcpy(last, from + whole, rest * sizeof *last);
    }

    Logit* at(int64_t i) { return i < whole ? logits + i : last; }

    void write_last() { std::memcpy(logits + whole, last, rest * sizeof *last); }
};

struct Exponentials {
    float largest;
    float total;  // of exp(logit - largest); NaN if a logit is not finite
};

// Find the largest logit, and whether all are finite.
template <class Logit>
inline Exponentials scan(Row<Logit>& row) {
    Floats largest = all(MINUS_INFINITY), zero = {};
    for (int64_t i = 0; i <= row.whole; i += LANES) {
        const Floats x = read(row.at(i));
        largest = larger(x, largest);
        zero += x - x;  // NaN unless x is finite
    }
    return {maximum(largest), sum(zero)};
}

struct Results {
    float *largest, *target_logit, *max_probability;  // one for each row
    float* divergence;                              // one for each pair
};

struct Request {
    void* logits;            // [num_rows, num_classes], overwritten by the gradient if `with_gradient`
    const int64_t* targets;  // [num_rows]
    Results results;
    int64_t num_rows, num_classes, num_threads;
    int64_t is_bfloat16;  // else float32
    int64_t in_pairs;     // rows 0 and 1, 2 and 3, ... are two passes over the same token
    int64_t with_gradient;
    float epsilon, alpha;
};

// One row: softmax and the gradient of the cross-entropy, without its term -epsilon / V.
template <class Logit>
void compute_row(const Request& request, int64_t index, float* exponentials) {
    Logit* const logits = static_cast<Logit*>(request.logits) + index * request.num_classes;
    const int64_t target = request.targets[index];
    Row<Logit> row(logits, request.num_classes);
    Exponentials sums = scan(row);
    Floats total = all(sums.total);
    for (int64_t i = 0; i <= row.whole; i += LANES) {
        const Floats e = exponential(read(row.at(i)) - sums.largest);
        store(exponentials + i, e);
        total += e;
    }
    sums.total = sum(total);
    const float scale = 1.0f / sums.total;
    request.results.largest[index] = sums.largest;
    request.results.target_logit[index] = read_one(logits + target);
    request.results.max_probability[index] = scale;
    if (!request.with_gradient) return;
    exponentials[target] -= (1.0f - request.epsilon) * sums.total;
    for (int64_t i = 0; i <= row.whole; i += LANES) write(row.at(i), load(exponentials + i) * scale);
    row.write_last();
}

// Two rows P and Q: as above, with alpha * (KL(P || Q) + KL(Q || P)) / 2 and its gradient.
template <class Logit>
void compute_pair(const Request& request, int64_t index, float* exponentials) {
    Logit* const logits = static_cast<Logit*>(request.logits) + index * request.num_classes;
    const int64_t target = request.targets[index];
    Row<Logit> p(logits, request.num_classes), q(logits + request.num_classes, request.num_classes);
    float *const exp_p = exponentials, *const exp_q = exponentials + p.whole + LANES;
    Exponentials of_p = scan(p), of_q = scan(q);
    // Sums of the difference of the logits, weighted by the exponentials of either side.
    Floats total_p = all(of_p.total), total_q = all(of_q.total), by_p = {}, by_q = {};
    for (int64_t i = 0; i <= p.whole; i += LANES) {
        const Floats x = read(p.at(i)), y = read(q.at(i));
        const Floats e = exponential(x - of_p.largest), f = exponential(y - of_q.largest);
        store(exp_p + i, e), store(exp_q + i, f);
        total_p += e, total_q += f;
        by_p += e * (x - y), by_q += f * (x - y);
    }
    of_p.total = sum(total_p), of_q.total = sum(total_q);
    const float scale_p = 1.0f / of_p.total, scale_q = 1.0f / of_q.total;
    // log(P / Q) is the difference of the logits minus a number for each row, which cancels in the sum of both
    // divergences, and in log(P / Q) - KL(P || Q).
    const float mean_p = sum(by_p) * scale_p, mean_q = sum(by_q) * scale_q;
    const Results& results = request.results;
    results.largest[index] = of_p.largest, results.largest[index + 1] = of_q.largest;
    results.target_logit[index] = read_one(logits + target);
    results.target_logit[index + 1] = read_one(logits + request.num_classes + target);
    results.max_probability[index] = scale_p, results.max_probability[index + 1] = scale_q;
    results.divergence[index / 2] = (mean_p - mean_q) / 2;
    if (!request.with_gradient) return;
    // d KL(P || Q) is P * (log(P / Q) - KL) by P's logits, and Q - P by Q's.
    const float half = request.alpha / 2, one_hot = request.epsilon - 1.0f;
    const float own_p = (1.0f + half - half * mean_p) * scale_p, other_p = half * scale_p;
    const float own_q = (1.0f + half + half * mean_q) * scale_q, other_q = half * scale_q;
    for (int64_t i = 0; i <= p.whole; i += LANES) {
        const Floats difference = read(p.at(i)) - read(q.at(i)), e = load(exp_p + i), f = load(exp_q + i);
        Floats grad_p = e * (own_p + other_p * difference) - f * other_q;
        Floats grad_q = f * (own_q - other_q * difference) - e * other_p;
        if (target >= i && target < i + LANES) grad_p[target - i] += one_hot, grad_q[target - i] += one_hot;
        write(p.at(i), grad_p), write(q.at(i), grad_q);
    }
    p.write_last(), q.write_last();
}

template <class Logit>
void compute(const Request& request, int64_t begin, int64_t end, float* exponentials) {
    if (request.in_pairs)
        for (int64_t i = begin; i < end; ++i) compute_pair<Logit>(request, 2 * i, exponentials);
    else
        for (int64_t i = begin; i < end; ++i) compute_row<Logit>(request, i, exponentials);
}

}  // namespace

// Compute the loss of rows of logits. Return 0, or -1 if there is not enough memory.
extern "C" int64_t compute_loss(const Request* request) {
    const int64_t count = request->in_pairs ? request->num_rows / 2 : request->num_rows;
    const int64_t enough = 1 + request->num_rows * request->num_classes / LOGITS_PER_THREAD;
    const int64_t num_threads = std::max<int64_t>(1, std::min({request->num_threads, count, enough}));
    const int64_t size = (request->in_pairs ? 2 : 1) * ((request->num_classes - 1) / LANES + 1) * LANES;
    try {
        std::vector<float> exponentials(size * num_threads);
        run_in_threads(num_threads, [&](int64_t number) {
            const int64_t begin = count * number / num_threads, end = count * (number + 1) / num_threads;
            float* const own = exponentials.data() + size * number;
            request->is_bfloat16 ? compute<Bfloat16>(*request, begin, end, own)
                                 : compute<float>(*request, begin, end, own);
        });
    } catch (const std::exception&) {
        return -1;
    }
    return 0;
}
