"""The README.md of a bundle: what lies there, and how each format is loaded."""

from typing import Any

TITLE = """# {name}: {source_language} to {target_language}

A Transformer, exported. `card.json` says what it was trained on and how well it does; `parity.json` how this bundle's
files compared with the checkpoint that they were made from, on real sentences, when they were made.

"""

TORCHSCRIPT = """## model.ts

Network, greedy and beam search, tokenizer and card in one file. It needs torch and sentencepiece, nothing else:

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
tokens], each row ending with the end symbol, then padding (`pad_id`), and a bool mask, True at tokens (None if no row
is padded). It returns tokens [sentences, n_best, length], their lengths (the end symbol included, 0 where there is no
such answer), scores and log-probabilities. `model.greedy(source, source_mask, max_extra_tokens)` returns tokens,
lengths and log-probabilities. Wrong arguments raise an error that says what is wrong. For a search of your own,
`model.network` has `encode`, `init_cache`, `decode_step` and `logits`.

On a GPU: `torch.jit.load("model.ts", map_location="cuda")`, with ids on it too. In bfloat16:
`model.to(torch.bfloat16)`.

"""

PACKED = """\
**Fast on a CPU.** Inside the file lies the same search for PyTorch with oneDNN (x86, Linux on ARM), which lays its
weights out for the processor when first used. It finds the same, 1.3 to 1.8 times as fast:

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
**Warm up** with two batches before you measure, or share the model between threads: the first call compiles and
packs, the second optimises what the first has seen, and both take two to three times as long as later ones;
`first_batch_seconds` in `parity.json` is what the first one took.
**Freezing** (`torch.jit.freeze(model, preserved_attrs=["beam", "greedy"])` on the model as loaded, without packing)
was worth 0 to 8 % on a CPU, and a frozen model no longer moves to another device or type: not worth it beside packing.

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
`-DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")`. The tokenizer's and the card's
bytes come as `torch::jit::ExtraFilesMap`, third argument of `torch::jit::load`.

"""

INT8 = """## model.int8.ts

As `model.ts`, for CPUs only (no GPU, no bfloat16, no `packed.ts`): weights of the linear layers in int8, their inputs
rounded as they come. What that costs in BLEU stands in `parity.json`.

"""

PT2 = """## model.pt2

The same network by torch.export, for when TorchScript goes. It has `encode` and `step`; the loop is yours:

```python
import json, sentencepiece, torch
from torch.export.pt2_archive._package import load_pt2

card = json.load(open("card.json"))
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

Rows are independent: for a beam, give each hypothesis a row, and reorder `keys` and `values` along their second axis.

"""

CTRANSLATE2 = """## ctranslate2/

For [CTranslate2](https://opennmt.net/CTranslate2/). Sources are given with their end symbol:

```python
import json, ctranslate2, sentencepiece

card = json.load(open("card.json"))
tokenizer = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
translator = ctranslate2.Translator("ctranslate2", compute_type="float32")
source = tokenizer.encode("A sentence.", out_type=str) + [tokenizer.id_to_piece(card["eos_id"])]
beam = {"beam_size": card["beam_size"], "length_penalty": card["ctranslate2_length_penalty"]}
never = [[tokenizer.id_to_piece(card[name])] for name in ("pad_id", "bos_id")]
longest = len(source) + card["max_extra_tokens"] - 1
answers = translator.translate_batch([source], max_decoding_length=longest, suppress_sequences=never, **beam)
print(tokenizer.decode(answers[0].hypotheses[0]))
```

Probabilities are the same. Its beam stops when as many answers as the beam is wide have ended, and divides by
length ** alpha, the checkpoint by ((5 + length) / 6) ** alpha: `ctranslate2_length_penalty` is the alpha that ranks
answers of a usual length alike. Sources and answers have POSITIONS tokens at most.

"""

CTRANSLATE2_INT8 = """`ctranslate2-int8/` is the same with weights in int8: `compute_type="int8"`. What that costs in
BLEU stands in `parity.json`.

"""

SAFETY = """## Files from strangers

A TorchScript file is a program, and PyTorch runs it unchecked: it can read and overwrite files that you may (by mapping
them into memory), use all memory and time, and, through operators that trust their arguments, reach the process itself.
`model.pt2` also is a program. Load only what you trust; a stranger's runs in a container without network or files.
"""


def readme(names: list[str], card: dict[str, Any], example: list[int], ctranslate2_positions: int, packed: bool) -> str:
    """The text, with sections for the formats named.

    Args:
        names: files and folders of the bundle.
        card: its card.
        example: ids of "A sentence.", the end symbol last.
        ctranslate2_positions: the most tokens that `ctranslate2/` takes.
        packed: whether `packed.ts` lies inside model.ts.
    """
    sections = [TITLE.format(**card)]
    for name, section in (
        ("model.ts", TORCHSCRIPT + (PACKED if packed else "") + TORCHSCRIPT_ON),
        ("model.int8.ts", INT8),
        ("model.pt2", PT2),
        ("ctranslate2", CTRANSLATE2),
        ("ctranslate2-int8", CTRANSLATE2_INT8),
    ):
        if name in names:
            sections.append(section)
    values = {
        "{EXAMPLE}": "{" + ", ".join(map(str, example)) + "}",
        "BEAM": str(card["beam_size"]),
        "PENALTY": repr(float(card["length_penalty"])),
        "EXTRA": str(card["max_extra_tokens"]),
        "POSITIONS": str(ctranslate2_positions),
    }
    text = "".join([*sections, SAFETY])
    for name, value in values.items():
        text = text.replace(name, value)
    return text
