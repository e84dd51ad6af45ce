"""Translation of text, in batches of sentences of similar length."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data_module.batch import GPU_BATCH_TOKENS, length_batches
from data_module.errors import InputError
from data_module.system.files import PlainValues
from data_module.system.text_files import progress_bar
from data_module.tokenization.tokenizer import Tokenizer
from model.decoding import BeamArguments, BeamSearch
from model.fast.compiled_search import CompiledSearch
from model.settings import DecodingSettings
from model.transformer import Transformer
from pipeline.inference.options import BY_RECIPE, Prefixes, SearchOptions
from pipeline.inference.pieces import encode_sources, encode_target_prefixes
from pipeline.inference.text_io import Defects


def padded(sentences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return padded ids [B, S] and a mask [B, S] that is False at padding."""
    longest = max(map(len, sentences))
    padded_ids = torch.tensor([[*ids, *[pad_id] * (longest - len(ids))] for ids in sentences])
    return padded_ids, torch.arange(longest) < torch.tensor([len(ids) for ids in sentences]).unsqueeze(1)


class Hypothesis(NamedTuple):
    """One translation of a sentence."""

    text: str
    """The translation, without line breaks."""
    score: float
    """Log-probability divided by the length penalty; 0 for an empty sentence."""
    log_probability: float
    num_tokens: int
    """Number of pieces, including the end symbol; 0 for an empty sentence."""


class Translation(NamedTuple):
    """The result for one sentence."""

    hypotheses: list[Hypothesis]
    """The n best hypotheses, best first; fewer if the search found fewer."""
    defects: Defects = Defects()
    """How the model's reading of the sentence differs from what is written."""
    ids: tuple[int, ...] = ()
    """Ids of the pieces of the best hypothesis, as the search chose them, with the end symbol."""

    @property
    def text(self) -> str:
        """Text of the best hypothesis."""
        return self.hypotheses[0].text


SEARCHED = 2048
"""Maximum number of sentences in a call of a compiled search; each thread decodes a few of them at a time."""
BATCH_TOKENS = 4096
"""Upper bound on the padded source tokens that any other search on a CPU decodes at the same time."""
_GPU_BYTES = 2_500_000
"""Memory of a GPU for each source token, with a beam of 4: three times what the big model takes in float32."""
LONGEST = 1024
"""Limit on the tokens of a source; the time of attention grows with the square of the length."""
EMPTY = Hypothesis("", 0.0, 0.0, 0)


class Translator:
    """Translates lists of sentences and returns translations in the same order."""

    def __init__(
        self,
        network: Transformer | CompiledSearch | torch.jit.ScriptModule,
        tokenizer: Tokenizer,
        settings: DecodingSettings,
        *,
        device: str = "cpu",
        name: str = "",
        recipe: PlainValues | None = None,
    ) -> None:
        """Put the network into evaluation mode and move it to `device`.

        Args:
            network: a Transformer, its `CompiledSearch`, or an exported `BeamSearch`.
            device: device to search on. A `CompiledSearch` is on the CPU.
            recipe: the recipe that the network was trained with, if it is known; it names the prefixes.
        """
        # Any: a loaded TorchScript module has the methods of BeamSearch but not its type.
        search: Any = network
        if isinstance(network, Transformer):
            search = BeamSearch(network, *tokenizer.search_ids)
        if isinstance(search, torch.nn.Module):
            search.eval().to(device)
        self.search: Any = search
        self.device = torch.device(device)
        if self.device.type == "cuda":  # See `TranslationModule.on_fit_start`.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.name, self.recipe = name, recipe or {}
        self.prefixes = Prefixes.of_corpus(recipe["corpus"]) if recipe else Prefixes()
        self.tokenizer, self.settings = tokenizer, settings
        self.max_source_tokens = min(self.search.max_positions or LONGEST, LONGEST)
        """Longer sentences are cut to this many tokens, including the end symbol."""

    def translate(
        self,
        sentences: list[str],
        options: SearchOptions = BY_RECIPE,
        first: int = 1,
        *,
        target_prefixes: list[str] | None = None,
        finished: Callable[[int], object] = lambda count: None,
    ) -> list[Translation]:
        """Translate sentences. A sentence without pieces gets an empty translation.

        Args:
            first: number of the first sentence in its text, on which samples depend.
            target_prefixes: for each sentence, the text that its translation begins with; None if there are none.
            finished: called with a number of sentences whenever some have been translated.

        Raises InputError if more translations of a sentence are asked for than the beam has, a target prefix is too
        long or has an unknown character, the model is a bundle that cannot do what is asked, or its weights are not
        finite.
        """
        settings = options.in_place_of(self.settings)
        sources, defects = encode_sources(self.tokenizer, sentences, self.max_source_tokens, self.prefixes)
        prefixes = self._prefix_ids(target_prefixes, sources, settings.max_extra_tokens, first)
        results: list[tuple[list[Hypothesis], tuple[int, ...]]] = [([EMPTY], ()) for _ in sources]
        for batch in self._batches([len(source) for source in sources], settings.beam_size):
            lines = [first + i for i in batch]
            begins = [prefixes[i] for i in batch] if prefixes else []
            answers = self._search([sources[i] for i in batch], lines, options, settings, begins, finished)
            for index, answer in zip(batch, answers, strict=True):
                results[index] = answer
        return [Translation(found, wrong, ids) for (found, ids), wrong in zip(results, defects, strict=True)]

    def _batches(self, lengths: list[int], beam_size: int) -> Iterator[list[int]]:
        """Return the batches of sources of these lengths that are searched at the same time."""
        if isinstance(self.search, CompiledSearch):
            return length_batches(lengths, math.inf, SEARCHED)
        if self.device.type != "cuda":
            return length_batches(lengths, BATCH_TOKENS)
        room = torch.cuda.get_device_properties(self.device).total_memory // _GPU_BYTES
        tokens = min(GPU_BATCH_TOKENS, room) * 4 // max(4, beam_size)
        return length_batches(lengths, max(BATCH_TOKENS, tokens), avoids_masks=False)

    def _prefix_ids(
        self, target_prefixes: list[str] | None, sources: list[list[int]], extra: int, first: int
    ) -> list[list[int]]:
        """Return the ids of the target prefixes; raise InputError for one that no translation can begin with."""
        if target_prefixes is None:
            return []
        rows = encode_target_prefixes(self.tokenizer, target_prefixes, first)
        for number, (ids, source) in enumerate(zip(rows, sources, strict=True), first):
            limit = min(len(source) + extra, self.search.max_positions or math.inf)
            if len(source) > 1 and len(ids) >= limit:
                raise InputError(
                    f"target prefix of line {number}: has {len(ids)} pieces, and a translation of this line at most "
                    f"{limit - 1}; shorten it"
                )
        return rows

    def translate_lines(
        self,
        lines: Iterable[str],
        chunk: int,
        options: SearchOptions = BY_RECIPE,
        first: int = 1,
        *,
        target_prefixes: Iterator[str] | None = None,
        total: int | None = None,
        show: bool = True,
    ) -> Iterator[Translation]:
        """Translate lines in order, `chunk` lines at a time.

        Args:
            lines: source lines. An error of this iterator is raised after the translations of the chunks before it.
            target_prefixes: see `translate`; there may be more of them than lines.
            total: number of lines, if it is known, for the time left.
            show: whether to show a progress bar.
        """
        remaining, num_tokens = iter(lines), 0
        with progress_bar("translating", total, show=show) as bar:
            while batch := list(islice(remaining, chunk)):
                done = bar.n
                given = None if target_prefixes is None else list(islice(target_prefixes, len(batch)))
                translations = self.translate(batch, options, first, target_prefixes=given, finished=bar.update)
                bar.update(done + len(batch) - bar.n)
                first += len(batch)
                num_tokens += sum(translation.hypotheses[0].num_tokens for translation in translations)
                rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                yield from translations

    def _search(
        self,
        sources: list[list[int]],
        lines: list[int],
        options: SearchOptions,
        settings: DecodingSettings,
        target_prefixes: list[list[int]],
        finished: Callable[[int], object],
    ) -> list[tuple[list[Hypothesis], tuple[int, ...]]]:
        """Return each sentence's hypotheses and the ids of the first one."""
        source, is_token = padded(sources, self.tokenizer.pad_id)
        mask = None if bool(is_token.all()) else is_token.to(self.device)
        given, n_best, sampling = (source.to(self.device), mask), options.n_best, options.sampling
        numbers = None if sampling is None else torch.tensor(lines, device=self.device)
        size, penalty, extra = settings.beam_size, settings.length_penalty, settings.max_extra_tokens
        prefix = None
        if any(target_prefixes):
            prefix = padded(target_prefixes, self.tokenizer.pad_id)[0].to(self.device)
            # Only a bundle's search, which is in TorchScript, has a schema.
            if "target_prefix" not in str(getattr(self.search.beam, "schema", "target_prefix")):
                raise InputError(f"{self.name}: was exported by a version without target prefixes; export it again")
        if isinstance(self.search, CompiledSearch):
            arguments = BeamArguments(size, penalty, extra, n_best, settings.stop_rule == "first", sampling)
            if sampling is not None:
                arguments = arguments._replace(beam_size=1)
            answers, _ = self.search.search(*given, arguments, numbers, prefix, finished)
        else:
            prefix_argument = () if prefix is None else (prefix,)  # which older bundles do not take
            with torch.inference_mode():  # a little faster than torch.no_grad
                if sampling is None:
                    beam = size, penalty, extra, n_best, settings.stop_rule
                    answers = self.search.beam(*given, *beam, *prefix_argument)
                else:
                    answers = self.search.sample(*given, numbers, sampling, extra, penalty, *prefix_argument)
            finished(len(sources))
        tokens, lengths, scores, log_probabilities = (result.flatten(0, 1).tolist() for result in answers)
        ids = [tuple(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
        texts = self.tokenizer.decode([row[:-1] for row in ids])
        hypotheses = [
            # `splitlines` also knows line breaks other than the line feed.
            Hypothesis(" ".join(text.splitlines()), score, log_probability, length)
            for text, score, log_probability, length in zip(texts, scores, log_probabilities, lengths, strict=True)
        ]
        results = [
            # A length of 0 marks a hypothesis that does not exist.
            ([one for one in hypotheses[start : start + options.n_best] if one.num_tokens], ids[start])
            for start in range(0, len(hypotheses), options.n_best)
        ]
        if not all(found for found, _ in results):
            raise InputError(f"{self.name}: its scores are not finite; choose a checkpoint with finite weights")
        return results
