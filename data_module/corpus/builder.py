"""The work of preparation: count words, train the tokenizer, encode and write the splits.

Text goes through in chunks of a megabyte, one at a time: memory does not grow with the corpus.
"""

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_module.corpus.manifest import FORMAT, FORMAT_VERSION, TOKENIZER_NAME, write_manifest
from data_module.corpus.pair_filter import HeldOutPairs, PairFilter, Reason
from data_module.corpus.store import TokenStoreWriter, store_prefix, token_type
from data_module.errors import InputError
from data_module.readers.pairs import read_pairs
from data_module.settings import CorpusSettings, TextSource
from data_module.tokenization.tokenizer import MAX_PIECE_CHARACTERS, UNK_ID, Tokenizer, train_on_words
from data_module.tokenization.word_counts import WordCounts
from data_module.tokenization.word_encoder import WordEncoder

log = logging.getLogger(__name__)

_UNKNOWN_SHARE = 0.05
"""Of a text's pieces; more of them are no few odd characters, but another script or another language."""


def learn_tokenizer(settings: CorpusSettings, num_pairs: list[int], progress: bool) -> Tokenizer:
    """Train the tokenizer on a seeded sample; `num_pairs` are the pairs of each training source, read once.

    Raises:
        InputError: see `read_pairs` and `train_on_words`.
    """
    return Tokenizer(_train_tokenizer(settings, _count_words(settings, num_pairs, progress), progress))


def write_corpus(
    settings: CorpusSettings,
    tokenizer: Tokenizer,
    made_of: dict[str, Any],
    num_pairs: list[int],
    folder: Path,
    progress: bool,
) -> dict[str, Any]:
    """Clean, encode and write all pairs into an empty folder, and return its manifest.

    `made_of` goes into the manifest as it is.

    Raises:
        InputError: see `read_pairs`; or a split keeps no pair.
    """
    (folder / TOKENIZER_NAME).write_bytes(tokenizer.model)
    encoder = WordEncoder(tokenizer, token_type(tokenizer.vocabulary_size))
    # Known first, because training pairs are compared with them.
    held_out = HeldOutPairs(validation=set(), test=_test_pairs(settings))
    validation = _write_validation(settings, encoder, held_out.validation, folder, progress)
    train = _write_train(settings, encoder, held_out, num_pairs, folder, progress)
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **made_of,
        "tokenizer": {"sha256": tokenizer.sha256, "vocabulary_size": tokenizer.vocabulary_size},
        "token_type": encoder.dtype.name,
        "train": train,
        "validation": validation,
    }
    write_manifest(folder, manifest)
    return manifest


def _count_words(settings: CorpusSettings, num_pairs: list[int], progress: bool) -> WordCounts:
    """Count the words of a seeded sample of exactly `tokenizer_sentences` sentences, or of all if fewer.

    Both sides of a pair are sampled together, each pair with the same chance; a source that is repeated
    counts as often.
    """
    random = np.random.default_rng(settings.seed)
    left = sum(num_pairs)
    wanted = min(left, settings.tokenizer_sentences // 2)
    words = WordCounts()
    with _bar("reading text", left, progress) as bar:
        for text in settings.train:
            for chunk in read_pairs(text, settings):
                size = len(chunk.source)
                # Of the pairs still wanted, how many fall into this chunk: a uniform sample in one pass.
                take = int(random.hypergeometric(wanted, left - wanted, size))
                chosen = np.sort(random.choice(size, take, replace=False)).tolist()
                for side in (chunk.source, chunk.target):
                    words.add("\n".join([side[i] for i in chosen] if take < size else side), text.repeat)
                    words.add_characters("\n".join(side))
                left -= size
                wanted -= take
                bar.update(size)
    return words


def _train_tokenizer(settings: CorpusSettings, words: WordCounts, progress: bool) -> bytes:
    with ThreadPoolExecutor(1) as pool, _bar("training the tokenizer", None, progress) as bar:
        training = pool.submit(
            train_on_words,
            words,
            settings.vocabulary_size,
            lowercase=settings.lowercase,
            character_coverage=settings.character_coverage,
        )
        while not training.done():
            wait([training], timeout=0.5)
            bar.update()
        return training.result()


def _test_pairs(settings: CorpusSettings) -> set[tuple[str, str]]:
    return {
        pair
        for text in settings.test
        for chunk in read_pairs(text, settings)
        for pair in zip(chunk.source, chunk.target, strict=True)
    }


def _write_validation(
    settings: CorpusSettings,
    encoder: WordEncoder,
    validation_pairs: set[tuple[str, str]],
    folder: Path,
    progress: bool,
) -> dict[str, Any]:
    """Write the validation stores and their text, and add its pairs to `validation_pairs`."""
    pair_filter = PairFilter(settings)
    unknown = 0
    with ExitStack() as stack:
        writers = _writers(stack, folder, "validation", encoder.dtype)
        source_text, target_text = (
            stack.enter_context((folder / f"validation.{side}.txt").open("w", encoding="utf-8", newline="\n"))
            for side in ("source", "target")
        )
        bar = stack.enter_context(_bar("encoding validation", None, progress))
        for text in settings.validation:
            start = len(writers[0])
            lines: list[tuple[str, str]] = []
            for encoded in _encoded(settings, encoder, pair_filter, text):
                unknown += _append(writers, encoded)
                validation_pairs.update(encoded.text)
                lines += encoded.text
                bar.update(encoded.num_pairs_read)
            for writer in writers:
                writer.repeat_from(start, text.repeat - 1)
            for _ in range(text.repeat):
                source_text.writelines(f"{source}\n" for source, _ in lines)
                target_text.writelines(f"{target}\n" for _, target in lines)
    account = _finished(pair_filter, writers, "validation")
    _warn_of_unknown(unknown, writers, "validation")
    if too_long := pair_filter.account.dropped[Reason.TOO_LONG]:
        log.warning(
            "%d validation pairs are longer than corpus.max_tokens (%d) and left out: BLEU is over the rest",
            too_long,
            settings.max_tokens,
        )
    return account


def _write_train(
    settings: CorpusSettings,
    encoder: WordEncoder,
    held_out: HeldOutPairs,
    num_pairs: list[int],
    folder: Path,
    progress: bool,
) -> dict[str, Any]:
    pair_filter = PairFilter(settings, held_out)
    unknown = 0
    with ExitStack() as stack:
        writers = _writers(stack, folder, "train", encoder.dtype)
        bar = stack.enter_context(_bar("encoding", sum(num_pairs), progress))
        for text in settings.train:
            start = len(writers[0])
            for encoded in _encoded(settings, encoder, pair_filter, text):
                unknown += _append(writers, encoded)
                bar.update(encoded.num_pairs_read)
            for writer in writers:
                writer.repeat_from(start, text.repeat - 1)
    account = pair_filter.account
    for split, count in (("validation", account.also_in_validation), ("test", account.also_in_test)):
        if count:
            log.warning(
                "%d training pairs also occur in the %s text%s",
                count,
                split,
                " and were dropped" if settings.drop_overlap else "; corpus.drop_overlap: true drops them",
            )
    # What is repeated is counted as often among all pieces, and once among the unknown: a warning less, at worst.
    _warn_of_unknown(unknown, writers, "training")
    return _finished(pair_filter, writers, "train")


@dataclass(frozen=True)
class _EncodedChunk:
    """The pairs of a chunk that are kept, as text and, a list a side, as the bytes of their ids."""

    num_pairs_read: int
    text: list[tuple[str, str]]
    ids: tuple[list[bytes], list[bytes]]
    lengths: tuple[np.ndarray, np.ndarray]


def _encoded(
    settings: CorpusSettings, encoder: WordEncoder, pair_filter: PairFilter, text: TextSource
) -> Iterator[_EncodedChunk]:
    """Read a source once, clean and encode it."""
    for chunk in read_pairs(text, settings):
        source_ids, source_lengths = _encode(encoder, chunk.source, settings.max_tokens)
        target_ids, target_lengths = _encode(encoder, chunk.target, settings.max_tokens)
        kept = pair_filter.keep(chunk, source_lengths, target_lengths, text.repeat)
        indices = kept.tolist()
        yield _EncodedChunk(
            num_pairs_read=len(chunk.source),
            text=[(chunk.source[i], chunk.target[i]) for i in indices],
            ids=([source_ids[i] for i in indices], [target_ids[i] for i in indices]),
            lengths=(source_lengths[kept], target_lengths[kept]),
        )


def _encode(encoder: WordEncoder, sentences: list[str], max_tokens: int) -> tuple[list[bytes], np.ndarray]:
    # No piece is longer than this, so that longer text is too long without looking: a line of megabytes
    # costs nothing.
    max_characters = max_tokens * MAX_PIECE_CHARACTERS
    too_long = [i for i, sentence in enumerate(sentences) if len(sentence) > max_characters]
    if too_long:
        sentences = ["" if len(sentence) > max_characters else sentence for sentence in sentences]
    ids, lengths = encoder.encode(sentences)
    lengths[too_long] = max_tokens + 1
    return ids, lengths


def _writers(stack: ExitStack, folder: Path, split: str, dtype: np.dtype) -> list[TokenStoreWriter]:
    return [
        stack.enter_context(TokenStoreWriter(store_prefix(folder, split, side), dtype)) for side in ("source", "target")
    ]


def _append(writers: list[TokenStoreWriter], encoded: _EncodedChunk) -> int:
    """Returns how many of the pieces are unknown."""
    unknown = 0
    for writer, ids, lengths in zip(writers, encoded.ids, encoded.lengths, strict=True):
        flat = np.frombuffer(b"".join(ids), dtype=writer.dtype)
        unknown += int(np.count_nonzero(flat == UNK_ID))
        writer.append_flat(flat, lengths)
    return unknown


def _warn_of_unknown(unknown: int, writers: list[TokenStoreWriter], split: str) -> None:
    share = unknown / max(1, sum(writer.num_tokens for writer in writers))
    if share > _UNKNOWN_SHARE:
        log.warning(
            "%.0f %% of the %s text's pieces are unknown to the tokenizer, whose text had other characters;"
            " compare the texts, or begin without --init-from",
            100 * share,
            split,
        )


def _finished(pair_filter: PairFilter, writers: list[TokenStoreWriter], split: str) -> dict[str, Any]:
    account = pair_filter.account.as_dict()
    if not pair_filter.account.kept:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in pair_filter.account.dropped.items() if n)
        raise InputError(f"corpus.{split}: no pair is left ({reasons}); mend the text or relax the settings")
    source, target = writers
    return account | {
        "source_tokens": source.num_tokens,
        "target_tokens": target.num_tokens,
        "longest_source": source.longest,
        "longest_target": target.longest,
    }


def _bar(what: str, total: int | None, progress: bool) -> "tqdm[Any]":
    return tqdm(
        desc=what,
        total=total,
        unit=" pairs",
        bar_format=None if total else "{desc}: {elapsed}",
        delay=2,
        # A log gets a line every half minute instead of a bar.
        mininterval=0.1 if sys.stderr.isatty() else 30.0,
        file=sys.stderr,
        disable=not progress,
    )
