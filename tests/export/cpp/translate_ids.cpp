// translate_ids MODEL IDS BEAM LENGTH_PENALTY MAX_EXTRA_TOKENS N_BEST [packed]
// Each line of IDS is a sentence's ids, the end symbol last. Prints for each sentence n-best lines: score, then ids.
#include <torch/script.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

torch::jit::Module load(const std::string& path, bool packed) {
    torch::jit::ExtraFilesMap extra{{"packed.ts", ""}};
    auto model = torch::jit::load(path, torch::kCPU, extra);
    if (!packed) return model;
    std::istringstream hollow(extra["packed.ts"]);
    auto fast = torch::jit::load(hollow);
    c10::Dict<std::string, at::Tensor> weights;
    for (const auto& one : model.named_parameters()) weights.insert(one.name, one.value);
    for (const auto& one : fast.named_parameters()) {
        at::Tensor parameter = one.value;
        parameter.set_data(weights.at(one.name));
    }
    return fast;
}

int main(int count, char** arguments) try {
    torch::NoGradGuard no_gradients;
    auto model = load(arguments[1], count > 7);
    std::ifstream file(arguments[2]);
    std::vector<std::vector<int64_t>> sentences;
    size_t longest = 0;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        sentences.emplace_back();
        for (int64_t id; words >> id;) sentences.back().push_back(id);
        longest = std::max(longest, sentences.back().size());
    }
    const int64_t rows = sentences.size(), columns = longest;
    auto source = torch::zeros({rows, columns}, torch::kInt64);
    auto mask = torch::zeros({rows, columns}, torch::kBool);
    for (int64_t row = 0; row < rows; ++row)
        for (size_t column = 0; column < sentences[row].size(); ++column) {
            source[row][column] = sentences[row][column];
            mask[row][column] = true;
        }
    const int64_t n_best = std::atoll(arguments[6]);
    std::vector<torch::jit::IValue> inputs{source, mask, int64_t(std::atoll(arguments[3])), std::atof(arguments[4]),
                                           int64_t(std::atoll(arguments[5])), n_best};
    auto answers = model.get_method("beam")(inputs).toTuple()->elements();
    auto tokens = answers[0].toTensor(), lengths = answers[1].toTensor(), scores = answers[2].toTensor();
    std::cout << std::setprecision(9);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t rank = 0; rank < n_best; ++rank) {
            std::cout << scores[row][rank].item<float>();
            for (int64_t place = 0; place < lengths[row][rank].item<int64_t>(); ++place)
                std::cout << ' ' << tokens[row][rank][place].item<int64_t>();
            std::cout << '\n';
        }
    return 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
