"""Prepares a corpus and reports on its pieces and pairs, for `prepare` and `fit`."""

from pathlib import Path

from data_module.corpus.manifest import Manifest, corpus_tokenizer, summary
from data_module.corpus.preparation import prepare
from data_module.settings import CorpusSettings
from data_module.tokenization.tokenizer import Tokenizer
from pipeline.inference.pieces import piece_report
from pipeline.runtime.console import say


def prepare_and_report(settings: CorpusSettings, tokenizer: Tokenizer | None, force: bool = False) -> Manifest:
    """Prepare the corpus, and report on its pieces and pairs; return the manifest."""
    manifest = prepare(settings, tokenizer, force=force)
    # The weights with which training begins have learned the pieces of their tokenizer.
    learned = corpus_tokenizer(Path(settings.folder)).also_seen(tokenizer)
    for line in (*(line for line, _ in piece_report(settings, learned)), *summary(manifest).splitlines()):
        say(line)
    return manifest
