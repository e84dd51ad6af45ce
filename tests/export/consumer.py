"""Translate standard input with a bundle's model; needs only torch and sentencepiece.

python consumer.py model.ts
"""

import json
import sys

import sentencepiece
import torch

extra = {"card.json": "", "tokenizer.model": ""}
model = torch.jit.load(sys.argv[1], _extra_files=extra)
card = json.loads(extra["card.json"])
tokenizer = sentencepiece.SentencePieceProcessor(model_proto=extra["tokenizer.model"])
sources = [[*tokenizer.encode(line.strip()), card["eos_id"]] for line in sys.stdin]
longest = max(map(len, sources))
source = torch.tensor([row + [card["pad_id"]] * (longest - len(row)) for row in sources])
mask = torch.arange(longest) < torch.tensor([len(row) for row in sources]).unsqueeze(1)
settings = card["beam_size"], card["length_penalty"], card["max_extra_tokens"], 1, card["stop_rule"]
answers = model.beam(source, mask, *settings)
for tokens, length in zip(answers[0][:, 0].tolist(), answers[1][:, 0].tolist()):  # noqa: B905
    print(tokenizer.decode(tokens[: length - 1]))
present = [name for name in ("lightning", "model", "pipeline", "data_module") if name in sys.modules]
assert not present, present
