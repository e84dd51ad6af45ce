// Greedy and beam search, and sampling, with a Transformer on a CPU, from token ids to token ids (sections 3 and 6.1).
//
// The search of model/decoding.py, in float32 and in one program: with a small network, model/decoding.py spends most
// of its time on calling operators. C++17, no library; compile with
//     g++ -std=c++17 -O3 -march=native -fPIC -shared -pthread search.cpp -o search.so
//
// A sentence's answers do not depend on the other sentences: every sum is added in the same order, whatever else is in
// the batch. Sentences that have ended make room for waiting ones. Sentences are not padded. With several threads, each
// decodes sentences of its own.
//
// Names: D d_model, H heads, K and V the size of a head's keys and values, S source tokens. Matrices are row-major.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace {

// ------------------------------------------------------------------------------------------------------- vectors

#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int MAX_ROWS = 6;  // for 16 registers
#else
constexpr int MAX_ROWS = 12;  // for 32 registers: 12 rows of two vectors, two weights, one input
#endif
constexpr int COLUMNS = 2 * LANES;  // outputs of a panel
constexpr int CHUNK = 512;          // vocabulary entries whose logits are held at a time; a multiple of COLUMNS

// The sum of term(kind, i) for i below `count`: of LANES numbers from i on, or of one, as the type of `kind` says.
template <class Term>
inline float sum_of(int count, Term term) {
    Floats total = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES) total += term(Floats{}, i);
    float result = sum(total);
    for (; i < count; ++i) result += term(0.0f, i);
    return result;
}

inline Floats take(Floats, const float* from) { return load(from); }
inline float take(float, const float* from) { return *from; }

inline float dot(const float* a, const float* b, int count) {
    return sum_of(count, [=](auto kind, int i) { return take(kind, a + i) * take(kind, b + i); });
}

inline void add_scaled(float* to, float factor, const float* from, int count) {
    for (int i = 0; i < count; ++i) to[i] += factor * from[i];
}

// Memory of a vector's alignment, not initialized.
class Buffer {
   public:
    float* get(size_t count) {
        if (count > size_) {
            data_.reset(static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
            if (!data_) throw std::bad_alloc();
            size_ = count;
        }
        return data_.get();
    }
    float* data() const { return data_.get(); }

   private:
    struct Free {
        void operator()(float* data) const { std::free(data); }
    };
    std::unique_ptr<float, Free> data_;
    size_t size_ = 0;
};

// ------------------------------------------------------------------------------------------------- linear layers

enum class Activation { NONE, RELU, SWISH };

// The weight [outputs, inputs] and the bias of a linear layer. The weight is stored in panels of COLUMNS outputs, each
// of which holds the COLUMNS weights of input 0, then those of input 1, ...; missing outputs are zero.
struct Linear {
    int outputs = 0, inputs = 0;
    Buffer panels, bias;

    int num_panels() const { return (outputs + COLUMNS - 1) / COLUMNS; }

    void set_shape(int num_outputs, int num_inputs) {
        outputs = num_outputs, inputs = num_inputs;
        std::fill_n(bias.get(size_t(num_panels()) * COLUMNS), size_t(num_panels()) * COLUMNS, 0.0f);
    }

    void set_weight(const float* weight) {
        float* to = panels.get(size_t(num_panels()) * inputs * COLUMNS);
        for (int panel = 0; panel < num_panels(); ++panel)
            for (int i = 0; i < inputs; ++i)
                for (int column = 0; column < COLUMNS; ++column) {
                    const int output = panel * COLUMNS + column;
                    *to++ = output < outputs ? weight[size_t(output) * inputs + i] : 0.0f;
                }
    }

    // Row `output` of the weight.
    void get_row(int output, float* to) const {
        const float* from = panels.data() + size_t(output / COLUMNS) * inputs * COLUMNS + output % COLUMNS;
        for (int i = 0; i < inputs; ++i) to[i] = from[size_t(i) * COLUMNS];
    }
};

inline Floats activated(Floats x, Activation activation) {
    if (activation == Activation::RELU) return larger(x, Floats{});
    if (activation == Activation::SWISH) {
        const Floats e = exponential(x < 0.0f ? x : -x);
        return x * (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
    }
    return x;
}

// One panel for ROWS rows of x.
template <int ROWS>
void multiply_panel(const float* x, size_t x_stride, const Linear& linear, int panel, float* y, size_t y_stride,
                    Activation activation) {
    const int inputs = linear.inputs;
    const float* weights = linear.panels.data() + size_t(panel) * inputs * COLUMNS;
    Floats total[ROWS][2] = {};
    for (int i = 0; i < inputs; ++i, weights += COLUMNS) {
        const Floats first = load(weights), second = load(weights + LANES);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const Floats input = all(x[row * x_stride + i]);
            total[row][0] += input * first;
            total[row][1] += input * second;
        }
    }
    const float* bias = linear.bias.data() + panel * COLUMNS;
    const int columns = std::min(COLUMNS, linear.outputs - panel * COLUMNS);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
        alignas(64) float result[COLUMNS];
        store(result, activated(total[row][0] + load(bias), activation));
        store(result + LANES, activated(total[row][1] + load(bias + LANES), activation));
        std::memcpy(y + row * y_stride + panel * COLUMNS, result, columns * sizeof(float));
    }
}

template <int ROWS>
void multiply_rows(int rows, const float* x, size_t x_stride, const Linear& linear, int panel, float* y,
                   size_t y_stride, Activation activation) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return multiply_rows<ROWS - 1>(rows, x, x_stride, linear, panel, y, y_stride, activation);
    multiply_panel<ROWS>(x, x_stride, linear, panel, y, y_stride, activation);
}

// Panels `first` to `last` - 1 of y = activation(x W^T + b), for x [rows, inputs]. y points to output 0.
void multiply_panels(const float* x, int rows, const Linear& linear, int first, int last, float* y, size_t y_stride,
                     Activation activation) {
    const int num_blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int panel = first; panel < last; ++panel)
        for (int block = 0; block < num_blocks; ++block) {
            // Blocks are of equal size: with few rows, each addition has to wait for the one before it.
            const int begin = int(int64_t(rows) * block / num_blocks), end = int(int64_t(rows) * (block + 1) / num_blocks);
            multiply_rows<MAX_ROWS>(end - begin, x + size_t(begin) * linear.inputs, linear.inputs, linear, panel,
                                    y + begin * y_stride, y_stride, activation);
        }
}

// y [rows, outputs] = activation(x W^T + b), for x [rows, inputs].
void multiply(const float* x, int rows, const Linear& linear, float* y, Activation activation = Activation::NONE) {
    multiply_panels(x, rows, linear, 0, linear.num_panels(), y, linear.outputs, activation);
}

// ------------------------------------------------------------------------------------------------- the network

struct Norm {
    Buffer scale, shift;
};

struct Layer {
    Linear self_input, self_output, cross_query, cross_input, cross_output, inner, outer;
    Norm self_norm, cross_norm, outer_norm;
};

}  // namespace

// Shared with the caller.
extern "C" {
struct Shape {
    int64_t d_model, num_heads, d_k, d_v, d_ff, num_encoder_layers, num_decoder_layers, vocabulary_size, pre_norm,
        activation;  // an `Activation`
    float embedding_scale, norm_epsilon;
};

// A file of weights, little-endian: this header, the position encodings [num_positions, D] and the weights in the order
// of `Model::set_next`, both in float32. The version is the end of `magic`.
struct Header {
    char magic[8];
    Shape shape;
    int64_t num_positions;
};

// How tokens are drawn. See `Sampling` in model/beyond/sampling.py.
struct Sampling {
    const double* uniforms;  // three random numbers in [0, 1) for each place of `Request::answers`
    double temperature, top_p;
    int64_t top_k;
};

struct Request {
    const int64_t* tokens;   // the sources, one after another
    const int64_t* offsets;  // [num_sentences + 1]: source i is tokens[offsets[i]] to tokens[offsets[i + 1] - 1]
    const int64_t* limits;   // [num_sentences]: maximum number of tokens of an answer, the end symbol included
    int64_t num_sentences, beam_size, num_best, stops_at_first, max_tokens, num_threads;
    int64_t begin_id, end_id;
    const int64_t* forbidden;  // ids that are never chosen
    int64_t num_forbidden;
    float length_penalty;
    // Results. The answers of a sentence, best first, have `limits[i]` places each, and follow those of the sentences
    // before it.
    int32_t* answers;
    int64_t* lengths;          // [num_sentences, num_best]; 0 if there is no such answer
    float* scores;             // [num_sentences, num_best]
    float* log_probabilities;  // [num_sentences, num_best]
    int64_t* num_steps;        // [num_sentences]: decoder steps
    // Called now and then by the calling thread, with the number of sentences that have ended since the last call.
    // The search ends early if it returns something else than 0. May be null.
    int (*progress)(int64_t num_ended);
    // To draw one answer to each sentence, with a beam size of 1; null for a search.
    const Sampling* sampling;
};

// The tokens that the answers to sentence i begin with: tokens[offsets[i]] to tokens[offsets[i + 1] - 1].
struct Prefixes {
    const int64_t* tokens;
    const int64_t* offsets;  // [num_sentences + 1]
};
}

namespace {

struct Positions {
    Buffer table;  // [count, D]
    int64_t count = 0;
};

// Searches of several threads may share a model whose weights are set.
struct Model {
    explicit Model(const Shape& given) : shape(given) {
        const int d_model = int(shape.d_model), keys = int(shape.num_heads * shape.d_k);
        const int values = int(shape.num_heads * shape.d_v), d_ff = int(shape.d_ff);
        encoder.resize(shape.num_encoder_layers);
        decoder.resize(shape.num_decoder_layers);
        add_linear(projection, int(shape.vocabulary_size), d_model);
        for (auto* layers : {&encoder, &decoder}) {
            for (Layer& layer : *layers) {
                add_linear(layer.self_input, 2 * keys + values, d_model);
                add_linear(layer.self_output, d_model, values);
                add_norm(layer.self_norm);
                if (layers == &decoder) {
                    add_linear(layer.cross_query, keys, d_model);
                    add_linear(layer.cross_input, keys + values, d_model);
                    add_linear(layer.cross_output, d_model, values);
                    add_norm(layer.cross_norm);
                }
                add_linear(layer.inner, d_ff, d_model);
                add_linear(layer.outer, d_model, d_ff);
                add_norm(layer.outer_norm);
            }
            if (shape.pre_norm) add_norm(layers == &encoder ? encoder_norm : decoder_norm);
        }
    }

    // Set the next weight, in the order of the constructor: the weight of each linear layer, then its bias; the scale
    // of each norm, then its shift. Returns the number of weights that are still missing, or -1 if there are too many.
    int64_t set_next(const float* data) {
        if (next == weights.size()) return -1;
        const Weight& weight = weights[next++];
        if (weight.linear)
            weight.linear->set_weight(data);
        else
            std::copy_n(data, weight.size, weight.vector->get(weight.size));
        return int64_t(weights.size() - next);
    }

    // The number of elements of the next weight; 0 if there is none.
    size_t next_size() const { return next < weights.size() ? weights[next].size : 0; }

    // Replace the table of positions by a longer one. Searches of other threads keep the table that they began with.
    void set_positions(const float* data, int64_t count) {
        auto longer = std::make_shared<Positions>();
        std::copy_n(data, count * shape.d_model, longer->table.get(count * shape.d_model));
        longer->count = count;
        const std::lock_guard<std::mutex> lock(positions_mutex);
        if (!positions || count > positions->count) positions = std::move(longer);
    }

    std::shared_ptr<const Positions> get_positions() const {
        const std::lock_guard<std::mutex> lock(positions_mutex);
        return positions ? positions : std::make_shared<const Positions>();
    }

    Shape shape;
    Linear projection;  // its rows are the embeddings as well
    std::vector<Layer> encoder, decoder;
    Norm encoder_norm, decoder_norm;

   private:
    std::shared_ptr<const Positions> positions;
    mutable std::mutex positions_mutex;
    struct Weight {
        Linear* linear;
        Buffer* vector;
        size_t size;
    };
    std::vector<Weight> weights;
    size_t next = 0;

    void add_linear(Linear& linear, int outputs, int inputs) {
        linear.set_shape(outputs, inputs);
        weights.push_back({&linear, nullptr, size_t(outputs) * inputs});
        weights.push_back({nullptr, &linear.bias, size_t(outputs)});
    }

    void add_norm(Norm& norm) {
        weights.push_back({nullptr, &norm.scale, size_t(shape.d_model)});
        weights.push_back({nullptr, &norm.shift, size_t(shape.d_model)});
    }
};

// ------------------------------------------------------------------------------------------------ a file of weights

constexpr char MAGIC[] = "SEARCH01";
constexpr int64_t LARGEST_SIZE = 1 << 28;  // three times this is an int

bool is_size(int64_t value) { return value >= 1 && value <= LARGEST_SIZE; }

bool is_valid(const Header& header) {
    const Shape& shape = header.shape;
    for (int64_t size : {shape.d_model, shape.num_heads, shape.d_k, shape.d_v, shape.d_ff, shape.num_encoder_layers,
                         shape.num_decoder_layers, shape.vocabulary_size, header.num_positions})
        if (!is_size(size)) return false;
    return std::memcmp(header.magic, MAGIC, sizeof header.magic) == 0 && is_size(shape.num_heads * shape.d_k) &&
           is_size(shape.num_heads * shape.d_v) && (shape.pre_norm == 0 || shape.pre_norm == 1) &&
           shape.activation >= int64_t(Activation::NONE) && shape.activation <= int64_t(Activation::SWISH);
}

// The number of position encodings and weights that follow a header. It is rounded above 2^53, which no file reaches.
double num_elements(const Header& header) {
    const Shape& shape = header.shape;
    const double d_model = shape.d_model, keys = shape.num_heads * shape.d_k, values = shape.num_heads * shape.d_v;
    const auto linear = [](double outputs, double inputs) { return outputs * (inputs + 1.0); };
    const double norm = 2.0 * d_model;
    const double self = linear(2.0 * keys + values, d_model) + linear(d_model, values) + norm;
    const double cross = linear(keys, d_model) + linear(keys + values, d_model) + linear(d_model, values) + norm;
    const double feed_forward = linear(shape.d_ff, d_model) + linear(d_model, shape.d_ff) + norm;
    return header.num_positions * d_model + linear(shape.vocabulary_size, d_model) +
           shape.num_encoder_layers * (self + feed_forward) + shape.num_decoder_layers * (self + cross + feed_forward) +
           shape.pre_norm * 2.0 * norm;
}

// Null if the file is not a whole file of weights.
std::unique_ptr<Model> read_model(std::ifstream& file) {
    const auto read = [&](void* to, size_t size) { return bool(file.read(static_cast<char*>(to), size)); };
    Header header;
    if (!read(&header, sizeof header) || !is_valid(header)) return nullptr;
    file.seekg(0, std::ios::end);
    const double size = double(file.tellg());
    // Before memory is allocated for the weights.
    if (size != sizeof header + num_elements(header) * sizeof(float)) return nullptr;
    file.seekg(sizeof header);
    auto model = std::make_unique<Model>(header.shape);
    std::vector<float> data(header.num_positions * header.shape.d_model);
    if (!read(data.data(), data.size() * sizeof(float))) return nullptr;
    model->set_positions(data.data(), header.num_positions);
    while (const size_t count = model->next_size()) {
        data.resize(count);
        if (!read(data.data(), count * sizeof(float))) return nullptr;
        model->set_next(data.data());
    }
    return model;
}

// -------------------------------------------------------------------------------------------- sentences in a search

// A hypothesis that is still open.
struct Hypothesis {
    float total;  // log-probability
    int last;     // last token
    int slot;     // cache slot of the token before it; -1 at the first step
};

struct Answer {
    float score, log_probability;
    int position;  // of the end symbol
    int parent;    // the hypothesis that the end symbol was appended to
};

struct Candidate {
    float value;  // logit, or log-probability of the hypothesis with the token
    int parent;   // hypothesis
    int token;
};

// Where a hypothesis came from: the one it continues, and the token that it added.
struct Step {
    int parent, token;
};

struct LayerCache {
    std::vector<float> keys, values;               // [slots, H * K] and [slots, H * V]
    std::vector<float> memory_keys, memory_values;  // [S, H * K] and [S, H * V]
};

// A sentence that is being decoded. Each position of a hypothesis has a slot of the cache, written once, and hypotheses
// share the slots of their common beginning. A slot that no open hypothesis needs is used again.
struct Sentence {
    int index, length, limit, position;
    float limit_penalty;
    int num_ended;
    std::vector<Hypothesis> open;
    std::vector<Answer> answers;
    std::vector<Step> history;  // [position, beam size]
    std::vector<LayerCache> layers;
    std::vector<int> parents, uses, unused;  // of slots: the slot before it; hypotheses and slots that refer to it

    int new_slot(int parent) {
        if (unused.empty()) {
            unused.push_back(int(parents.size()));
            parents.push_back(-1);
            uses.push_back(0);
        }
        const int slot = unused.back();
        unused.pop_back();
        parents[slot] = parent, uses[slot] = 0;
        return slot;
    }

    void release(int slot) {
        while (slot >= 0 && uses[slot] == 0) {
            unused.push_back(slot);
            slot = parents[slot];
            if (slot >= 0) --uses[slot];
        }
    }
};

// The tokens with the largest logits of a row, and the row's normalization, computed chunk by chunk.
struct RowTop {
    std::vector<Candidate> best;  // sorted, largest first; of equal logits the first id is first
    float largest = MINUS_INFINITY, total = 0.0f;

    void clear() { best.clear(), largest = MINUS_INFINITY, total = 0.0f; }

    float log_normalizer() const { return largest + std::log(total); }

    void add(const float* logits, int count, int first_id, size_t most, const Request& request) {
        Floats maxima = all(MINUS_INFINITY);
        int i = 0;
        for (; i + LANES <= count; i += LANES) maxima = larger(maxima, load(logits + i));
        float chunk_largest = maximum(maxima);
        for (; i < count; ++i) chunk_largest = std::max(chunk_largest, logits[i]);
        if (chunk_largest > largest) {
            total = largest > MINUS_INFINITY ? total * exponential(largest - chunk_largest) : 0.0f;
            largest = chunk_largest;
        }
        Floats totals = {};
        for (i = 0; i + LANES <= count; i += LANES) totals += exponential(load(logits + i) - largest);
        total += sum(totals);
        for (; i < count; ++i) total += exponential(logits[i] - largest);
        if (best.size() == most && chunk_largest <= best.back().value) return;
        for (int begin = 0; begin < count; begin += 4 * LANES) {
            const int end = std::min(count, begin + 4 * LANES);
            if (best.size() == most && end - begin == 4 * LANES) {
                const float* block = logits + begin;
                const Floats first = larger(load(block), load(block + LANES));
                const Floats second = larger(load(block + 2 * LANES), load(block + 3 * LANES));
                if (maximum(larger(first, second)) <= best.back().value) continue;
            }
            for (i = begin; i < end; ++i)
                if (best.size() < most || logits[i] > best.back().value) insert(logits[i], first_id + i, most, request);
        }
    }

   private:
    void insert(float logit, int id, size_t most, const Request& request) {
        for (int64_t i = 0; i < request.num_forbidden; ++i)
            if (request.forbidden[i] == id) return;
        if (best.size() == most) best.pop_back();
        auto place = best.end();
        while (place != best.begin() && (place - 1)->value < logit) --place;
        best.insert(place, {logit, 0, id});
    }
};

// ---------------------------------------------------------------------------------------------------- the search

// What the threads of a search share.
struct Shared {
    const Model& model;
    const Request& request;
    const Prefixes* prefixes;  // null if there are none
    const Positions& positions;
    std::vector<int64_t> order;           // sentences, longest first
    std::vector<int64_t> answer_offsets;  // first place of each sentence's answers
    std::atomic<int64_t> next{0}, num_ended{0};
    std::atomic<bool> stop{false}, failed{false};
};

// Decodes sentences in one thread.
class Worker {
   public:
    Worker(Shared& shared, bool reports) : shared_(shared), model_(shared.model), request_(shared.request), reports_(reports) {}

    void run() {
        // At most this many sentences per thread, so that all threads have work.
        const int64_t share = (request_.num_sentences + request_.num_threads - 1) / request_.num_threads;
        for (int steps = 0; !shared_.stop; ++steps) {
            // Sentences join several at a time, because a product of few rows takes almost as long as one of many.
            if (num_active_ == 0 || free_seats_ * 8 >= int64_t(num_active_) + free_seats_) fill(share);
            if (num_active_ == 0) return;
            step();
            finish();
            if (steps % 64 == 0) report();
        }
    }

    void report() {
        if (!reports_ || !request_.progress) return;
        const int64_t ended = shared_.num_ended.exchange(0);
        if (request_.progress(ended) != 0) shared_.stop = true;
    }

   private:
    Shared& shared_;
    const Model& model_;
    const Request& request_;
    const bool reports_;
    std::vector<std::unique_ptr<Sentence>> sentences_;  // the first `num_active_` are being decoded
    size_t num_active_ = 0;
    int64_t free_seats_ = 0;
    Buffer x_, normed_, input_, heads_, output_, inner_, logits_, scores_, weights_;
    std::vector<RowTop> tops_;
    std::vector<int> slots_, path_, path_ends_;
    std::vector<double> part_sums_, block_sums_;
    std::vector<float> kept_weights_;
    std::vector<int> forced_;            // of rows: the token that has to follow, -1 for any
    std::vector<float> forced_logits_;  // its logit
    std::vector<Candidate> candidates_;

    const Shape& shape() const { return model_.shape; }

    // The number of tokens that a sentence counts as, since memory and time grow with its answers too.
    static int64_t cost(int64_t length) { return std::max<int64_t>(length, 16); }

    // Let waiting sentences join.
    void fill(int64_t share) {
        int64_t tokens = 0;
        for (size_t i = 0; i < num_active_; ++i) tokens += cost(sentences_[i]->length);
        const size_t num_before = num_active_;
        while (int64_t(num_active_) < share) {
            int64_t next = shared_.next.load();
            if (next >= request_.num_sentences) break;
            const int64_t index = shared_.order[next], length = request_.offsets[index + 1] - request_.offsets[index];
            if (num_active_ > 0 && tokens + cost(length) > request_.max_tokens) break;
            if (!shared_.next.compare_exchange_strong(next, next + 1)) continue;
            tokens += cost(length);
            if (num_active_ == sentences_.size()) sentences_.push_back(std::make_unique<Sentence>());
            begin(*sentences_[num_active_++], int(index), int(length));
        }
        free_seats_ = 0;
        encode(num_before);
    }

    void begin(Sentence& sentence, int index, int length) {
        sentence.index = index, sentence.length = length, sentence.position = 0, sentence.num_ended = 0;
        sentence.limit = int(request_.limits[index]);
        sentence.limit_penalty = penalty(sentence.limit);
        sentence.open.assign(1, {0.0f, int(request_.begin_id), -1});
        sentence.answers.clear();
        sentence.history.clear();
        sentence.parents.clear(), sentence.uses.clear(), sentence.unused.clear();
        sentence.layers.resize(model_.decoder.size());
    }

    float penalty(int length) const { return std::pow((5.0f + float(length)) / 6.0f, request_.length_penalty); }

    // Embedding * scale + position encoding.
    void embed(int token, int position, float* to) const {
        const int d_model = int(shape().d_model);
        model_.projection.get_row(token, to);
        const float* encoding = shared_.positions.table.data() + size_t(position) * d_model;
        for (int i = 0; i < d_model; ++i) to[i] = to[i] * shape().embedding_scale + encoding[i];
    }

    void normalize(const float* x, int rows, const Norm& norm, float* y) const {
        const int d_model = int(shape().d_model);
        for (int row = 0; row < rows; ++row, x += d_model, y += d_model) {
            const float mean = sum_of(d_model, [=](auto kind, int i) { return take(kind, x + i); }) / float(d_model);
            const float variance = sum_of(d_model, [=](auto kind, int i) {
                const auto difference = take(kind, x + i) - mean;
                return difference * difference;
            }) / float(d_model);
            const float factor = 1.0f / std::sqrt(variance + shape().norm_epsilon);
            for (int i = 0; i < d_model; ++i) y[i] = (x[i] - mean) * factor * norm.scale.data()[i] + norm.shift.data()[i];
        }
    }

    // The input of a sub-layer: x itself, or normalized in a pre-norm network.
    const float* sublayer_input(const float* x, int rows, const Norm& norm) {
        if (!shape().pre_norm) return x;
        float* normed = normed_.get(size_t(rows) * shape().d_model);
        normalize(x, rows, norm, normed);
        return normed;
    }

    // The residual connection: x += output, normalized in a post-norm network.
    void add_residual(float* x, const float* output, int rows, const Norm& norm) const {
        const size_t count = size_t(rows) * shape().d_model;
        for (size_t i = 0; i < count; ++i) x[i] += output[i];
        if (!shape().pre_norm) normalize(x, rows, norm, x);
    }

    void feed_forward(float* x, int rows, const Layer& layer) {
        float* inner = inner_.get(size_t(rows) * shape().d_ff);
        float* output = output_.get(size_t(rows) * shape().d_model);
        multiply(sublayer_input(x, rows, layer.outer_norm), rows, layer.inner, inner, Activation(shape().activation));
        multiply(inner, rows, layer.outer, output);
        add_residual(x, output, rows, layer.outer_norm);
    }

    // Attention of one query [H * K] over `count` keys and values, written to `to` [H * V]. Key i begins at
    // keys + places[i] * key_stride, or at keys + i * key_stride if places is null.
    void attend(const float* query, const float* keys, size_t key_stride, const float* values, size_t value_stride,
                const int* places, int count, float* to) {
        const int num_heads = int(shape().num_heads), d_k = int(shape().d_k), d_v = int(shape().d_v);
        const int padded = (count + LANES - 1) / LANES * LANES;
        float* scores = scores_.get(size_t(num_heads) * padded);
        const float scale = 1.0f / std::sqrt(float(d_k));
        for (int i = 0; i < count; ++i) {
            const float* key = keys + size_t(places ? places[i] : i) * key_stride;
            for (int head = 0; head < num_heads; ++head)
                scores[head * padded + i] = dot(query + head * d_k, key + head * d_k, d_k) * scale;
        }
        std::fill_n(to, num_heads * d_v, 0.0f);
        for (int head = 0; head < num_heads; ++head) {
            float* row = scores + head * padded;
            std::fill(row + count, row + padded, MINUS_INFINITY);
            Floats maxima = all(MINUS_INFINITY);
            for (int i = 0; i < padded; i += LANES) maxima = larger(maxima, load(row + i));
            const float largest = maximum(maxima);
            for (int i = 0; i < padded; i += LANES) store(row + i, exponential(load(row + i) - largest));
            std::fill(row + count, row + padded, 0.0f);
            Floats totals = {};
            for (int i = 0; i < padded; i += LANES) totals += load(row + i);
            const float factor = 1.0f / sum(totals);
            for (int i = 0; i < count; ++i) row[i] *= factor;
        }
        for (int i = 0; i < count; ++i) {
            const float* value = values + size_t(places ? places[i] : i) * value_stride;
            for (int head = 0; head < num_heads; ++head)
                add_scaled(to + head * d_v, scores[head * padded + i], value + head * d_v, d_v);
        }
    }

    // Encode the sentences from number `first` on, and compute the keys and values of the cross-attentions.
    void encode(size_t first) {
        const int d_model = int(shape().d_model), keys = int(shape().num_heads * shape().d_k);
        const int values = int(shape().num_heads * shape().d_v), width = 2 * keys + values;
        int rows = 0;
        for (size_t i = first; i < num_active_; ++i) rows += sentences_[i]->length;
        if (rows == 0) return;
        float* x = x_.get(size_t(rows) * d_model);
        for (size_t i = first, row = 0; i < num_active_; ++i) {
            const int64_t* tokens = request_.tokens + request_.offsets[sentences_[i]->index];
            for (int position = 0; position < sentences_[i]->length; ++position, ++row)
                embed(int(tokens[position]), position, x + row * d_model);
        }
        for (const Layer& layer : model_.encoder) {
            float* input = input_.get(size_t(rows) * width);
            float* heads = heads_.get(size_t(rows) * values);
            float* output = output_.get(size_t(rows) * d_model);
            multiply(sublayer_input(x, rows, layer.self_norm), rows, layer.self_input, input);
            for (size_t i = first, begin = 0; i < num_active_; begin += sentences_[i++]->length) {
                const float* own = input + begin * width;
                for (int row = 0; row < sentences_[i]->length; ++row)
                    attend(own + row * width, own + keys, width, own + 2 * keys, width, nullptr, sentences_[i]->length,
                           heads + (begin + row) * values);
            }
            multiply(heads, rows, layer.self_output, output);
            add_residual(x, output, rows, layer.self_norm);
            feed_forward(x, rows, layer);
        }
        if (shape().pre_norm) normalize(x, rows, model_.encoder_norm, x);
        for (size_t number = 0; number < model_.decoder.size(); ++number) {
            float* input = input_.get(size_t(rows) * (keys + values));
            multiply(x, rows, model_.decoder[number].cross_input, input);
            for (size_t i = first; i < num_active_; ++i) {
                LayerCache& cache = sentences_[i]->layers[number];
                cache.memory_keys.resize(size_t(sentences_[i]->length) * keys);
                cache.memory_values.resize(size_t(sentences_[i]->length) * values);
                for (int row = 0; row < sentences_[i]->length; ++row, input += keys + values) {
                    std::copy_n(input, keys, cache.memory_keys.data() + size_t(row) * keys);
                    std::copy_n(input + keys, values, cache.memory_values.data() + size_t(row) * values);
                }
            }
        }
    }

    // Run the decoder for one position of all open hypotheses, and choose those that go on.
    void step() {
        const int d_model = int(shape().d_model);
        int rows = 0;
        for (size_t i = 0; i < num_active_; ++i) rows += int(sentences_[i]->open.size());
        float* x = x_.get(size_t(rows) * d_model);
        slots_.clear(), path_.clear(), path_ends_.assign(1, 0), forced_.clear();
        for (size_t i = 0, row = 0; i < num_active_; ++i) {
            Sentence& sentence = *sentences_[i];
            for (const Hypothesis& hypothesis : sentence.open) {
                embed(hypothesis.last, sentence.position, x + row++ * d_model);
                slots_.push_back(sentence.new_slot(hypothesis.slot));
                for (int slot = slots_.back(); slot >= 0; slot = sentence.parents[slot]) path_.push_back(slot);
                path_ends_.push_back(int(path_.size()));
            }
            forced_.resize(row, forced_token(sentence));
        }
        for (size_t number = 0; number < model_.decoder.size(); ++number) {
            self_attention(x, rows, number);
            cross_attention(x, rows, number);
            feed_forward(x, rows, model_.decoder[number]);
        }
        if (shape().pre_norm) normalize(x, rows, model_.decoder_norm, x);
        if (request_.sampling) project_and_draw(x, rows);
        else project(x, rows);
        for (size_t i = 0, row = 0; i < num_active_; ++i) {
            const size_t next = row + sentences_[i]->open.size();
            select(*sentences_[i], int(row));
            row = next;
        }
    }

    // The token that has to follow a sentence's hypotheses: the end symbol at the limit, or the next one of its prefix;
    // -1 for any.
    int forced_token(const Sentence& sentence) const {
        if (sentence.position + 1 >= sentence.limit) return int(request_.end_id);
        const Prefixes* const prefixes = shared_.prefixes;
        if (!prefixes) return -1;
        const int64_t place = prefixes->offsets[sentence.index] + sentence.position;
        return place < prefixes->offsets[sentence.index + 1] ? int(prefixes->tokens[place]) : -1;
    }

    void self_attention(float* x, int rows, size_t number) {
        const int keys = int(shape().num_heads * shape().d_k), values = int(shape().num_heads * shape().d_v);
        const int width = 2 * keys + values;
        const Layer& layer = model_.decoder[number];
        float* input = input_.get(size_t(rows) * width);
        float* heads = heads_.get(size_t(rows) * values);
        float* output = output_.get(size_t(rows) * shape().d_model);
        multiply(sublayer_input(x, rows, layer.self_norm), rows, layer.self_input, input);
        for (size_t i = 0, row = 0; i < num_active_; ++i) {
            Sentence& sentence = *sentences_[i];
            LayerCache& cache = sentence.layers[number];
            if (cache.keys.size() < sentence.parents.size() * keys) {
                const size_t num_slots = std::max<size_t>(16, sentence.parents.size() * 2);
                cache.keys.resize(num_slots * keys);
                cache.values.resize(num_slots * values);
            }
            for (size_t hypothesis = 0; hypothesis < sentence.open.size(); ++hypothesis, ++row) {
                const float* own = input + row * width;
                std::copy_n(own + keys, keys, cache.keys.data() + size_t(slots_[row]) * keys);
                std::copy_n(own + 2 * keys, values, cache.values.data() + size_t(slots_[row]) * values);
                attend(own, cache.keys.data(), keys, cache.values.data(), values, path_.data() + path_ends_[row],
                       path_ends_[row + 1] - path_ends_[row], heads + row * values);
            }
        }
        multiply(heads, rows, layer.self_output, output);
        add_residual(x, output, rows, layer.self_norm);
    }

    void cross_attention(float* x, int rows, size_t number) {
        const int keys = int(shape().num_heads * shape().d_k), values = int(shape().num_heads * shape().d_v);
        const Layer& layer = model_.decoder[number];
        float* query = input_.get(size_t(rows) * keys);
        float* heads = heads_.get(size_t(rows) * values);
        float* output = output_.get(size_t(rows) * shape().d_model);
        multiply(sublayer_input(x, rows, layer.cross_norm), rows, layer.cross_query, query);
        for (size_t i = 0, row = 0; i < num_active_; ++i) {
            const LayerCache& cache = sentences_[i]->layers[number];
            for (size_t hypothesis = 0; hypothesis < sentences_[i]->open.size(); ++hypothesis, ++row)
                attend(query + row * keys, cache.memory_keys.data(), keys, cache.memory_values.data(), values, nullptr,
                       sentences_[i]->length, heads + row * values);
        }
        multiply(heads, rows, layer.cross_output, output);
        add_residual(x, output, rows, layer.cross_norm);
    }

    // Compute the logits of all rows, a part of the vocabulary at a time, and keep each row's best.
    void project(const float* x, int rows) {
        const Linear& projection = model_.projection;
        const size_t most = std::min<size_t>(num_considered(), shape().vocabulary_size);
        if (tops_.size() < size_t(rows)) tops_.resize(rows);
        for (int row = 0; row < rows; ++row) tops_[row].clear();
        forced_logits_.resize(rows);
        float* logits = logits_.get(size_t(rows) * CHUNK);
        for (int first_id = 0; first_id < projection.outputs; first_id += CHUNK) {
            const int count = std::min(CHUNK, projection.outputs - first_id);
            const int first = first_id / COLUMNS, last = first + (count + COLUMNS - 1) / COLUMNS;
            multiply_panels(x, rows, projection, first, last, logits - first_id, CHUNK, Activation::NONE);
            for (int row = 0; row < rows; ++row) {
                const float* own = logits + size_t(row) * CHUNK;
                tops_[row].add(own, count, first_id, most, request_);
                if (forced_[row] >= first_id && forced_[row] < first_id + count)
                    forced_logits_[row] = own[forced_[row] - first_id];
            }
        }
    }

    // Compute the logits of all rows, and draw a token of each at random. Row i is sentence i. If this function were
    // inlined, the steps of a search would be slower.
    __attribute__((noinline)) void project_and_draw(const float* x, int rows) {
        const int size = int(shape().vocabulary_size);
        tops_.resize(std::max(tops_.size(), size_t(rows)));
        forced_logits_.resize(rows);
        float* logits = logits_.get(size_t(rows) * size);
        multiply(x, rows, model_.projection, logits);
        for (int row = 0; row < rows; ++row, logits += size) {
            const Sentence& sentence = *sentences_[row];
            RowTop& top = tops_[row];
            top.clear();
            top.add(logits, size, 0, 1, request_);
            if (forced_[row] >= 0) forced_logits_[row] = logits[forced_[row]];
            if (top.best.empty()) continue;  // no logit is a number
            const int64_t place = shared_.answer_offsets[sentence.index] + sentence.position;
            const int token = draw_token(logits, top.best[0].value, request_.sampling->uniforms + 3 * place);
            top.best[0] = {logits[token], 0, token};
        }
    }

    // Draw a token by three random numbers: a part of 32 blocks, a block of 32 tokens, a token. See model/beyond/sampling.py.
    int draw_token(const float* logits, float largest, const double* uniforms) {
        const int size = int(shape().vocabulary_size), num_blocks = (size + 1023) / 1024 * 32;
        // Not infinite: zero times the factor has to be zero.
        const float factor = float(std::min(1.0 / request_.sampling->temperature, 1e30));
        float* weights = weights_.get(size_t(num_blocks) * 32);
        int i = 0;
        for (; i + LANES <= size; i += LANES) store(weights + i, exponential((load(logits + i) - largest) * factor));
        for (; i < size; ++i) weights[i] = exponential((logits[i] - largest) * factor);
        std::fill(weights + size, weights + num_blocks * 32, 0.0f);
        for (int64_t number = 0; number < request_.num_forbidden; ++number) weights[request_.forbidden[number]] = 0.0f;
        keep_most_probable(weights);
        block_sums_.resize(num_blocks);
        for (int block = 0; block < num_blocks; ++block)
            block_sums_[block] = std::accumulate(weights + block * 32, weights + block * 32 + 32, 0.0);
        part_sums_.resize(num_blocks / 32);
        for (int part = 0; part < num_blocks / 32; ++part)
            part_sums_[part] = std::accumulate(&block_sums_[part * 32], &block_sums_[part * 32] + 32, 0.0);
        const int part = draw(part_sums_.data(), num_blocks / 32, uniforms[0]);
        const int block = part * 32 + draw(&block_sums_[part * 32], 32, uniforms[1]);
        return block * 32 + draw(weights + block * 32, 32, uniforms[2]);
    }

    // The first place at which the sum of weights exceeds the share `uniform` of all.
    template <class Weight>
    static int draw(const Weight* weights, int count, double uniform) {
        const double wanted = uniform * std::accumulate(weights, weights + count, 0.0);
        double sum = 0.0;
        int i = 0;
        while ((sum += weights[i]) <= wanted && i < count - 1) ++i;
        return i;
    }

    // Set the weights of tokens that top-k and top-p exclude to zero.
    void keep_most_probable(float* weights) {
        const int64_t size = shape().vocabulary_size, top_k = std::min(request_.sampling->top_k, size);
        const double top_p = request_.sampling->top_p;
        if (top_k == size && top_p == 1.0) return;
        std::vector<float>& kept = kept_weights_;
        kept.assign(weights, weights + size);
        std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end(), std::greater<float>());
        kept.resize(top_k);
        auto first = kept.begin();  // of the weights that stay
        if (top_p < 1.0) {
            const double wanted = top_p * std::accumulate(kept.begin(), kept.end(), 0.0);
            double sum = 0.0;
            // Few stay, as a rule: a heap finds them without sorting the rest.
            std::make_heap(kept.begin(), kept.end());
            for (first = kept.end(); first != kept.begin() && sum < wanted; sum += *--first) std::pop_heap(kept.begin(), first);
        }
        const float least = *std::min_element(first, kept.end());
        // Of equal weights, the first stay.
        auto num_least = std::count(first, kept.end(), least);
        for (int64_t i = 0; i < size; ++i)
            if (weights[i] < least || (weights[i] == least && num_least-- <= 0)) weights[i] = 0.0f;
    }

    // How many continuations of a sentence each step considers. Greedy search ends at the first end symbol.
    int num_considered() const { return request_.beam_size > 1 ? int(2 * request_.beam_size) : 1; }

    // Split the best continuations of a sentence into answers and open hypotheses. Its rows begin at `first_row`.
    void select(Sentence& sentence, int first_row) {
        candidates_.clear();
        const int forced = forced_[first_row];
        for (int number = 0; number < int(sentence.open.size()); ++number) {
            const RowTop& top = tops_[first_row + number];
            const float total = sentence.open[number].total, normalizer = top.log_normalizer();
            if (forced >= 0) {
                candidates_.push_back({total + (forced_logits_[first_row + number] - normalizer), number, forced});
                continue;
            }
            for (const Candidate& candidate : top.best)
                candidates_.push_back({total + (candidate.value - normalizer), number, candidate.token});
        }
        std::stable_sort(candidates_.begin(), candidates_.end(),
                         [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
        if (int(candidates_.size()) > num_considered()) candidates_.resize(num_considered());
        std::vector<Hypothesis> open;
        for (int rank = 0; rank < int(candidates_.size()); ++rank) {
            const Candidate& candidate = candidates_[rank];
            if (!(candidate.value > MINUS_INFINITY)) break;
            if (candidate.token == request_.end_id) {
                if (!request_.stops_at_first || rank < request_.beam_size) add_answer(sentence, candidate);
            } else if (int64_t(open.size()) < request_.beam_size) {
                open.push_back({candidate.value, candidate.token, slots_[first_row + candidate.parent]});
                sentence.history.push_back({candidate.parent, candidate.token});
            }
        }
        sentence.history.resize(size_t(sentence.position + 1) * request_.beam_size);
        // The hypotheses' new slots refer to those before them.
        const int num_rows = int(sentence.open.size());
        for (const Hypothesis& hypothesis : open) ++sentence.uses[hypothesis.slot];
        for (int row = first_row; row < first_row + num_rows; ++row) sentence.release(slots_[row]);
        sentence.open.swap(open);
        ++sentence.position;
    }

    void add_answer(Sentence& sentence, const Candidate& candidate) {
        const float score = candidate.value / penalty(sentence.position + 1);
        auto place = sentence.answers.end();
        while (place != sentence.answers.begin() && (place - 1)->score < score) --place;
        sentence.answers.insert(place, {score, candidate.value, sentence.position, candidate.parent});
        if (int64_t(sentence.answers.size()) > request_.num_best) sentence.answers.pop_back();
        ++sentence.num_ended;
    }

    bool has_ended(const Sentence& sentence) const {
        if (sentence.open.empty()) return true;
        if (request_.stops_at_first) return sentence.num_ended >= request_.beam_size;
        // An upper bound on all future scores: log-probabilities only decrease, and no answer has a larger penalty than one
        // of the limit's length. See `may_improve` in model/decoding.py.
        return int64_t(sentence.answers.size()) == request_.num_best &&
               sentence.answers.back().score >= sentence.open[0].total / sentence.limit_penalty;
    }

    void finish() {
        for (size_t i = 0; i < num_active_;) {
            if (!has_ended(*sentences_[i])) {
                ++i;
                continue;
            }
            write(*sentences_[i]);
            std::swap(sentences_[i], sentences_[--num_active_]);
            ++free_seats_;
            ++shared_.num_ended;
        }
    }

    // Write the answers of a sentence to the results.
    void write(const Sentence& sentence) const {
        const int64_t index = sentence.index, num_best = request_.num_best, beam_size = request_.beam_size;
        request_.num_steps[index] = sentence.position;
        for (int64_t number = 0; number < num_best; ++number) {
            const bool exists = number < int64_t(sentence.answers.size());
            const Answer answer = exists ? sentence.answers[number] : Answer{MINUS_INFINITY, MINUS_INFINITY, -1, 0};
            const int64_t place = index * num_best + number;
            request_.scores[place] = answer.score;
            request_.log_probabilities[place] = answer.log_probability;
            request_.lengths[place] = answer.position + 1;
            if (!exists) continue;
            int32_t* to = request_.answers + shared_.answer_offsets[index] + number * sentence.limit;
            to[answer.position] = int32_t(request_.end_id);
            for (int position = answer.position - 1, parent = answer.parent; position >= 0; --position) {
                const Step& step = sentence.history[size_t(position) * beam_size + parent];
                to[position] = step.token;
                parent = step.parent;
            }
        }
    }
};

void run(Shared& shared, bool reports) {
    try {
        Worker worker(shared, reports);
        worker.run();
        worker.report();
    } catch (...) {
        shared.failed = shared.stop = true;
    }
}

// Whether all sentences and answers fit into the tables of the model.
bool is_valid(const Model& model, const Request& request, const Prefixes* prefixes, const Positions& positions) {
    const int64_t vocabulary_size = model.shape.vocabulary_size;
    const auto is_id = [=](int64_t id) { return id >= 0 && id < vocabulary_size; };
    if (!is_id(request.begin_id) || !is_id(request.end_id)) return false;
    if (!is_size(request.beam_size) || !is_size(request.num_best) || request.num_threads < 1) return false;
    if (const Sampling* sampling = request.sampling)
        if (request.beam_size != 1 || request.num_best != 1 || !(sampling->temperature > 0.0) || sampling->top_k < 1 ||
            !(sampling->top_p > 0.0))
            return false;
    for (int64_t i = 0; i < request.num_sentences; ++i) {
        const int64_t length = request.offsets[i + 1] - request.offsets[i], limit = request.limits[i];
        if (length < 1 || length > positions.count || limit < 1 || limit > positions.count) return false;
        const int64_t* tokens = request.tokens + request.offsets[i];
        if (!std::all_of(tokens, tokens + length, is_id)) return false;
        if (!prefixes) continue;
        const int64_t begin = prefixes->offsets[i], end = prefixes->offsets[i + 1];
        if (end < begin || end - begin >= limit) return false;
        if (!std::all_of(prefixes->tokens + begin, prefixes->tokens + end, is_id)) return false;
    }
    return true;
}

}  // namespace

extern "C" {

// A model without weights; null if there is not enough memory.
void* create_model(const Shape* shape) {
    try {
        return new Model(*shape);
    } catch (...) {
        return nullptr;
    }
}

// A model with the weights and position encodings of a file, see `Header`; null if it cannot be read, if it is not a
// whole file of this version, or if there is not enough memory.
void* load_model(const char* path) {
    try {
        std::ifstream file(path, std::ios::binary);
        return read_model(file).release();
    } catch (...) {
        return nullptr;
    }
}

void destroy_model(void* model) { delete static_cast<Model*>(model); }

// See `Model::set_next`; -2 if there is not enough memory.
int64_t set_next_weight(void* model, const float* data) {
    try {
        return static_cast<Model*>(model)->set_next(data);
    } catch (...) {
        return -2;
    }
}

// Set the position encodings [num_positions, D], unless there are as many already. A search needs as many as its longest
// source or answer has tokens; others may run meanwhile. Returns 0, or -2 if there is not enough memory.
int64_t set_positions(void* model, const float* data, int64_t num_positions) {
    try {
        static_cast<Model*>(model)->set_positions(data, num_positions);
        return 0;
    } catch (...) {
        return -2;
    }
}

// Returns 0; 1 if `progress` has ended the search; -1 if a sentence is empty, a sentence or a limit is longer than the
// position encodings, a prefix is as long as its limit, or an id or a number is out of bounds; -2 if there is not enough
// memory. Several threads may search with one model at the same time. `prefixes` may be null.
int64_t search_with_prefixes(void* model, const Request* request, const Prefixes* prefixes) {
    try {
        const Model& shared_model = *static_cast<const Model*>(model);
        const std::shared_ptr<const Positions> positions = shared_model.get_positions();
        if (!is_valid(shared_model, *request, prefixes, *positions)) return -1;
        Shared shared{shared_model, *request, prefixes, *positions, {}, {}};
        const int64_t* offsets = request->offsets;
        int64_t offset = 0;
        for (int64_t i = 0; i < request->num_sentences; ++i) {
            shared.order.push_back(i);
            shared.answer_offsets.push_back(offset);
            offset += request->limits[i] * request->num_best;
        }
        std::stable_sort(shared.order.begin(), shared.order.end(), [=](int64_t a, int64_t b) {
            return offsets[a + 1] - offsets[a] > offsets[b + 1] - offsets[b];
        });
        // Only the calling thread reports.
        run_in_threads(request->num_threads, [&](int64_t number) { run(shared, number == 0); });
        // What the other threads have ended since the calling thread's last report.
        const int64_t ended = shared.num_ended;
        if (request->progress && ended > 0 && !shared.stop && request->progress(ended) != 0) shared.stop = true;
        return shared.failed ? -2 : shared.stop ? 1 : 0;
    } catch (...) {
        return -2;
    }
}

int64_t search(void* model, const Request* request) { return search_with_prefixes(model, request, nullptr); }
}
