"""The stages of preparation: count words, train the tokenizer, encode and write the splits.

Text is processed in chunks of about a megabyte, so that memory use does not grow with the corpus.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_module.corpus.checks import TextChecker
from data_module.corpus.manifest import (
    FORMAT,
    Manifest,
    Origin,
    SourcePairs,
    SplitAccount,
    TrainAccount,
    source_names,
    write_manifest,
)
from data_module.corpus.noise import CASINGS, with_casing
from data_module.corpus.pairs import ALSO_IN, PairChunk, PairFilter, Reason, max_characters, read_pairs
from data_module.corpus.store import (
    TokenStore,
    TokenStoreWriter,
    hash_pairs,
    store_prefix,
    token_counts,
    token_type,
)
from data_module.corpus.variants import VariantText, write_variants
from data_module.settings import CorpusSettings, NoiseSettings, TextSource
from data_module.system.files import FORMAT_VERSION
from data_module.system.text_files import progress_bar
from data_module.tokenization.encoders import WordEncoder
from data_module.tokenization.tokenizer import TOKENIZER_NAME, UNK_ID, Tokenizer
from data_module.tokenization.training import WordCounts, train_on_words

log = logging.getLogger(__name__)

_MARKED_TOKENS = 2**22
"""Tokens that are read at once to find out which pieces occur; their indices take 32 MB."""
_MAX_UNKNOWN = 0.05
"""Fraction of unknown pieces above which the text is probably in another script or language."""


def learn_tokenizer(settings: CorpusSettings, checked: TextChecker, progress: bool) -> Tokenizer:
    """Train the tokenizer on a seeded sample of the training text.

    Raises InputError as `read_pairs` and `train_on_words` do, or if no pair is left.
    """
    words = count_words(settings, checked, progress)
    with progress_bar("training the tokenizer", unit="", show=progress):
        return Tokenizer(train_on_words(words, settings))


def add_casings(words: WordCounts, noise: NoiseSettings, protected: frozenset[str] = frozenset()) -> None:
    """Move part of each word's count to its casings in `corpus.noise`, as often as an epoch is expected to have them.

    Otherwise upper-case words would be spelled in single letters: they would take several times as many tokens, and
    what a model has learned of other words' pieces would not help with them. Words that contain one of the `protected`
    user symbols have no other casing.
    """
    shares = [(kind, getattr(noise, kind)) for kind in CASINGS if getattr(noise, kind) > 0.0]
    if not shares:
        return
    counts = words.counts
    for word, count in list(counts.items()):
        low = 0.0
        for kind, share in shares:
            # All casings together get at most `count`.
            expected = round(count * min(low + share, 1.0)) - round(count * low)
            low += share
            changed = with_casing(word, kind, protected)
            if expected and changed != word:
                counts[changed] += expected
                counts[word] -= expected
                words.add_characters(changed)


def write_corpus(
    settings: CorpusSettings, tokenizer: Tokenizer, inputs: Origin, checked: TextChecker, folder: Path, progress: bool
) -> Manifest:
    """Clean, encode and write all pairs to an empty folder; return the manifest, of which `inputs` is a part.

    Raises InputError as `read_pairs` does, or if a split keeps no pair.
    """
    dtype = token_type(tokenizer.vocabulary_size)
    source_encoder = target_encoder = WordEncoder(tokenizer, dtype)
    if tokenizer.target is not tokenizer:
        target_encoder = WordEncoder(tokenizer.target, dtype)
    encoders = source_encoder, target_encoder
    validation = _write_validation(settings, encoders, folder, progress)
    with VariantText(folder) if settings.is_varied() else nullcontext() as text:
        train = _write_train(settings, encoders, checked, text, folder, progress)
        if text is not None:
            with progress_bar(
                "encoding variants", settings.variants * train["pairs_kept"], unit="pairs", show=progress
            ) as bar:
                variants = write_variants(folder, text, tokenizer, settings, bar.update)
            train = {**train, **variants[0], "variants": variants}
    Tokenizer(tokenizer.model, seen=_seen_pieces(folder, settings, tokenizer)).save(folder / TOKENIZER_NAME)
    manifest: Manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **inputs,
        "tokenizer": {"sha256": tokenizer.sha256, "vocabulary_size": tokenizer.vocabulary_size},
        "token_type": dtype.name,
        "training_pairs": hash_pairs(folder, settings.variants),
        "text_form": checked.text_form(),
        "train": train,
        "validation": validation,
        "files": {},
    }
    write_manifest(folder, manifest)
    return manifest


def _seen_pieces(folder: Path, settings: CorpusSettings, tokenizer: Tokenizer) -> bytes:
    """Return on which sides of the written training text each piece occurs, as `Tokenizer` stores it."""
    seen = np.zeros((2, tokenizer.vocabulary_size), dtype=bool)
    for in_side, side in zip(seen, ("source", "target"), strict=True):
        for variant in range(settings.variants):
            tokens = TokenStore(store_prefix(folder, "train", side, variant)).tokens
            for start in range(0, len(tokens), _MARKED_TOKENS):
                in_side[tokens[start : start + _MARKED_TOKENS]] = True
    return (seen[0] + 2 * seen[1]).astype(np.uint8).tobytes()


def count_words(settings: CorpusSettings, checked: TextChecker, progress: bool) -> WordCounts:
    """Count the words of a seeded uniform sample of `tokenizer_sentences` sentences, or of all if there are fewer.

    Both sides of a pair are sampled together. Pairs that are certain to be dropped are left out. The words of a
    repeated source count as often as it is repeated, whatever its weight, which may change after preparation. Prefixes
    are left out: they are pieces of their own.
    """
    checked.check_not_empty()
    train = checked.found["train"]
    random = np.random.default_rng(settings.seed)
    remaining = sum(int(source.kept.sum()) for source in train)
    wanted = min(remaining, settings.tokenizer_sentences // 2)
    words = WordCounts()
    words.add_characters("".join(set().union(*(source.characters for source in train))))
    chunks = (
        (text, source, chunk)
        for text, source in zip(settings.train, train, strict=True)
        for chunk in read_pairs(replace(text, prefix=None), settings)
    )
    num_pairs = sum(source.num_pairs for source in train)
    with progress_bar("reading text", num_pairs, unit="pairs", show=progress) as bar:
        for text, source, chunk in chunks:
            size, first = len(chunk.source), chunk.first_line - 1
            kept = np.flatnonzero(source.kept[first : first + size])
            # The number of sampled pairs in this chunk is hypergeometric: a uniform sample in one pass.
            take = int(random.hypergeometric(wanted, remaining - wanted, len(kept)))
            chosen = np.sort(random.choice(kept, take, replace=False)).tolist()
            for side in (chunk.source, chunk.target):
                words.add("\n".join([side[i] for i in chosen] if take < size else side), text.repeat)
            remaining -= len(kept)
            wanted -= take
            bar.update(size)
    if not settings.lowercase:
        add_casings(words, settings.noise, frozenset(settings.user_symbols))
    return words


def _write_validation(
    settings: CorpusSettings, encoders: tuple[WordEncoder, WordEncoder], folder: Path, progress: bool
) -> SplitAccount:
    """Write the validation stores and text files."""
    with ExitStack() as stack:
        split = stack.enter_context(_SplitWriter("validation", settings, encoders, PairFilter(settings), folder))
        texts = [
            stack.enter_context((folder / f"validation.{side}.txt").open("w", encoding="utf-8", newline="\n"))
            for side in ("source", "target")
        ]
        bar = stack.enter_context(progress_bar("encoding validation", unit="", show=progress))
        for text in settings.validation:
            pairs = list(chain.from_iterable(split.add(text, bar)))
            for file, lines in zip(texts, zip(*pairs, strict=True), strict=False):
                file.writelines(f"{line}\n" for line in lines * text.repeat)
    account = split.account(settings.validation)
    if too_long := account["pairs_dropped"][Reason.TOO_LONG]["pairs"]:
        log.warning(
            "%d validation pairs are longer than corpus.max_tokens (%d) and were dropped: BLEU excludes them",
            too_long,
            settings.max_tokens,
        )
    return account


def _write_train(
    settings: CorpusSettings,
    encoders: tuple[WordEncoder, WordEncoder],
    checked: TextChecker,
    variant_text: VariantText | None,
    folder: Path,
    progress: bool,
) -> TrainAccount:
    """Write the training stores, plainly encoded, and add the text of the pairs to `variant_text`."""
    pair_filter = PairFilter(settings, checked.held_out)
    num_pairs = sum(source.num_pairs for source in checked.found["train"])
    with (
        _SplitWriter("train", settings, encoders, pair_filter, folder) as split,
        progress_bar("encoding", num_pairs, unit="pairs", show=progress) as bar,
    ):
        for text in settings.train:
            for pairs in split.add(text, bar):
                if variant_text is not None:
                    variant_text.append(pairs)
            if variant_text is not None:
                variant_text.end_source(text.repeat)
    for held_out_split, key in ALSO_IN.items():
        if count := pair_filter.counts[key]:
            log.warning(
                "%d training pairs also occur in the %s text%s",
                count,
                held_out_split,
                " and were dropped" if settings.drop_overlap else "; corpus.drop_overlap: true drops them",
            )
    return {**split.account(settings.train), "variants": [token_counts(*split.writers)]}


class _SplitWriter(AbstractContextManager["_SplitWriter"]):
    """Writes the two stores of a split, source by source. It is a context manager that completes the stores."""

    def __init__(
        self,
        name: str,
        settings: CorpusSettings,
        encoders: tuple[WordEncoder, WordEncoder],
        pair_filter: PairFilter,
        folder: Path,
    ) -> None:
        self.pair_filter = pair_filter
        self.writers = [
            TokenStoreWriter(store_prefix(folder, name, side), encoders[0].dtype) for side in ("source", "target")
        ]
        self._name, self._settings, self._encoders = name, settings, encoders
        self._num_pairs: list[int] = []
        self._unknown = 0
        self._unknown_words, self._first_unknown = 0, ""

    def add(self, text: TextSource, bar: tqdm) -> Iterator[list[tuple[str, str]]]:
        """Read a source once and write its pairs, as often as it is repeated; yield the pairs that were kept."""
        start = len(self.writers[0])
        for chunk in read_pairs(text, self._settings):
            sides = chunk.source, chunk.target
            encoded = [_encode(*one, self._settings) for one in zip(self._encoders, sides, strict=True)]
            kept = self.pair_filter.keep(chunk, encoded[0][1], encoded[1][1], text.repeat)
            indices = kept.tolist()
            for side, (writer, (ids, lengths)) in enumerate(zip(self.writers, encoded, strict=True)):
                flat = np.frombuffer(b"".join([ids[i] for i in indices]), dtype=writer.dtype)
                writer.append_flat(flat, lengths[kept])
                if (unknown := np.flatnonzero(flat == UNK_ID)).size:
                    self._unknown += unknown.size
                    places = kept[np.unique(np.searchsorted(lengths[kept].cumsum(), unknown, side="right"))]
                    self._count_unknown_words(chunk, side, places.tolist())
            yield [(chunk.source[i], chunk.target[i]) for i in indices]
            bar.update(len(chunk.source))
        self._num_pairs.append(len(self.writers[0]) - start)
        for writer in self.writers:
            writer.repeat_from(start, text.repeat - 1)

    def _count_unknown_words(self, chunk: PairChunk, side: int, places: list[int]) -> None:
        """Count the words without a piece in these sentences of one side, where words are pieces."""
        if self._settings.model_type != "word":
            return
        split = [(chunk.source, chunk.target)[side][place].split(" ") for place in places]
        counts = Counter(chain.from_iterable(split))
        encoded = self._encoders[side].tokenizer.encode_cleaned(list(counts))
        unknown = {word for word, ids in zip(counts, encoded, strict=True) if UNK_ID in ids}
        self._unknown_words += sum(counts[word] for word in unknown)
        word = next(word for word in split[0] if word in unknown)
        self._first_unknown = self._first_unknown or f"{word!r} ({chunk.names[side]}:{chunk.first_line + places[0]})"

    def account(self, texts: list[TextSource]) -> SplitAccount:
        """Return the manifest's entry about the split, which has the pairs of `texts`, and warn of unknown text.

        The entry lists sources in the order of their pairs in the stores. The `pairs` kept pairs of a source are
        contiguous, and are stored `repeat` times.

        Raises InputError if no pair is left.
        """
        self.pair_filter.check_not_empty(self._name)
        # Repetitions count in the number of pieces but not in `_unknown`, so the fraction may only be too low.
        fraction = self._unknown / max(1, sum(writer.num_tokens for writer in self.writers))
        if self._unknown_words and self._name == "train":
            log.warning(
                "corpus.vocabulary_size %d: %s tokens of the training text have no piece and are unknown to the model;"
                " the first is %s",
                self._settings.vocabulary_size,
                f"{self._unknown_words:,}",
                self._first_unknown,
            )
        elif fraction > _MAX_UNKNOWN:
            log.warning(
                "%.0f %% of the %s text's pieces are unknown to the tokenizer: compare the language and the normal form"
                " (NFC, NFD) of this text with those of the text that the tokenizer was trained on (with"
                " corpus.tokenizer or --init-from: elsewhere)",
                100 * fraction,
                "training" if self._name == "train" else self._name,
            )
        sources: list[SourcePairs] = [
            {"name": name, "pairs": count, "repeat": text.repeat}
            for name, count, text in zip(source_names(texts), self._num_pairs, texts, strict=True)
        ]
        return {**self.pair_filter.counts, "sources": sources, **token_counts(*self.writers)}

    def __exit__(self, *_: object) -> None:
        for writer in self.writers:
            writer.close()


def _encode(encoder: WordEncoder, sentences: list[str], settings: CorpusSettings) -> tuple[list[bytes], np.ndarray]:
    # Encoding a line of megabytes would be slow.
    longest = max_characters(settings)
    too_long = [i for i, sentence in enumerate(sentences) if len(sentence) > longest]
    if too_long:
        sentences = ["" if len(sentence) > longest else sentence for sentence in sentences]
    ids, lengths = encoder.encode(sentences)
    lengths[too_long] = settings.max_tokens + 1
    return ids, lengths
