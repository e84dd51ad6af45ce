"""Text to text: tokenizer, search, tokenizer; sentences of like length are searched together."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from data_module.errors import InputError
from data_module.tokenization.tokenizer import Tokenizer
from model.cpu.packed_linear import can_pack, pack_linears
from model.decoding import BeamSearch
from model.settings import SHORTEST, DecodingSettings
from model.transformer import Transformer


class Hypothesis(NamedTuple):
    """One answer to a sentence."""

    text: str
    """One line: it never holds a line break."""
    score: float
    """Log-probability over length penalty; 0 for the answer to an empty sentence."""
    log_probability: float
    num_tokens: int
    """Pieces and the end symbol; 0 for the answer to an empty sentence."""


class Translation(NamedTuple):
    """What became of one sentence."""

    hypotheses: list[Hypothesis]
    """The n best, the best first; fewer only where there are no more."""
    num_source_tokens: int
    """Pieces of the whole sentence and the end symbol."""
    truncated: bool
    """It has more pieces than the network has positions for, or than was allowed: the rest was cut."""

    @property
    def text(self) -> str:
        """The best answer."""
        return self.hypotheses[0].text

    @property
    def score(self) -> float:
        """The best answer's score."""
        return self.hypotheses[0].score


LONGEST = 1024
"""The commands cut a sentence to this many tokens: attention's time grows with the square of its length."""
NOTHING = Hypothesis("", 0.0, 0.0, 0)


class Translator:
    """Translates lists of sentences; the answers come in the sentences' order."""

    def __init__(
        self,
        network: Transformer | torch.jit.ScriptModule,
        tokenizer: Tokenizer,
        settings: DecodingSettings,
        *,
        batch_tokens: int = 4096,
        max_source_tokens: int | None = None,
        device: torch.device | str | None = None,
        name: str = "",
        target_language: str = "en",
    ) -> None:
        """Put the network into evaluation mode and, where a device is given, on it.

        Args:
            network: a Transformer, or an exported `BeamSearch`.
            tokenizer: the one that the network was trained with.
            settings: how to search.
            batch_tokens: at most this many padded source tokens are searched at once, and a sixteenth as many
                sentences; a longer sentence alone.
            max_source_tokens: a sentence is cut to this many tokens, with its end symbol; None for as many as
                the network has positions for.
            device: where to search; None for where the network is.
            name: what to call it in reports.
            target_language: what it translates to, as its recipe names it.

        Raises ValueError where the network's and the tokenizer's vocabularies differ in size.
        """
        # Any: what TorchScript has loaded has a search's methods, but no type of its own.
        search: Any = network
        if isinstance(network, Transformer):
            search = BeamSearch(network, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
        if search.vocabulary_size != tokenizer.vocabulary_size:
            raise ValueError(
                f"the network knows {search.vocabulary_size} pieces and the tokenizer "
                f"{tokenizer.vocabulary_size}: they do not belong together"
            )
        if device is not None:
            search = search.to(device)
        self.search = search.eval()
        self.device = next(search.parameters()).device
        self.name, self.target_language = name, target_language
        self.tokenizer, self.settings, self.batch_tokens = tokenizer, settings, batch_tokens
        limits = [limit for limit in (self.search.max_positions, max_source_tokens) if limit]
        self.max_source_tokens: int | None = min(limits, default=None)

    def translate(self, sentences: list[str], n_best: int = 1, *, progress: bool = False) -> list[Translation]:
        """Translate each sentence; one without any piece is not searched and gives an empty answer.

        With `progress`, a bar on standard error counts sentences.

        Raises ValueError where `n_best` or the settings are out of bounds (see `BeamSearch.beam`).
        """
        sources = [[*ids.tolist(), self.tokenizer.eos_id] for ids in self.tokenizer.encode(sentences)]
        found: list[list[Hypothesis]] = [[NOTHING] for _ in sources]
        cut = [source[: self.max_source_tokens] for source in sources]
        for source, kept in zip(sources, cut, strict=True):
            if len(kept) < len(source):
                kept[-1] = self.tokenizer.eos_id
        # A log gets a line every half minute instead of a bar.
        interval = 0.1 if sys.stderr.isatty() else 30.0
        with tqdm(
            total=len(sources),
            desc="translating",
            unit=" sentences",
            delay=2,
            mininterval=interval,
            disable=not progress,
        ) as bar:
            for batch in batches_by_length([len(source) for source in cut], self.batch_tokens):
                for index, hypotheses in zip(batch, self._search([cut[i] for i in batch], n_best), strict=True):
                    found[index] = hypotheses
                bar.update(len(batch))
        return [
            Translation(hypotheses, len(source), len(kept) < len(source))
            for hypotheses, source, kept in zip(found, sources, cut, strict=True)
        ]

    def _search(self, sources: list[list[int]], n_best: int) -> list[list[Hypothesis]]:
        source, is_token = padded(sources, self.tokenizer.pad_id)
        mask = None if bool(is_token.all()) else is_token.to(self.device)
        settings = self.settings
        # A little faster than without gradients alone, which is all that TorchScript knows.
        with torch.inference_mode():
            answers = self.search.beam(
                source.to(self.device),
                mask,
                settings.beam_size,
                settings.length_penalty,
                settings.max_extra_tokens,
                n_best,
            )
        tokens, lengths, scores, log_probabilities = (one.flatten(0, 1).tolist() for one in answers)
        texts = self.tokenizer.decode([row[: length - 1] for row, length in zip(tokens, lengths, strict=True)])
        hypotheses = [
            # Line breaks of every kind, as `str.splitlines` knows them.
            Hypothesis(" ".join(text.splitlines()), score, log_probability, length)
            for text, score, log_probability, length in zip(texts, scores, log_probabilities, lengths, strict=True)
        ]
        return [
            # Length 0 stands for an answer that does not exist.
            [one for one in hypotheses[start : start + n_best] if one.num_tokens]
            for start in range(0, len(hypotheses), n_best)
        ]


def load_translator(checkpoint: Path, beam_size: int | None, length_penalty: float | None) -> Translator:
    """A checkpoint's translator, on the GPU if there is one; None stands for what its recipe says.

    Raises InputError where there is no checkpoint or it cannot be read, or a setting is out of bounds.
    """
    # Only the commands need files; whoever has a network does not.
    from pipeline.checkpointing.checkpoint import load_model, resolve_checkpoint

    path = resolve_checkpoint(checkpoint)
    print(f"translating with {path}", file=sys.stderr)
    model = load_model(path)
    settings = search_settings(model.decoding, beam_size, length_penalty)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and can_pack(model.network):
        pack_linears(model.network)
    return Translator(
        model.network,
        model.tokenizer,
        settings,
        max_source_tokens=LONGEST,
        device=device,
        name=str(path),
        target_language=model.recipe["corpus"]["target_language"],
    )


def search_settings(recipe: DecodingSettings, beam_size: int | None, length_penalty: float | None) -> DecodingSettings:
    """The recipe's, but for what the command line gives.

    Raises InputError where that is out of bounds.
    """
    if beam_size is not None:
        if beam_size < 1:
            raise InputError(f"--beam {beam_size}: must be 1 or more")
        recipe = replace(recipe, beam_size=beam_size)
    if length_penalty is not None:
        if not 0.0 <= length_penalty < float("inf"):
            raise InputError(f"--length-penalty {length_penalty}: must be 0 or more")
        recipe = replace(recipe, length_penalty=length_penalty)
    return recipe


def padded(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids [B, S], and a mask [B, S] that is False where they are padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    return ids, torch.arange(longest) < torch.tensor([len(row) for row in rows]).unsqueeze(1)


def batches_by_length(lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of sentences to search together, the longest sentences first, for they take the most memory.

    A batch ends where one more would exceed `batch_tokens` padded cells, and where the length changes once it
    is half full: sentences of one length need no mask. Short sentences count as `SHORTEST` tokens, so no batch has
    more than batch_tokens / SHORTEST. Sentences of one token, the end symbol, are left out.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if lengths[index] <= 1:
            break
        if batch:
            longest = max(lengths[batch[0]], SHORTEST)
            is_full = longest * (len(batch) + 1) > batch_tokens
            is_half_full = longest * len(batch) * 2 >= batch_tokens
            if is_full or (is_half_full and lengths[index] < lengths[batch[-1]]):
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch
