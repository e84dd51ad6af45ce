"""The README.md of a bundle: its files, and how to load each format."""

import json
from typing import Any

from pipeline.export.cpp_program import num_positions
from pipeline.inference.prefixes import Prefixes

TITLE = """# {name}: {source_language} to {target_language}

An exported Transformer. `card.json` describes the training data and the model's scores. `parity.json` compares this
bundle's files with the checkpoint that they were exported from, on real sentences.

"""

PREFIXES = """A source sentence {begins} with a prefix, which names its target language or its domain: {prefixes}.

"""

TORCHSCRIPT = """## model.ts

Network, greedy and beam search, tokenizer and card in one file. It needs only torch and sentencepiece:

```python
import json, sentencepiece, torch

extra = {"card.json": "", "tokenizer.model": ""}
model = torch.jit.load("model.ts", _extra_files=extra)
card = json.loads(extra["card.json"])
tokenizer = sentencepiece.SentencePieceProcessor(model_proto=extra["tokenizer.model"])
source = torch.tensor([tokenizer.encode("A sentence.") + [card["eos_id"]]])
answers = model.beam(source, None, card["beam_size"], card["length_penalty"], card["max_extra_tokens"], 1)
tokens, lengths, scores, log_probabilities = answers
print(tokenizer.decode(tokens[0, 0, : lengths[0, 0] - 1].tolist()))
```

`model.beam(source, source_mask, beam_size, length_penalty, max_extra_tokens, n_best)` takes int64 ids [sentences,
tokens] and a bool mask of the same shape. Each row of ids ends with the end symbol, followed by padding (`pad_id`). The
mask is True at tokens; it is None if no row is padded. The method returns tokens [sentences, n_best, length], their
lengths, scores and log-probabilities. A length includes the end symbol and is 0 for a hypothesis that does not exist.
`model.greedy(source, source_mask, max_extra_tokens)` returns tokens, lengths and log-probabilities. Invalid arguments
raise an error. To write another search, use `encode`, `init_cache`, `decode_step` and `logits` of `model.network`.

On a GPU, load with `torch.jit.load("model.ts", map_location="cuda")` and move the ids to the GPU. For bfloat16, call
`model.to(torch.bfloat16)`.

"""

PACKED = """\
**Faster on a CPU.** The file contains the same search for PyTorch with oneDNN (x86, Linux on ARM). It packs its weights
for the processor on first use. Its translations are the same, and it is 1.3 to 1.8 times as fast:

```python
import io, torch

extra = {"packed.ts": ""}
model = torch.jit.load("model.ts", _extra_files=extra)
weights = model.state_dict()
model = torch.jit.load(io.BytesIO(extra["packed.ts"]))
for name, parameter in model.named_parameters():
    parameter.data = weights[name]
```

"""

TORCHSCRIPT_ON = """\
**Threads** may share the model after its first call, which compiles and packs.
**Warm up** with two batches before you measure times. The second call optimizes. Both take two to three times as long
as later calls. `first_batch_seconds` in `parity.json` is the time of the first call.
**Freezing** the model as loaded, without packing (`torch.jit.freeze(model, preserved_attrs=["beam", "greedy"])`), made
it 0 to 8 % faster on a CPU. A frozen model cannot be moved to another device or type. Packing is the better choice.

In C++, with ids, linked with libtorch:

```cpp
#include <torch/script.h>
#include <iostream>

int main() {
    torch::NoGradGuard no_gradients;
    auto model = torch::jit::load("model.ts");
    auto source = torch::tensor({EXAMPLE}, torch::kInt64).unsqueeze(0);  // ids of "A sentence.", the end symbol
    auto answers = model.get_method("beam")(
        {source, torch::jit::IValue(), int64_t(BEAM), PENALTY, int64_t(EXTRA), int64_t(1)}).toTuple();
    std::cout << answers->elements()[0].toTensor() << std::endl;
}
```

`CMakeLists.txt`: `find_package(Torch REQUIRED)`, `target_link_libraries(program "${TORCH_LIBRARIES}")`, C++20, and
`-DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")`. To read the tokenizer and the
card, pass a `torch::jit::ExtraFilesMap` as the third argument of `torch::jit::load`.

"""

INT8 = """## model.int8.ts

Like `model.ts`, with int8 weights in the linear layers, whose inputs are rounded at run time. For CPUs only, without
bfloat16 and without `packed.ts`. `parity.json` has the difference in BLEU.

"""

PT2 = """## model.pt2

The same network for torch.export, the successor of TorchScript. It has `encode` and `step`; you write the loop:

```python
import json, sentencepiece, torch
from torch.export.pt2_archive._package import load_pt2

card = json.load(open("card.json", encoding="utf-8"))
tokenizer = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
programs = load_pt2("model.pt2").exported_programs
encode, step = programs["encode"].module(), programs["step"].module()
source = torch.tensor([tokenizer.encode("A sentence.") + [card["eos_id"]]])
mask = torch.ones_like(source, dtype=torch.bool)
tokens = [card["bos_id"]]
with torch.no_grad():
    cross_keys, cross_values = encode(source, mask)
    keys, values = cross_keys[:, :, :, :0], cross_values[:, :, :, :0]
    longest = source.size(1) + card["max_extra_tokens"]
    if card["max_source_tokens"]:  # learned positions end there
        longest = min(longest, card["max_source_tokens"])
    while tokens[-1] != card["eos_id"] and len(tokens) < longest:
        last = torch.tensor(tokens[-1:])
        logits, keys, values = step(last, keys, values, cross_keys, cross_values, mask)
        logits[:, [card["pad_id"], card["bos_id"]]] = float("-inf")
        tokens.append(int(logits.argmax()))
print(tokenizer.decode([one for one in tokens[1:] if one != card["eos_id"]]))
```

Rows are independent. For a beam search, give each hypothesis a row and reorder `keys` and `values` along their second
axis.

"""

ONNX = """## onnx/

Encoder and decoding step as ONNX files for [ONNX Runtime](https://onnxruntime.ai), without torch. You write the loop:

```python
import json, numpy, onnxruntime, sentencepiece

card = json.load(open("card.json", encoding="utf-8"))
tokenizer = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
load = lambda name: onnxruntime.InferenceSession(f"onnx/{name}.onnx", providers=["CPUExecutionProvider"])
encode, step = load("encode"), load("step")
source = numpy.array([tokenizer.encode("A sentence.") + [card["eos_id"]]], dtype=numpy.int64)
mask = numpy.ones(source.shape, dtype=bool)
tokens = [card["bos_id"]]
cross_keys, cross_values = encode.run(None, {"source": source, "source_mask": mask})
keys, values = cross_keys[:, :, :, :0], cross_values[:, :, :, :0]
memory = {"cross_keys": cross_keys, "cross_values": cross_values, "source_mask": mask}
longest = source.shape[1] + card["max_extra_tokens"]
if card["max_source_tokens"]:  # learned positions end there
    longest = min(longest, card["max_source_tokens"])
while tokens[-1] != card["eos_id"] and len(tokens) < longest:
    last = numpy.array(tokens[-1:], dtype=numpy.int64)
    logits, keys, values = step.run(None, {"last": last, "keys": keys, "values": values, **memory})
    logits[:, [card["pad_id"], card["bos_id"]]] = -numpy.inf
    tokens.append(int(logits.argmax()))
print(tokenizer.decode([one for one in tokens[1:] if one != card["eos_id"]]))
```

`encode` takes ids and a mask [rows, source length]; `step` takes the newest token of each row [rows]. Keys and values
are [layers, rows, heads, length, width]; those of a row's own tokens have length 0 at the first step. Rows are
independent: a beam search gives each hypothesis a row and reorders `keys` and `values` along their second axis.

"""

CTRANSLATE2 = """## ctranslate2/

For [CTranslate2](https://opennmt.net/CTranslate2/). Sources include the end symbol:

```python
import json, ctranslate2, sentencepiece

card = json.load(open("card.json", encoding="utf-8"))
tokenizer = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
translator = ctranslate2.Translator("ctranslate2", compute_type="float32")
source = tokenizer.encode("A sentence.", out_type=str) + [tokenizer.id_to_piece(card["eos_id"])]
beam = {"beam_size": card["beam_size"], "length_penalty": card["ctranslate2_length_penalty"]}
never = [[tokenizer.id_to_piece(card[name])] for name in ("pad_id", "bos_id")]
longest = len(source) + card["max_extra_tokens"] - 1
whole = {"max_input_length": 0, "max_decoding_length": longest}  # CTranslate2 would cut a source at 1,024 tokens
answers = translator.translate_batch([source], suppress_sequences=never, **whole, **beam)
print(tokenizer.decode(answers[0].hypotheses[0]))
```

Probabilities are the same. CTranslate2's beam search stops as soon as `beam_size` hypotheses have ended. It divides
log-probabilities by length ** alpha, the checkpoint by ((5 + length) / 6) ** alpha; `ctranslate2_length_penalty` is the
alpha that comes nearest for translations of usual length. Sources and translations have at most POSITIONS tokens; a
longer one is an error.

"""

CTRANSLATE2_INT8 = """`ctranslate2-int8/` is the same model with int8 weights: `compute_type="int8"`. `parity.json` has
the difference in BLEU.

"""

CPP = """## cpp/

The network with greedy and beam search for CPUs, from ids to ids: `search.cpp`, in C++17 without a library, and its
weights. This program reads sentences, a line each, as ids that end with the end symbol, and prints the ids of their
translations. Compile it in `cpp/` with `g++ -std=c++17 -O3 -march=native -pthread translate.cpp -o translate`:

```cpp
#include "search.cpp"

#include <iostream>
#include <sstream>
#include <string>

int main() {
    void* model = load_model("weights.bin");
    if (!model) return std::cerr << "weights.bin is not a whole file of weights\\n", 1;
    std::vector<int64_t> tokens, offsets{0}, limits;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream ids(line);
        for (int64_t id; ids >> id;) tokens.push_back(id);
        const int64_t length = int64_t(tokens.size()) - offsets.back();
        offsets.push_back(int64_t(tokens.size()));
        limits.push_back(std::min<int64_t>(length + EXTRA, ROWS));  // tokens of an answer; ROWS position encodings
    }
    int64_t num_places = 0;
    for (int64_t limit : limits) num_places += limit;
    const size_t count = limits.size();
    std::vector<int32_t> answers(num_places);
    std::vector<int64_t> lengths(count), num_steps(count);
    std::vector<float> scores(count), log_probabilities(count);
    const int64_t never[] = {PAD_ID, BOS_ID};  // padding and begin symbol
    Request request{};
    request.tokens = tokens.data(), request.offsets = offsets.data(), request.limits = limits.data();
    request.num_sentences = int64_t(count), request.num_best = 1;
    request.beam_size = BEAM, request.length_penalty = PENALTY;
    request.max_tokens = 1024, request.num_threads = 1;  // source tokens that a thread decodes at the same time
    request.begin_id = BOS_ID, request.end_id = EOS_ID, request.forbidden = never, request.num_forbidden = 2;
    request.answers = answers.data(), request.lengths = lengths.data(), request.num_steps = num_steps.data();
    request.scores = scores.data(), request.log_probabilities = log_probabilities.data();
    const int64_t result = search(model, &request);
    destroy_model(model);
    if (result == -1) return std::cerr << "a sentence is empty or too long, or an id is not in the vocabulary\\n", 1;
    if (result) return std::cerr << "there is not enough memory\\n", 1;
    const int32_t* answer = answers.data();
    for (size_t i = 0; i < count; answer += limits[i++]) {
        for (int64_t j = 0; j < lengths[i]; ++j) std::cout << (j ? " " : "") << answer[j];
        std::cout << '\\n';
    }
}
```

`Request` in `search.cpp` describes each member. A beam of 1 with a penalty of 0 is greedy search. The program runs on
processors like the one that it is compiled on. To call it from another language, compile a library in `cpp/` with
`g++ -std=c++17 -O3 -march=native -fPIC -shared -pthread search.cpp -o search.so`. In Python, without PyTorch:

```python
import ctypes, json, sentencepiece
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

class Request(ctypes.Structure):
    _fields_ = [("tokens", POINTER(c_int64)), ("offsets", POINTER(c_int64)), ("limits", POINTER(c_int64))]
    _fields_ += [(name, c_int64) for name in ("num_sentences", "beam_size", "num_best", "stops_at_first")]
    _fields_ += [(name, c_int64) for name in ("max_tokens", "num_threads", "begin_id", "end_id")]
    _fields_ += [("forbidden", POINTER(c_int64)), ("num_forbidden", c_int64), ("length_penalty", c_float)]
    _fields_ += [("answers", POINTER(c_int32)), ("lengths", POINTER(c_int64)), ("scores", POINTER(c_float))]
    _fields_ += [("log_probabilities", POINTER(c_float)), ("num_steps", POINTER(c_int64)), ("progress", c_void_p)]

library = ctypes.CDLL("cpp/search.so")
library.load_model.restype = c_void_p
library.search.argtypes, library.search.restype = [c_void_p, POINTER(Request)], c_int64
card = json.load(open("card.json", encoding="utf-8"))
tokenizer = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
model = library.load_model(b"cpp/weights.bin")
assert model, "weights.bin is not a whole file of weights"
source = tokenizer.encode("A sentence.") + [card["eos_id"]]
limit = min(len(source) + card["max_extra_tokens"], ROWS)
answer, length, score = (c_int32 * limit)(), (c_int64 * 1)(), (c_float * 1)()
request = Request(
    (c_int64 * len(source))(*source), (c_int64 * 2)(0, len(source)), (c_int64 * 1)(limit),
    num_sentences=1, beam_size=card["beam_size"], num_best=1, length_penalty=card["length_penalty"],
    max_tokens=1024, num_threads=1, begin_id=card["bos_id"], end_id=card["eos_id"],
    forbidden=(c_int64 * 2)(card["pad_id"], card["bos_id"]), num_forbidden=2,
    answers=answer, lengths=length, scores=score, log_probabilities=(c_float * 1)(), num_steps=(c_int64 * 1)(),
)
result = library.search(model, request)
assert result == 0, f"the search returned {result}"
print(tokenizer.decode(answer[: length[0] - 1]))
```

`load_model` returns null if the file is not whole. `search` refuses sentences longer than ROWS tokens. `weights.bin` is
little-endian: the `Header` of `search.cpp`, the position encodings [ROWS, d_model], and the weights in the order of
`Model::set_next`, both in float32.

"""


HUGGINGFACE_PROGRAM = """```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("huggingface")
model = AutoModelForSeq2SeqLM.from_pretrained("huggingface")
batch = tokenizer(["A sentence."], return_tensors="pt", padding=True)
answers = model.generate(**batch, max_length=batch["input_ids"].shape[1] + EXTRA + 1)
print(tokenizer.decode(answers[0], skip_special_tokens=True))
```
"""

HUGGINGFACE = f"""## huggingface/

A Marian model of [Transformers](https://huggingface.co/docs/transformers), with a model card in its README:

{HUGGINGFACE_PROGRAM}
Probabilities are the same. As in CTranslate2, `length_penalty` is for another formula than the checkpoint's, and is set
to come nearest.

"""

TWO_MODELS = """The model has two sentencepiece models with one vocabulary: `source.spm` splits sentences into pieces,
`tokenizer.model` maps pieces to ids and ids to text. A language code such as `>>de<<`, with which the sentences of some
models begin, is a piece that `source.spm` does not know: put its id first.

"""

_PIECES = """
pieces = sentencepiece.SentencePieceProcessor(model_file="source.spm").encode_as_pieces
"""
WITH_TWO_MODELS = {
    'model_proto=extra["tokenizer.model"])\n': 'model_proto=extra["tokenizer.model"])' + _PIECES,
    'model_file="tokenizer.model")\n': 'model_file="tokenizer.model")' + _PIECES,
    'tokenizer.encode("A sentence.", out_type=str)': 'pieces("A sentence.")',
    'tokenizer.encode("A sentence.")': 'tokenizer.piece_to_id(pieces("A sentence."))',
}
"""What the programs have otherwise if `source.spm` encodes."""

SAFETY = """## Untrusted files

A TorchScript file is a program that PyTorch runs without checks. It can read and overwrite your files by mapping them
into memory, use all memory and time, and attack the process through operators that trust their arguments. `model.pt2`
is a program as well. Load only files that you trust, and run others in a container without network and files.
"""


def example_sentence(recipe: dict[str, Any]) -> str:
    """Return the sentence that the examples translate, with the first prefix of the model of a recipe."""
    return " ".join([*Prefixes.of_corpus(recipe["corpus"]).trained[:1], "A sentence."])


def readme(
    names: list[str],
    card: dict[str, Any],
    example: list[int],
    ctranslate2_positions: int,
    packed: bool,
    two_models: bool = False,
) -> str:
    """Return the README, with a section for each format in `names`.

    Args:
        names: files and folders of the bundle.
        card: the bundle's card.
        example: ids of what `example_sentence` returns, with the end symbol.
        ctranslate2_positions: upper bound on the tokens of a sentence for `ctranslate2/`.
        packed: whether model.ts contains `packed.ts`.
        two_models: whether `source.spm` encodes, and tokenizer.model decodes only.
    """
    sections = [TITLE.format(**card)]
    prefixes = Prefixes.of_corpus(card["recipe"]["corpus"])
    if prefixes.trained:
        begins = "begins" if prefixes.always else "may begin"
        known = ", ".join(f"`{prefix}`" for prefix in prefixes.trained)
        sections.append(PREFIXES.format(begins=begins, prefixes=known))
    if two_models:
        sections.append(TWO_MODELS)
    for name, section in (
        ("model.ts", TORCHSCRIPT + (PACKED if packed else "") + TORCHSCRIPT_ON),
        ("model.int8.ts", INT8),
        ("model.pt2", PT2),
        ("onnx", ONNX),
        ("ctranslate2", CTRANSLATE2),
        ("ctranslate2-int8", CTRANSLATE2_INT8),
        ("cpp", CPP),
        ("huggingface", HUGGINGFACE),
    ):
        if name in names:
            sections.append(section)
    values = {
        '"A sentence."': json.dumps(example_sentence(card["recipe"]), ensure_ascii=False),
        "{EXAMPLE}": "{" + ", ".join(map(str, example)) + "}",
        "BEAM": str(card["beam_size"]),
        "PENALTY": repr(float(card["length_penalty"])),
        "EXTRA": str(card["max_extra_tokens"]),
        "POSITIONS": str(ctranslate2_positions),
        "ROWS": str(num_positions(card["max_source_tokens"] or 0, card["max_extra_tokens"])),
        **{name.upper(): str(card[name]) for name in ("pad_id", "bos_id", "eos_id")},
    }
    text = "".join([*sections, SAFETY])
    for name, value in WITH_TWO_MODELS.items() if two_models else ():
        text = text.replace(name, value)
    for name, value in values.items():
        text = text.replace(name, value)
    return text
