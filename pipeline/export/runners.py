"""Runners that translate ids with each format of a bundle, so that their answers can be compared."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings
from pipeline.inference.text_io import progress_bar
from pipeline.inference.translator import batches_by_length, padded

BATCH_TOKENS = 4096
Ids = list[int]


class Answer(NamedTuple):
    """One translation of a sentence, as ids."""

    tokens: tuple[int, ...]
    """Token ids, including the end symbol."""
    score: float
    """Log-probability divided by the length penalty; the log-probability for greedy search."""


class SearchRunner:
    """A `BeamSearch`, the checkpoint's or one loaded from TorchScript, or a `CompiledSearch`."""

    def __init__(self, search: Any, tokenizer: Tokenizer, settings: DecodingSettings, name: str) -> None:
        """`name` says in the progress bar which search this is."""
        self.search, self.tokenizer, self.settings, self.name = search, tokenizer, settings, name

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return all hypotheses of the final beam, best first."""
        settings = self.settings
        options = (settings.beam_size, settings.length_penalty, settings.max_extra_tokens, settings.beam_size)
        return self._all(sources, lambda source, mask: self.search.beam(source, mask, *options)[:3], "beam search")

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each sentence."""

        def search(source: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
            return tuple(one.unsqueeze(1) for one in self.search.greedy(source, mask, self.settings.max_extra_tokens))

        return [answers[0] for answers in self._all(sources, search, "greedy search")]

    def _all(self, sources: list[Ids], search: Callable[..., tuple[Tensor, ...]], kind: str) -> list[list[Answer]]:
        found: list[list[Answer]] = [[] for _ in sources]
        with progress_bar(len(sources), description=f"{self.name}, {kind}") as bar:
            for batch in batches_by_length([len(source) for source in sources], BATCH_TOKENS):
                source, mask = padded([sources[index] for index in batch], self.tokenizer.pad_id)
                answers = [one.tolist() for one in search(source, None if bool(mask.all()) else mask)]
                for index, *rows in zip(batch, *answers, strict=True):
                    found[index] = [
                        Answer(tuple(tokens[:length]), score)
                        for tokens, length, score in zip(*rows, strict=True)
                        if length
                    ]
                bar.update(len(batch))
        return found


class ProgramRunner:
    """The programs of `model.pt2` or `onnx/` with a greedy decoding loop over batches."""

    def __init__(
        self,
        programs: dict[str, Callable[..., Any]],
        tokenizer: Tokenizer,
        settings: DecodingSettings,
        max_positions: int,
        name: str,
    ) -> None:
        """`programs` has `encode` and `step`; `name` says in the progress bar which file this is."""
        self.encode, self.step, self.name = programs["encode"], programs["step"], name
        self.tokenizer, self.settings, self.max_positions = tokenizer, settings, max_positions

    @torch.no_grad()
    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each sentence. Padding and the begin symbol are never chosen."""
        found: list[Answer] = [Answer((), 0.0) for _ in sources]
        with progress_bar(len(sources), description=f"{self.name}, greedy search") as bar:
            for batch in batches_by_length([len(source) for source in sources], BATCH_TOKENS):
                for index, answer in zip(batch, self._search([sources[index] for index in batch]), strict=True):
                    found[index] = answer
                bar.update(len(batch))
        return found

    def _search(self, sources: list[Ids]) -> list[Answer]:
        tokenizer = self.tokenizer
        source, mask = padded(sources, tokenizer.pad_id)
        limits = mask.sum(1) + self.settings.max_extra_tokens
        limits = limits.clamp(max=self.max_positions) if self.max_positions else limits
        cross_keys, cross_values = self.encode(source, mask)
        keys, values = cross_keys[:, :, :, :0], cross_values[:, :, :, :0]
        last = torch.full([len(sources)], tokenizer.bos_id)
        ended = torch.zeros(len(sources), dtype=torch.bool)
        totals = torch.zeros(len(sources))
        tokens: list[Tensor] = []
        while not bool(ended.all()):
            logits, keys, values = self.step(last, keys, values, cross_keys, cross_values, mask)
            chances = logits.log_softmax(-1)
            chances[:, [tokenizer.pad_id, tokenizer.bos_id]] = float("-inf")
            last = chances.argmax(-1).masked_fill(limits <= len(tokens) + 1, tokenizer.eos_id)
            totals += chances.gather(1, last.unsqueeze(1)).squeeze(1).masked_fill(ended, 0.0)
            tokens.append(last)
            ended |= last == tokenizer.eos_id
        rows = zip(torch.stack(tokens, 1).tolist(), totals.tolist(), strict=True)
        return [Answer(tuple(row[: row.index(tokenizer.eos_id) + 1]), total) for row, total in rows]

    @torch.no_grad()
    def logits(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] for source and target ids [B, S] and [B, T], by teacher forcing.

        Targets start with the begin symbol.
        """
        cross_keys, cross_values = self.encode(source, mask)
        keys, values = cross_keys[:, :, :, :0], cross_values[:, :, :, :0]
        steps = []
        for last in target.unbind(1):
            one, keys, values = self.step(last, keys, values, cross_keys, cross_values, mask)
            steps.append(one)
        return torch.stack(steps, 1)


class CTranslate2Runner:
    """A `ctranslate2/` folder, with the length penalty that comes nearest to the checkpoint's."""

    def __init__(
        self,
        folder: Path,
        compute_type: str,
        tokenizer: Tokenizer,
        settings: DecodingSettings,
        length_penalty: float,
        max_positions: int,
    ) -> None:
        from pipeline.export.ctranslate2_model import require_ctranslate2

        threads = torch.get_num_threads()
        self.translator = require_ctranslate2().Translator(
            str(folder), compute_type=compute_type, inter_threads=1, intra_threads=threads
        )
        self.tokenizer, self.settings, self.length_penalty = tokenizer, settings, length_penalty
        self.max_positions = max_positions
        self.pieces = tokenizer.pieces()

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    def _pieces(self, rows: list[Ids]) -> list[list[str]]:
        return [[self.pieces[i] for i in row] for row in rows]

    def _translate(self, sources: list[Ids], longest: int, **options: Any) -> list[list[Answer]]:
        tokenizer = self.tokenizer
        limit = longest + self.settings.max_extra_tokens
        results = self.translator.translate_batch(
            self._pieces(sources),
            # CTranslate2 does not count the end symbol.
            max_decoding_length=(min(limit, self.max_positions) if self.max_positions else limit) - 1,
            min_decoding_length=0,
            max_batch_size=BATCH_TOKENS,
            batch_type="tokens",
            return_scores=True,
            suppress_sequences=self._pieces([[tokenizer.pad_id], [tokenizer.bos_id]]),
            **options,
        )
        return [
            [
                Answer((*(self._ids[piece] for piece in pieces), tokenizer.eos_id), score)
                for pieces, score in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return the best answer of each sentence."""
        options = {"beam_size": self.settings.beam_size, "length_penalty": self.length_penalty}
        return self._translate(sources, max(map(len, sources)), **options)

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each sentence.

        Sentences of one length are translated together, because a call has one length limit.
        """
        found: dict[int, Answer] = {}
        for length in sorted({len(source) for source in sources}):
            indices = [index for index, source in enumerate(sources) if len(source) == length]
            answers = self._translate([sources[index] for index in indices], length, beam_size=1)
            found |= {index: answer[0] for index, answer in zip(indices, answers, strict=True)}
        return [found[index] for index in range(len(sources))]

    def forced(self, sources: list[Ids], answers: list[Answer]) -> list[float]:
        """Return the log-probability of each answer, including the end symbol."""
        targets = self._pieces([list(answer.tokens[:-1]) for answer in answers])
        return [sum(one.log_probs) for one in self.translator.score_batch(self._pieces(sources), targets)]


class HuggingFaceRunner:
    """A `huggingface/` folder, loaded as its README describes, with the generation settings that it holds."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: DecodingSettings) -> None:
        from pipeline.export.huggingface_model import require_transformers

        transformers = require_transformers()
        self.marian = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()
        self.tokenizer, self.settings = tokenizer, settings

    def encode(self, sentences: list[str], longest: int) -> list[Ids]:
        """Return the ids of each sentence, cut to `longest` tokens, with the end symbol."""
        return self.marian(sentences, truncation=True, max_length=longest)["input_ids"]

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of ids."""
        return self.marian.batch_decode([list(row) for row in ids], skip_special_tokens=True)

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return the best answer of each sentence, without its score."""
        return [[answer] for answer in self._all(sources, "beam search")]

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each sentence, without its score."""
        return self._all(sources, "greedy search", num_beams=1)

    @torch.no_grad()
    def logits(self, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] for source and target ids [B, S] and [B, T], by teacher forcing."""
        return self.model(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target).logits

    def _all(self, sources: list[Ids], kind: str, **options: Any) -> list[Answer]:
        """Search sentences of one length together, because a call has one length limit."""
        tokenizer, found = self.tokenizer, [Answer((), 0.0) for _ in sources]
        with progress_bar(len(sources), description=f"huggingface, {kind}") as bar:
            for length in sorted({len(source) for source in sources}):
                indices = [index for index, source in enumerate(sources) if len(source) == length]
                ids = torch.tensor([sources[index] for index in indices])
                limit = length + self.settings.max_extra_tokens + 1  # the begin symbol counts
                output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_length=limit, **options)
                for index, row in zip(indices, output[:, 1:].tolist(), strict=True):
                    found[index] = Answer(tuple(row[: row.index(tokenizer.eos_id) + 1]), 0.0)
                bar.update(len(indices))
        return found
