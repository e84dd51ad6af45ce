"""The formats of a bundle in one table: what each requires, how it is written, and how it is loaded to be compared."""

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from data_module.errors import InputError, require_package
from data_module.tokenization.tokenizer import TOKENIZER_NAME, Tokenizer
from model.decoding import BeamSearch
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
from pipeline.inference.translator import BATCH_TOKENS, LONGEST, length_batches, padded

Ids = list[int]
T = TypeVar("T")


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

    tokens: tuple[int, ...]
    """Token ids, including the end symbol."""
    score: float
    """Log-probability divided by the length penalty; the log-probability for greedy search."""


class Runner:
    """A loaded format that translates ids, by the settings of the checkpoint. Sources are ids with the end symbol."""

    own_beam = False
    """Whether its beam search follows this project's rules, and must find the answers of the checkpoint's search."""
    n_best: int | None = None
    """Number of answers to a sentence that its beam search returns, if `own_beam`; None for the whole beam."""
    has_beam = True
    has_greedy = True

    def __init__(self, model: TrainedModel) -> None:
        """`model` is the checkpoint."""
        self.tokenizer, self.settings, self.path = model.tokenizer, model.decoding, model.path
        self.max_positions = model.network.positions.max_positions

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source, with the log-probability that it has in this format."""
        raise NotImplementedError

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return hypotheses of each source, best first; greedy answers if the format has no beam search."""
        return [[answer] for answer in self.greedy(sources)]

    def tokenizer_differences(self, texts: list[str], sources: list[Ids], answers: list[Ids]) -> list[str]:
        """Return the differences of the format's own tokenizer, if it has one, from the checkpoint's."""
        return []

    def _longest_answer(self, source_length: int) -> int:
        """Return the maximum number of tokens of an answer, including the end symbol."""
        longest = source_length + self.settings.max_extra_tokens
        return min(longest, self.max_positions) if self.max_positions else longest


def in_batches(sources: list[Ids], search: Callable[[list[Ids]], list[T]], one_length: bool = False) -> list[T]:
    """Return what `search` returns for each source.

    With `one_length`, all sources of a call have the same length, for a `search` that has one limit for all answers.
    """
    answers: dict[int, T] = {}
    for batch in length_batches(list(map(len, sources)), BATCH_TOKENS, one_length=one_length):
        answers.update(zip(batch, search([sources[index] for index in batch]), strict=True))
    return [answers[index] for index in range(len(sources))]


class SearchRunner(Runner):
    """A `BeamSearch` (the checkpoint's or loaded from TorchScript), an `ExportedSearch`, or a `CompiledSearch`."""

    own_beam = True

    def __init__(self, search: Any, model: TrainedModel, n_best: int | None = None, has_greedy: bool = True) -> None:
        super().__init__(model)
        self.search, self.n_best, self.has_greedy = search, n_best, has_greedy

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return all hypotheses of the final beam, best first."""
        size, settings = self.settings.beam_size, self.settings
        options = size, settings.length_penalty, settings.max_extra_tokens, size, settings.stop_rule
        return self._search(sources, lambda *batch: self.search.beam(*batch, *options)[:3])

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source."""

        def search(*batch: Tensor | None) -> tuple[Tensor, ...]:
            return tuple(result.unsqueeze(1) for result in self.search.greedy(*batch, self.settings.max_extra_tokens))

        return [answers[0] for answers in self._search(sources, search)]

    def _search(self, sources: list[Ids], search: Callable[..., tuple[Tensor, ...]]) -> list[list[Answer]]:
        def answers(batch: list[Ids]) -> list[list[Answer]]:
            source, mask = padded(batch, self.tokenizer.pad_id)
            results = search(source, None if bool(mask.all()) else mask)
            if not bool(results[1][:, 0].all()):
                raise InputError(f"{self.path}: its scores are not finite; choose a checkpoint with finite weights")
            return [
                [Answer(tuple(tokens[:length]), score) for tokens, length, score in zip(*rows, strict=True) if length]
                for rows in zip(*(result.tolist() for result in results), strict=True)
            ]

        return in_batches(sources, answers)


class ProgramRunner(Runner):
    """The programs `encode` and `step` of `onnx/`, with a greedy decoding loop over batches."""

    has_beam = False

    def __init__(self, programs: dict[str, Callable[..., Any]], model: TrainedModel) -> None:
        super().__init__(model)
        self.encode, self.step = programs["encode"], programs["step"]

    @torch.no_grad()
    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source. Padding and the begin symbol are never chosen."""
        return in_batches(sources, self._search)

    def _search(self, sources: list[Ids]) -> list[Answer]:
        tokenizer = self.tokenizer
        source, mask = padded(sources, tokenizer.pad_id)
        limits = torch.tensor([self._longest_answer(len(ids)) for ids in sources])
        cross_keys, cross_values = self.encode(source, mask)
        keys, values = cross_keys[:, :, :, :0], cross_values[:, :, :, :0]
        last = torch.full([len(sources)], tokenizer.bos_id)
        ended = torch.zeros(len(sources), dtype=torch.bool)
        totals = torch.zeros(len(sources))
        tokens: list[Tensor] = []
        while not bool(ended.all()):
            logits, keys, values = self.step(last, keys, values, cross_keys, cross_values, mask)
            log_probabilities = logits.log_softmax(-1)
            log_probabilities[:, [tokenizer.pad_id, tokenizer.bos_id]] = float("-inf")
            last = log_probabilities.argmax(-1).masked_fill(limits <= len(tokens) + 1, tokenizer.eos_id)
            totals += log_probabilities.gather(1, last.unsqueeze(1)).squeeze(1).masked_fill(ended, 0.0)
            tokens.append(last)
            ended |= last == tokenizer.eos_id
        rows = zip(torch.stack(tokens, 1).tolist(), totals.tolist(), strict=True)
        return [Answer(tuple(row[: row.index(tokenizer.eos_id) + 1]), total) for row, total in rows]


class CTranslate2Runner(Runner):
    """A `ctranslate2/` folder, with the length penalty that comes nearest to the checkpoint's."""

    def __init__(self, bundle: Bundle, folder: Path, precision: str) -> None:
        super().__init__(bundle.model)
        self.translator = require_package("ctranslate2", "ctranslate2").Translator(
            str(folder), compute_type=precision, inter_threads=1, intra_threads=torch.get_num_threads()
        )
        self.length_penalty = bundle.power_penalty
        self.pieces = self.tokenizer.pieces()
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return the best answer of each source, with its score by CTranslate2's formula."""
        options = {"beam_size": self.settings.beam_size, "length_penalty": self.length_penalty}
        return [[answer] for answer in self._translate(sources, **options)]

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source, with its log-probability by teacher forcing."""
        answers = in_batches(sources, lambda batch: self._translate(batch, beam_size=1), one_length=True)
        # CTranslate2 adds the end symbol itself.
        targets = self._pieces([list(answer.tokens[:-1]) for answer in answers])
        forced = self.translator.score_batch(
            self._pieces(sources), targets, max_batch_size=BATCH_TOKENS, batch_type="tokens", max_input_length=0
        )
        return [Answer(answer.tokens, sum(scored.log_probs)) for answer, scored in zip(answers, forced, strict=True)]

    def _translate(self, sources: list[Ids], **options: Any) -> list[Answer]:
        tokenizer = self.tokenizer
        results = self.translator.translate_batch(
            self._pieces(sources),
            # CTranslate2 does not count the end symbol.
            max_decoding_length=self._longest_answer(max(map(len, sources))) - 1,
            min_decoding_length=0,
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
            return_scores=True,
            suppress_sequences=self._pieces([[tokenizer.pad_id], [tokenizer.bos_id]]),
            **options,
        )
        return [
            Answer((*(self.ids[piece] for piece in result.hypotheses[0]), tokenizer.eos_id), result.scores[0])
            for result in results
        ]

    def _pieces(self, rows: list[Ids]) -> list[list[str]]:
        return [[self.pieces[i] for i in row] for row in rows]


class HuggingFaceRunner(Runner):
    """A `huggingface/` folder, loaded as its README describes, with the generation settings that it holds."""

    def __init__(self, folder: Path, model: TrainedModel) -> None:
        super().__init__(model)
        transformers = require_transformers()
        self.marian = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return the best answer of each source, without its score."""
        return [[Answer(tokens, 0.0)] for tokens in self._generate(sources)]

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source, with its log-probability by teacher forcing."""

        def logits(source: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
            return self.model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits

        answers = self._generate(sources, num_beams=1)
        totals = score_pairs(logits, lambda rows: rows.log_softmax(-1), self.tokenizer, sources, answers)
        return [Answer(tokens, total) for tokens, total in zip(answers, totals, strict=True)]

    def tokenizer_differences(self, texts: list[str], sources: list[Ids], answers: list[Ids]) -> list[str]:
        """Compare the ids of texts and the texts of answers with those of this project's tokenizer."""
        encoded = self.marian(texts, truncation=True, max_length=LONGEST)["input_ids"]
        decoded = self.marian.batch_decode(answers, skip_special_tokens=True)
        # Transformers leaves no white space at the end of a text.
        expected = [text.strip() for text in self.tokenizer.decode(answers)]
        messages = []
        for what, theirs, ours in (("encodes", encoded, sources), ("decodes", decoded, expected)):
            if count := sum(one != other for one, other in zip(theirs, ours, strict=True)):
                messages.append(f"its tokenizer {what} {count} of {len(ours)} texts differently")
        return messages

    def _generate(self, sources: list[Ids], **options: Any) -> list[tuple[int, ...]]:
        def search(batch: list[Ids]) -> list[tuple[int, ...]]:
            ids = torch.tensor(batch)
            limit = self._longest_answer(ids.size(1)) + 1  # the begin symbol counts
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_length=limit, **options)
            return [tuple(row[: row.index(self.tokenizer.eos_id) + 1]) for row in output[:, 1:].tolist()]

        return in_batches(sources, search, one_length=True)


def _write_huggingface(bundle: Bundle, folder: Path) -> None:
    model, card = bundle.model, json.loads(bundle.card)
    languages = card["source_language"], card["target_language"]
    write_huggingface(model.network, model.tokenizer, model.decoding, bundle.power_penalty, languages, folder)
    (folder / "README.md").write_text(model_card(card), encoding="utf-8")


def write_torchscript(network: Transformer, tokenizer: Tokenizer, card: str, path: Path) -> None:
    """Write network, searches, tokenizer and card into one TorchScript file. `card` is the text of `card.json`."""
    search = BeamSearch(network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id).eval()
    extra = {"card.json": card, TOKENIZER_NAME: tokenizer.model}
    with warnings.catch_warnings():
        # PyTorch deprecates TorchScript.
        warnings.simplefilter("ignore", DeprecationWarning)
        buffer = io.BytesIO()  # On a full disk, `torch.jit.save` to a file would end the process.
        torch.jit.save(torch.jit.script(search), buffer, _extra_files=extra)
    path.write_bytes(buffer.getbuffer())


def _load_cpp(bundle: Bundle, folder: Path, precision: str) -> Runner:
    tokenizer = bundle.model.tokenizer
    ids = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
    return SearchRunner(CompiledSearch(compile_cpp(folder), folder / WEIGHTS, *ids), bundle.model)


class Format(NamedTuple):
    """A file or folder of a bundle, whose path `write` and `load` take."""

    require: Callable[[TrainedModel], object]
    """Raises InputError if its program is not installed, or does not support the model."""
    write: Callable[[Bundle, Path], object]
    load: Callable[[Bundle, Path, str], Runner]
    """Takes the bundle, the path and a precision."""
    precisions: tuple[str, ...] = ("float32",)
    """Precisions in which the format is compared with the checkpoint. Only float32 has bounds."""


FORMATS = {
    "model.ts": Format(
        lambda model: None,
        lambda bundle, path: write_torchscript(bundle.model.network, bundle.model.tokenizer, bundle.card, path),
        lambda bundle, path, precision: SearchRunner(
            load_torchscript(path).to(getattr(torch, precision)), bundle.model
        ),
        ("float32", "bfloat16"),
    ),
    "model.pt2": Format(
        lambda model: require_exported_program(),
        lambda bundle, path: write_exported_program(bundle.model, bundle.n_best, bundle.card, path),
        lambda bundle, path, precision: SearchRunner(
            ExportedSearch(path), bundle.model, bundle.n_best, has_greedy=False
        ),
    ),
    "onnx": Format(
        lambda model: require_onnx(),
        lambda bundle, folder: write_onnx(bundle.model.network, folder),
        lambda bundle, folder, precision: ProgramRunner(load_onnx(folder), bundle.model),
    ),
    "ctranslate2": Format(
        lambda model: require_ctranslate2(model.network),
        lambda bundle, folder: write_ctranslate2(bundle.model.network, bundle.model.tokenizer, folder),
        CTranslate2Runner,
    ),
    "ctranslate2-int8": Format(
        lambda model: require_ctranslate2(model.network),
        lambda bundle, folder: write_ctranslate2(bundle.model.network, bundle.model.tokenizer, folder, "int8"),
        CTranslate2Runner,
        ("int8",),
    ),
    "huggingface": Format(
        lambda model: require_marian(model.network, model.tokenizer),
        _write_huggingface,
        lambda bundle, folder, precision: HuggingFaceRunner(folder, bundle.model),
    ),
    "cpp": Format(
        lambda model: require_compiled(model.network),
        lambda bundle, folder: write_cpp(bundle.model.network, bundle.model.decoding.max_extra_tokens, folder),
        _load_cpp,
    ),
}
"""The formats by the names of their files and folders."""
