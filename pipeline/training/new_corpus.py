"""Prepares a corpus and reports on its pieces and pairs: always for `prepare`, if it is missing for `fit`."""

from pathlib import Path

from data_module.corpus.manifest import Manifest, corpus_tokenizer, summary
from data_module.corpus.preparation import existing_corpus, prepare
from data_module.settings import CorpusSettings
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.inference.pieces import piece_report
from pipeline.runtime import signals
from pipeline.runtime.console import say
from pipeline.runtime.launch import process_rank


def prepare_and_report(settings: CorpusSettings, tokenizer: Tokenizer | None, force: bool = False) -> Manifest:
    """Prepare the corpus, and report on its pieces and pairs; return the manifest."""
    manifest = prepare(settings, tokenizer, force=force)
    # The weights with which training begins have learned the pieces of their tokenizer.
    learned = corpus_tokenizer(Path(settings.folder)).also_seen(tokenizer)
    for line in (*(line for line, _ in piece_report(settings, learned)), *summary(manifest).splitlines()):
        say(line)
    return manifest


def ensure_corpus(settings: CorpusSettings, tokenizer: Tokenizer | None = None) -> Manifest:
    """Prepare the corpus if it does not exist, else check it against the settings; return its manifest.

    Of several ranks, one prepares the corpus and the others wait. Only rank 0 reads the texts again, where they are
    available, to see that they are unchanged.

    While a corpus is being prepared, a stop signal ends every rank at once. Otherwise no rank ends by itself, because
    the others would wait for it: they agree on stopping when training starts.

    Raises InputError as `prepare` does.
    """
    manifest = existing_corpus(settings, compare_texts=process_rank() == 0)
    if manifest is not None:
        say(f"{settings.folder} is up to date")
        return manifest
    with signals.default_signals():
        return prepare_and_report(settings, tokenizer)
