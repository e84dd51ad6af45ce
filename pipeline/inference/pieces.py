"""The pieces that a model reads of a text, and which of them training never saw."""

from collections.abc import Iterator
from dataclasses import asdict

from data_module.corpus.pairs import open_reader, read_pairs
from data_module.errors import InputError
from data_module.settings import CorpusSettings
from data_module.tokenization.text_form import difference
from data_module.tokenization.tokenizer import SPACE_MARK, Tokenizer
from pipeline.inference.options import Prefixes
from pipeline.inference.text_io import Defects, SentenceWarnings

SPACED_SYMBOLS = (
    f"corpus.user_symbols: a symbol after a space is two pieces, {SPACE_MARK} and itself; write symbols that follow one"
    " another without spaces, as in <N><ACC>, for shorter sentences"
)
_NUM_EXAMPLES = 2
_SHOWN_PIECES = 50
"""Number of pieces that are shown of an example sentence."""


def encode_sources(
    tokenizer: Tokenizer, sentences: list[str], longest: int | None = None, prefixes: Prefixes | None = None
) -> tuple[list[list[int]], list[Defects]]:
    """Return each sentence's ids with the end symbol, cut to `longest` tokens, and its defects.

    `prefixes` are the model's prefixes for source sentences; None for target sentences.
    """
    kept, rows, defects = None if longest is None else longest - 1, [], []
    never_seen = tokenizer.never_seen(is_target=prefixes is None)
    for sentence, encoded in zip(sentences, tokenizer.encode(sentences), strict=True):
        whole = encoded.tolist()
        ids = whole[:kept]
        rows.append([*ids, tokenizer.eos_id])
        lacks_prefix = prefixes is not None and prefixes.is_missing(sentence)
        strange = ("", "") if never_seen.isdisjoint(ids) else _first_strange(tokenizer, sentence, ids, never_seen)
        other_form = tokenizer.knows_other_form(sentence, whole)
        differs = None
        if tokenizer.form is not None:
            differs = difference(tokenizer.form, prefixes is None, sentence, prefixes is not None and prefixes.always)
        has_mark = SPACE_MARK in sentence
        defects.append(Defects(len(whole) > len(ids), *strange, lacks_prefix, has_mark, other_form, differs))
    return rows, defects


def encode_target_prefixes(tokenizer: Tokenizer, prefixes: list[str], first: int) -> list[list[int]]:
    """Return the ids of each target prefix; `first` is the number of the first line, for the message.

    Raises InputError if a prefix has a character that the vocabulary lacks.
    """
    rows = [ids.tolist() for ids in tokenizer.target.encode(prefixes)]
    for number, (prefix, ids) in enumerate(zip(prefixes, rows, strict=True), first):
        if tokenizer.unk_id in ids:
            unknown, _ = _first_strange(tokenizer.target, prefix, ids, frozenset([tokenizer.unk_id]))
            raise InputError(f"target prefix of line {number}: has {unknown!r}, which the model has never seen")
    return rows


def _first_strange(tokenizer: Tokenizer, sentence: str, ids: list[int], never_seen: frozenset[int]) -> tuple[str, str]:
    """Return the first piece that the vocabulary lacks, and the first other piece of `never_seen`; "" for none."""
    spelt = list(zip(ids, tokenizer.spell(sentence), strict=False))
    unk_id = tokenizer.unk_id
    unknown = next((piece for number, piece in spelt if number == unk_id), "")
    return unknown, next((piece for number, piece in spelt if number in never_seen and number != unk_id), "")


def piece_report(settings: CorpusSettings, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield lines about the pieces of a corpus's texts, each with whether it names a likely mistake.

    The first training pairs are shown as pieces. Lines of the validation and test text with pieces that training never
    saw are counted.
    """
    sides, text = (("source", tokenizer), ("target", tokenizer.target)), settings.train[0]
    chunk = next(read_pairs(text, settings))
    pairs = [pair for pair in zip(chunk.source, chunk.target, strict=True) if all(pair)][:_NUM_EXAMPLES]
    symbols, has_spaced = set(settings.user_symbols) - {text.prefix}, False
    for (name, of_side), sentences in zip(sides, zip(*pairs, strict=True), strict=False):
        for number, pieces in enumerate(map(of_side.spell, sentences), 1):
            shown = [piece if piece.isprintable() else repr(piece) for piece in pieces[:_SHOWN_PIECES]]
            yield f"{name} {number} as pieces: {' '.join(shown)}{' …' * (len(pieces) > _SHOWN_PIECES)}", False
            triples = zip(pieces, pieces[1:], pieces[2:], strict=False)
            has_spaced |= any(space == SPACE_MARK and symbols >= {before, after} for before, space, after in triples)
    if has_spaced:
        yield SPACED_SYMBOLS, True
    prefixes = Prefixes.of_corpus(asdict(settings))
    for text in (*settings.validation, *settings.test):
        names = open_reader(text, settings).names
        found = [
            SentenceWarnings(prefixes, None, f"{name}, {side}") for name, (side, _) in zip(names, sides, strict=True)
        ]
        for chunk in read_pairs(text, settings):
            encoded = (
                encode_sources(tokenizer, chunk.source, None, prefixes),
                encode_sources(tokenizer.target, chunk.target),
            )
            for warnings, (_, defects) in zip(found, encoded, strict=True):
                for number, of_line in enumerate(defects, chunk.first_line):
                    warnings.add(number, of_line)
        yield from ((line, True) for warnings in found for line in warnings.texts("line"))
