"""Runners that translate ids with each format of a bundle, so that their answers can be compared."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_module.tokenization.tokenizer import Tokenizer
from model.settings import DecodingSettings
from pipeline.inference.text_io import progress_bar
from pipeline.inference.translator import LONGEST, length_batches, padded, score_pairs

BATCH_TOKENS = 4096
Ids = list[int]


class Answer(NamedTuple):
    """One translation of a sentence, as ids."""

    tokens: tuple[int, ...]
    """Token ids, including the end symbol."""
    score: float
    """Log-probability divided by the length penalty; the log-probability for greedy search."""


class Runner:
    """A loaded format. Sources are ids with the end symbol."""

    own_beam = False
    """Whether its beam search has this project's rules, so that it has to find what the checkpoint's search finds."""
    has_beam = True

    def __init__(self, tokenizer: Tokenizer, settings: DecodingSettings, name: str) -> None:
        """`name` says in the progress bar which format this is."""
        self.tokenizer, self.settings, self.name = tokenizer, settings, name

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source, with the log-probability that it has in this format."""
        raise NotImplementedError

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return hypotheses of each source, best first; greedy answers if the format has no beam search."""
        return [[answer] for answer in self.greedy(sources)]

    def different_texts(self, texts: list[str], sources: list[Ids], answers: list[Ids]) -> dict[str, int]:
        """Return how many texts and answers the format's own tokenizer, if it has one, maps otherwise than ours."""
        return {}

    def _all(
        self, sources: list[Ids], search: Callable[[list[Ids]], list[Any]], kind: str, one_length: bool = False
    ) -> list[Any]:
        """Return what `search` returns for each source.

        With `one_length`, it is called with sources of one length, because it limits all its answers to one length.
        """
        lengths = [len(source) for source in sources]
        batches: Iterable[list[int]] = length_batches(lengths, BATCH_TOKENS)
        if one_length:
            batches = ([i for i, one in enumerate(lengths) if one == length] for length in sorted(set(lengths)))
        found: list[Any] = [None] * len(sources)
        with progress_bar(len(sources), description=f"{self.name}, {kind} search") as bar:
            for batch in batches:
                for index, answer in zip(batch, search([sources[index] for index in batch]), strict=True):
                    found[index] = answer
                bar.update(len(batch))
        return found


class SearchRunner(Runner):
    """A `BeamSearch`, the checkpoint's or one loaded from TorchScript, or a `CompiledSearch`."""

    own_beam = True

    def __init__(self, search: Any, tokenizer: Tokenizer, settings: DecodingSettings, name: str) -> None:
        super().__init__(tokenizer, settings, name)
        self.search = search

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return all hypotheses of the final beam, best first."""
        settings = self.settings
        options = (settings.beam_size, settings.length_penalty, settings.max_extra_tokens, settings.beam_size)
        return self._search(sources, "beam", lambda *batch: self.search.beam(*batch, *options)[:3])

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source."""

        def search(*batch: Tensor | None) -> tuple[Tensor, ...]:
            return tuple(one.unsqueeze(1) for one in self.search.greedy(*batch, self.settings.max_extra_tokens))

        return [answers[0] for answers in self._search(sources, "greedy", search)]

    def _search(self, sources: list[Ids], kind: str, search: Callable[..., tuple[Tensor, ...]]) -> list[list[Answer]]:
        def answers(batch: list[Ids]) -> list[list[Answer]]:
            source, mask = padded(batch, self.tokenizer.pad_id)
            found = search(source, None if bool(mask.all()) else mask)
            return [
                [Answer(tuple(tokens[:length]), score) for tokens, length, score in zip(*rows, strict=True) if length]
                for rows in zip(*(one.tolist() for one in found), strict=True)
            ]

        return self._all(sources, answers, kind)


class ProgramRunner(Runner):
    """The programs of `model.pt2` or `onnx/` with a greedy decoding loop over batches."""

    has_beam = False

    def __init__(
        self,
        programs: dict[str, Callable[..., Any]],
        tokenizer: Tokenizer,
        settings: DecodingSettings,
        max_positions: int,
        name: str,
    ) -> None:
        """`programs` has `encode` and `step`; `max_positions` is 0 for no limit."""
        super().__init__(tokenizer, settings, name)
        self.encode, self.step, self.max_positions = programs["encode"], programs["step"], max_positions

    @torch.no_grad()
    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source. Padding and the begin symbol are never chosen."""
        return self._all(sources, self._search, "greedy")

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


class CTranslate2Runner(Runner):
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

        super().__init__(tokenizer, settings, folder.name)
        self.translator = require_ctranslate2().Translator(
            str(folder), compute_type=compute_type, inter_threads=1, intra_threads=torch.get_num_threads()
        )
        self.length_penalty, self.max_positions = length_penalty, max_positions
        self.pieces = tokenizer.pieces()
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return the best answer of each source, with its score by CTranslate2's formula."""
        options = {"beam_size": self.settings.beam_size, "length_penalty": self.length_penalty}
        return [[answer] for answer in self._translate(sources, **options)]

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source, with its log-probability by teacher forcing."""
        answers = self._all(sources, lambda batch: self._translate(batch, beam_size=1), "greedy", one_length=True)
        # CTranslate2 adds the end symbol itself.
        targets = self._pieces([list(answer.tokens[:-1]) for answer in answers])
        forced = self.translator.score_batch(
            self._pieces(sources), targets, max_batch_size=BATCH_TOKENS, batch_type="tokens", max_input_length=0
        )
        return [Answer(one.tokens, sum(found.log_probs)) for one, found in zip(answers, forced, strict=True)]

    def _translate(self, sources: list[Ids], **options: Any) -> list[Answer]:
        tokenizer = self.tokenizer
        limit = max(map(len, sources)) + self.settings.max_extra_tokens
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
            Answer((*(self.ids[piece] for piece in result.hypotheses[0]), tokenizer.eos_id), result.scores[0])
            for result in results
        ]

    def _pieces(self, rows: list[Ids]) -> list[list[str]]:
        return [[self.pieces[i] for i in row] for row in rows]


class HuggingFaceRunner(Runner):
    """A `huggingface/` folder, loaded as its README describes, with the generation settings that it holds."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: DecodingSettings) -> None:
        from pipeline.export.huggingface_model import require_transformers

        super().__init__(tokenizer, settings, folder.name)
        transformers = require_transformers()
        self.marian = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()

    def beam(self, sources: list[Ids]) -> list[list[Answer]]:
        """Return the best answer of each source, without its score."""
        return [[Answer(tokens, 0.0)] for tokens in self._generate(sources, "beam")]

    def greedy(self, sources: list[Ids]) -> list[Answer]:
        """Return the greedy answer of each source, with its log-probability by teacher forcing."""

        def logits(source: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
            return self.model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits

        answers = self._generate(sources, "greedy", num_beams=1)
        totals = score_pairs(logits, lambda rows: rows.log_softmax(-1), self.tokenizer, sources, answers)
        return [Answer(tokens, total) for tokens, total in zip(answers, totals, strict=True)]

    def different_texts(self, texts: list[str], sources: list[Ids], answers: list[Ids]) -> dict[str, int]:
        """Compare the ids of texts and the texts of answers with those of this project's tokenizer."""
        encoded = self.marian(texts, truncation=True, max_length=LONGEST)["input_ids"]
        decoded = self.marian.batch_decode(answers, skip_special_tokens=True)
        # Transformers leaves no white space at the end of a text.
        expected = [text.strip() for text in self.tokenizer.decode(answers)]
        return {
            "tokenizer_sources_different": sum(one != other for one, other in zip(encoded, sources, strict=True)),
            "tokenizer_answers_different": sum(one != other for one, other in zip(decoded, expected, strict=True)),
        }

    def _generate(self, sources: list[Ids], kind: str, **options: Any) -> list[tuple[int, ...]]:
        def search(batch: list[Ids]) -> list[tuple[int, ...]]:
            ids = torch.tensor(batch)
            limit = ids.size(1) + self.settings.max_extra_tokens + 1  # the begin symbol counts
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_length=limit, **options)
            return [tuple(row[: row.index(self.tokenizer.eos_id) + 1]) for row in output[:, 1:].tolist()]

        return self._all(sources, search, kind, one_length=True)
