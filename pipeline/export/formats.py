"""The formats of a bundle in one table: what each requires, how it is written, and how it is loaded to be compared."""

import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from data_module.errors import InputError, require_package
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer
from model.decoding import BeamSearch, answer_limits, next_log_probabilities
from model.fast.compiled_search import CompiledSearch
from model.transformer import Transformer
from pipeline.checkpointing.checkpoint import TrainedModel
from pipeline.export.card import model_card
from pipeline.export.cpp_program import WEIGHTS, compile_cpp, require_compiled, write_cpp
from pipeline.export.ctranslate2_model import require_ctranslate2, write_ctranslate2
from pipeline.export.exported_program import ExportedSearch, require_exported_program, write_exported_program
from pipeline.export.huggingface_model import require_marian, require_transformers, write_huggingface
from pipeline.export.onnx_model import load_onnx, require_onnx, write_onnx
from pipeline.inference.loading import load_torchscript
from pipeline.inference.scoring import score_pairs
from pipeline.inference.translator import BATCH_TOKENS, LONGEST, padded

Ids = tuple[int, ...]
"""Ids of a source or an answer, with the end symbol."""


class Bundle(NamedTuple):
    """A bundle that is being written."""

    model: TrainedModel
    folder: Path
    card: str
    """Text of `card.json`, which some formats hold as well."""
    power_penalty: float
    """Length penalty for the beam search of CTranslate2 and Transformers."""
    n_best: int = 1
    """Number of answers to a sentence that `model.pt2` returns."""


class Answer(NamedTuple):
    """One translation of a sentence, as ids."""

    tokens: Ids
    score: float
    """Log-probability, divided by the length penalty in a beam search; 0 in a beam search of another program."""


Search = Callable[[list[Ids], bool], list[list[Answer]]]
"""Returns the answers to each source of a batch, best first, by the checkpoint's settings, of beam search or, if its
second argument is True, of greedy search."""


class Format(NamedTuple):
    """A file or folder of a bundle, whose path `write` and `load` take."""

    require: Callable[[TrainedModel], object]
    """Raises InputError if its program is not installed, or does not support the model."""
    write: Callable[[Bundle, Path], object]
    load: Callable[[Bundle, Path, str], Search]
    """Takes the bundle, the path and a precision."""
    precisions: tuple[str, ...] = ("float32",)
    """Precisions in which the format is compared with the checkpoint. Only float32 has bounds."""
    beam: Literal["exact", "reported", "none"] = "reported"
    """Whether its beam search must find the checkpoint's answers, or is another program's and only reported."""
    has_greedy: bool = True
    """False if the settings and the number of answers of its search are fixed."""
    check: Callable[[Path, Tokenizer, list[str], list[Ids], list[Ids]], list[str]] = lambda *compared: []
    """Returns how the format's own tokenizer differs; see `tokenizer_differences`."""


def own_search(search: Any, model: TrainedModel) -> Search:
    """Return a `BeamSearch` (the checkpoint's or loaded from TorchScript), `ExportedSearch` or `CompiledSearch`."""
    settings = model.decoding

    def found(sources: list[Ids], greedy: bool) -> list[list[Answer]]:
        source, mask = padded(sources, model.tokenizer.pad_id)
        batch, size, extra = (source, None if bool(mask.all()) else mask), settings.beam_size, settings.max_extra_tokens
        if greedy:
            tokens, lengths, scores = (result.unsqueeze(1) for result in search.greedy(*batch, extra))
        else:
            options = size, settings.length_penalty, extra, size, settings.stop_rule
            tokens, lengths, scores = search.beam(*batch, *options)[:3]
        if not bool(lengths[:, 0].all()):
            raise InputError(f"{model.path}: its scores are not finite; choose a checkpoint with finite weights")
        return [
            [Answer(tuple(ids[:length]), score) for ids, length, score in zip(*rows, strict=True) if length]
            for rows in zip(tokens.tolist(), lengths.tolist(), scores.tolist(), strict=True)
        ]

    return found


def _load_cpp(bundle: Bundle, folder: Path, precision: str) -> Search:
    ids = bundle.model.tokenizer.search_ids
    return own_search(CompiledSearch(compile_cpp(folder), folder / WEIGHTS, *ids), bundle.model)


def _limits(model: TrainedModel, sources: list[Ids]) -> Tensor:
    """Return the largest number of tokens [B] of an answer to each source, including the end symbol."""
    lengths = torch.tensor([len(ids) for ids in sources])
    return answer_limits(lengths, model.decoding.max_extra_tokens, model.network.positions.max_positions)


def _load_onnx(bundle: Bundle, folder: Path, precision: str) -> Search:
    """Return greedy search by `encode` and `step` of `onnx/`, in the loop of the bundle's README."""
    model, programs = bundle.model, load_onnx(folder)
    bos_id, eos_id, pad_id, unk_id = model.tokenizer.search_ids

    def found(sources: list[Ids], greedy: bool) -> list[list[Answer]]:
        (source, mask), limits = padded(sources, pad_id), _limits(model, sources)
        cross = programs["encode"](source, mask)
        keys, values = (states[:, :, :, :0] for states in cross)
        last, totals, is_open = torch.full_like(limits, bos_id), torch.zeros(len(sources)), limits > 0
        tokens: list[Tensor] = []
        while bool(is_open.any()):
            logits, keys, values = programs["step"](last, keys, values, *cross, mask)
            log_probs = next_log_probabilities(logits.unsqueeze(1), [pad_id, bos_id, unk_id]).squeeze(1)
            last = log_probs.argmax(-1).masked_fill(limits <= len(tokens) + 1, eos_id)
            totals += log_probs.gather(1, last.unsqueeze(1)).squeeze(1).masked_fill(~is_open, 0.0)
            tokens.append(last)
            is_open &= last != eos_id
        rows = zip(torch.stack(tokens, 1).tolist(), totals.tolist(), strict=True)
        return [[Answer(tuple(row[: row.index(eos_id) + 1]), total)] for row, total in rows]

    return found


def _load_ctranslate2(bundle: Bundle, folder: Path, precision: str) -> Search:
    model, tokenizer, pieces = bundle.model, bundle.model.tokenizer, bundle.model.tokenizer.pieces()
    ids = {piece: number for number, piece in enumerate(pieces)}
    translator = require_package("ctranslate2", "ctranslate2").Translator(
        str(folder), compute_type=precision, inter_threads=1, intra_threads=torch.get_num_threads()
    )
    beam = {"beam_size": model.decoding.beam_size, "length_penalty": bundle.power_penalty}

    def spelled(rows: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[pieces[number] for number in row] for row in rows]

    def found(sources: list[Ids], greedy: bool) -> list[list[Answer]]:
        limits = _limits(model, sources).tolist()
        results = translator.translate_batch(
            spelled(sources),
            max_decoding_length=max(limits) - 1,  # without the end symbol
            min_decoding_length=0,
            suppress_sequences=spelled([[tokenizer.pad_id], [tokenizer.bos_id], [tokenizer.unk_id]]),
            **({"beam_size": 1} if greedy else beam),
        )
        rows = zip((result.hypotheses[0] for result in results), limits, strict=True)
        answers = [tuple(ids[piece] for piece in row[: limit - 1]) for row, limit in rows]
        scores = [0.0] * len(answers)
        if greedy:  # by teacher forcing; CTranslate2 adds the end symbol itself
            batches = {"max_batch_size": BATCH_TOKENS, "batch_type": "tokens"}
            forced = translator.score_batch(spelled(sources), spelled(answers), max_input_length=0, **batches)
            scores = [sum(scored.log_probs) for scored in forced]
        return [[Answer((*row, tokenizer.eos_id), score)] for row, score in zip(answers, scores, strict=True)]

    return found


def _load_huggingface(bundle: Bundle, folder: Path, precision: str) -> Search:
    """Load the model as the bundle's README describes, with the generation settings that it holds."""
    model, tokenizer = bundle.model, bundle.model.tokenizer
    marian = require_transformers().AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()

    def logits(source: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        return marian(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits

    def found(sources: list[Ids], greedy: bool) -> list[list[Answer]]:
        (source, mask), limits = padded(sources, tokenizer.pad_id), _limits(model, sources).tolist()
        options = {"num_beams": 1} if greedy else {}
        # The begin symbol counts.
        output = marian.generate(source, attention_mask=mask.long(), max_length=max(limits) + 1, **options)
        rows, end = zip(output[:, 1:].tolist(), limits, strict=True), tokenizer.eos_id
        answers = [(*row[: row.index(end)][: limit - 1], end) for row, limit in rows]
        scores = [0.0] * len(answers)
        if greedy:  # by teacher forcing
            scores = score_pairs(logits, lambda rows: rows.log_softmax(-1), tokenizer, sources, answers)
        return [[Answer(*one)] for one in zip(answers, scores, strict=True)]

    return found


def tokenizer_differences(
    folder: Path, tokenizer: Tokenizer, texts: list[str], sources: list[Ids], answers: list[Ids]
) -> list[str]:
    """Compare what the tokenizer of `huggingface/` makes of texts and answers with this project's ids and texts."""
    marian = require_transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoded = map(tuple, marian(texts, truncation=True, max_length=LONGEST)["input_ids"])
    decoded = marian.batch_decode(answers, skip_special_tokens=True)
    # Transformers leaves no white space at the end of a text.
    expected = [text.strip() for text in tokenizer.decode(answers)]
    counts = {
        "encodes": sum(one != other for one, other in zip(encoded, sources, strict=True)),
        "decodes": sum(one != other for one, other in zip(decoded, expected, strict=True)),
    }
    return [f"its tokenizer {what} {n} of {len(texts)} texts differently" for what, n in counts.items() if n]


def _write_huggingface(bundle: Bundle, folder: Path) -> None:
    model, card = bundle.model, json.loads(bundle.card)
    languages = card["source_language"], card["target_language"]
    write_huggingface(model.network, model.tokenizer, model.decoding, bundle.power_penalty, languages, folder)
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")


def write_torchscript(network: Transformer, tokenizer: Tokenizer, card: str, path: Path) -> None:
    """Write network, searches, tokenizer and card into one TorchScript file. `card` is the text of `card.json`."""
    search = BeamSearch(network, *tokenizer.search_ids).eval()
    extra = {"card.json": card, TOKENIZER_NAME: tokenizer.model}
    with warnings.catch_warnings():
        # PyTorch deprecates TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        buffer = io.BytesIO()  # On a full disk, `torch.jit.save` to a file would end the process.
        torch.jit.save(torch.jit.script(search), buffer, _extra_files=extra)
    path.write_bytes(buffer.getbuffer())


FORMATS = {
    "model.ts": Format(
        lambda model: None,
        lambda bundle, path: write_torchscript(bundle.model.network, bundle.model.tokenizer, bundle.card, path),
        lambda bundle, path, precision: own_search(load_torchscript(path).to(getattr(torch, precision)), bundle.model),
        ("float32", "bfloat16"),
        beam="exact",
    ),
    "model.pt2": Format(
        lambda model: require_exported_program(),
        lambda bundle, path: write_exported_program(bundle.model, bundle.n_best, bundle.card, path),
        lambda bundle, path, precision: own_search(ExportedSearch(path), bundle.model),
        beam="exact",
        has_greedy=False,
    ),
    "onnx": Format(
        lambda model: require_onnx(),
        lambda bundle, folder: write_onnx(bundle.model.network, folder),
        _load_onnx,
        beam="none",
    ),
    "ctranslate2": Format(
        lambda model: require_ctranslate2(model.network),
        lambda bundle, folder: write_ctranslate2(bundle.model.network, bundle.model.tokenizer, folder),
        _load_ctranslate2,
    ),
    "ctranslate2-int8": Format(
        lambda model: require_ctranslate2(model.network),
        lambda bundle, folder: write_ctranslate2(bundle.model.network, bundle.model.tokenizer, folder, "int8"),
        _load_ctranslate2,
        ("int8",),
    ),
    "huggingface": Format(
        lambda model: require_marian(model.network, model.tokenizer),
        _write_huggingface,
        _load_huggingface,
        check=tokenizer_differences,
    ),
    "cpp": Format(
        lambda model: require_compiled(model.network),
        lambda bundle, folder: write_cpp(bundle.model.network, bundle.model.decoding.max_extra_tokens, folder),
        _load_cpp,
        beam="exact",
    ),
}
"""The formats by the names of their files and folders."""
