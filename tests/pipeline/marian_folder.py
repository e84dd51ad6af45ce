"""Folders of Marian models as OPUS-MT has them, made by Transformers with random weights, for tests."""

import io
import json
import random
from pathlib import Path

import sentencepiece
import torch
import transformers

from tests.conftest import sentences

Loaded = "tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]"
SHAPE = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1}
NETWORK = ["--network.num_layers", 2, "--network.num_decoder_layers", 1]
"""Settings of the tiny recipe that give its network this shape."""


def spm(lines: list[str], size: int) -> bytes:
    """A small sentencepiece model with sentencepiece's own special ids and normalization."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, hard_vocab_limit=False, minloglevel=2
    )
    return model.getvalue()


def target_text(lines: list[str]) -> list[str]:
    """The same words in another spelling."""
    return [line.replace("e", "ö").upper() for line in lines]


def write_marian(folder: Path) -> Path:
    """Write a model with swish, an output bias, two tokenizers with one vocabulary and the padding symbol as start."""
    folder.mkdir(parents=True)
    lines = sentences(300, seed=300)
    models = [spm(lines, 60), spm(target_text(lines), 64)]
    for name, model in zip(("source.spm", "target.spm"), models, strict=True):
        (folder / name).write_bytes(model)
    processors = [sentencepiece.SentencePieceProcessor(model_proto=model) for model in models]
    pieces = sorted({one.id_to_piece(i) for one in processors for i in range(len(one))} - {"<s>", "</s>", "<unk>"})
    random.Random(1).shuffle(pieces)
    pieces = ["</s>", "<unk>", *pieces, ">>de<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    tokenizer = transformers.MarianTokenizer(*(str(folder / n) for n in ("source.spm", "target.spm", "vocab.json")))
    tokenizer.save_pretrained(folder)
    pad = len(pieces) - 1
    settings = transformers.MarianConfig(
        **{
            **{"vocab_size": len(pieces), "activation_function": "swish", "scale_embedding": True, "dropout": 0.0},
            "init_std": 0.2,
            **{"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad, "forced_eos_token_id": 0},
            **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in HEADS.items()},
            **SHAPE,
        }
    )
    torch.manual_seed(5)
    model = transformers.MarianMTModel(settings)
    model.final_logits_bias.normal_(std=1.5)
    _train(model, tokenizer, lines)
    model.generation_config.update(bad_words_ids=[[pad]], num_beams=1, max_length=512)
    model.save_pretrained(folder)
    return folder


def _train(
    model: "transformers.PreTrainedModel", tokenizer: "transformers.PreTrainedTokenizerBase", lines: list[str]
) -> None:
    """Learn a little, so that answers differ and end."""
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    for step in range(120):
        some = random.Random(step).sample(lines, 24)
        batch = tokenizer(some, text_target=target_text(some), return_tensors="pt", padding=True)
        batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


HEADS = {"ffn_dim": 32, "attention_heads": 2}


def load(folder: Path) -> Loaded:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
