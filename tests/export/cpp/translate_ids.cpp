// translate_ids MODEL IDS BEAM LENGTH_PENALTY MAX_EXTRA_TOKENS N_BEST
// Each line of IDS holds the ids of a sentence and the end symbol. For each sentence, N_BEST lines are printed, with the
// score and the ids of a translation.
#include <torch/script.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

int main(int count, char** arguments) try {
    torch::NoGradGuard no_gradients;
    auto model = torch::jit::load(arguments[1], torch::kCPU);
    std::ifstream file(arguments[2]);
    std::vector<std::vector<int64_t>> sentences;
    size_t max_length = 0;
    for (std::string line; std::getline(file, line);) {
        std::istringstream fields(line);
        sentences.emplace_back();
        for (int64_t id; fields >> id;) sentences.back().push_back(id);
        max_length = std::max(max_length, sentences.back().size());
    }
    const int64_t rows = sentences.size(), columns = max_length;
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
    auto output = model.get_method("beam")(inputs).toTuple()->elements();
    auto tokens = output[0].toTensor(), lengths = output[1].toTensor(), scores = output[2].toTensor();
    std::cout << std::setprecision(9);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t rank = 0; rank < n_best; ++rank) {
            std::cout << scores[row][rank].item<float>();
            for (int64_t position = 0; position < lengths[row][rank].item<int64_t>(); ++position)
                std::cout << ' ' << tokens[row][rank][position].item<int64_t>();
            std::cout << '\n';
        }
    return 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
}
