// Two callers search with one model, each with two threads, while a third one lengthens its table of positions. Built
// with -fsanitize=thread, which reports each access that another thread's may cross. Exit code 1 if answers differ.

#include <cstdio>
#include <numeric>

#include "search.cpp"

namespace {

constexpr int64_t SENTENCES = 12, LIMIT = 12, POSITIONS = 16, D_MODEL = 12, VOCABULARY = 40;

struct Answers {
    std::vector<int32_t> tokens = std::vector<int32_t>(SENTENCES * LIMIT);
    std::vector<int64_t> lengths = std::vector<int64_t>(SENTENCES), steps = std::vector<int64_t>(SENTENCES);
    std::vector<float> scores = std::vector<float>(SENTENCES), totals = std::vector<float>(SENTENCES);
};

Answers translate(void* model) {
    std::vector<int64_t> tokens, offsets{0}, limits(SENTENCES, LIMIT);
    for (int64_t sentence = 0; sentence < SENTENCES; ++sentence) {
        for (int64_t i = 0; i <= sentence % 7; ++i) tokens.push_back(4 + (sentence * 5 + i * 3) % (VOCABULARY - 4));
        tokens.push_back(3);
        offsets.push_back(int64_t(tokens.size()));
    }
    const int64_t forbidden[] = {0, 2};
    Answers answers;
    Request request{};
    request.tokens = tokens.data(), request.offsets = offsets.data(), request.limits = limits.data();
    request.num_sentences = SENTENCES, request.beam_size = 3, request.num_best = 1, request.max_tokens = 16;
    request.num_threads = 2, request.begin_id = 2, request.end_id = 3;
    request.forbidden = forbidden, request.num_forbidden = 2, request.length_penalty = 0.6f;
    request.answers = answers.tokens.data(), request.lengths = answers.lengths.data();
    request.scores = answers.scores.data(), request.log_probabilities = answers.totals.data();
    request.num_steps = answers.steps.data(), request.progress = [](int64_t) { return 0; };
    if (search(model, &request) != 0) std::abort();
    return answers;
}

bool same(const Answers& one, const Answers& other) {
    if (one.lengths != other.lengths || one.scores != other.scores || one.steps != other.steps) return false;
    for (int64_t i = 0; i < SENTENCES; ++i)
        if (!std::equal(&one.tokens[i * LIMIT], &one.tokens[i * LIMIT] + one.lengths[i], &other.tokens[i * LIMIT]))
            return false;
    return true;
}

}  // namespace

int main() {
    Shape shape{};
    shape.d_model = D_MODEL, shape.num_heads = 2, shape.d_k = shape.d_v = 6, shape.d_ff = 20;
    shape.num_encoder_layers = shape.num_decoder_layers = 2, shape.vocabulary_size = VOCABULARY;
    shape.activation = 1, shape.embedding_scale = 3.0f, shape.norm_epsilon = 1e-5f;
    void* model = create_model(&shape);
    std::vector<float> weights(2 * VOCABULARY * D_MODEL), positions(50 * POSITIONS * D_MODEL);
    uint32_t state = 1;
    for (auto* values : {&weights, &positions})
        for (float& value : *values) state = state * 1664525u + 1013904223u, value = float(state >> 8) / float(1 << 24) - 0.5f;
    while (set_next_weight(model, weights.data()) > 0) {
    }
    set_positions(model, positions.data(), POSITIONS);
    const Answers alone = translate(model);
    std::atomic<bool> differs{false};
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 2; ++caller)
        threads.emplace_back([&] {
            for (int i = 0; i < 20; ++i)
                if (!same(translate(model), alone)) differs = true;
        });
    threads.emplace_back([&] {
        for (int64_t i = 1; i <= 50; ++i) set_positions(model, positions.data(), i * POSITIONS);
    });
    for (std::thread& thread : threads) thread.join();
    destroy_model(model);
    const int64_t num_tokens = std::accumulate(alone.lengths.begin(), alone.lengths.end(), int64_t(0));
    std::printf("%lld tokens\n", (long long)num_tokens);
    return differs || num_tokens < 3 * SENTENCES ? 1 : 0;
}
