"""Makes sure that a recipe's corpus is prepared before anything reads it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.runtime import signals
from pipeline.runtime.launch import process_rank

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.tokenization.tokenizer import Tokenizer


def ensure_corpus(settings: "CorpusSettings", tokenizer: "Tokenizer | None" = None) -> dict[str, Any]:
    """Prepare the corpus unless it is there, check it against the settings, and return its manifest.

    Of several ranks one prepares the corpus and the others wait. Only rank 0 reads the texts again to see that they are
    unchanged, where they are available.

    While a corpus is being prepared, a stop signal ends every rank at once. Otherwise no rank ends by itself, because
    the others would wait for it: they agree on stopping when training starts.

    Args:
        settings: the recipe's `corpus:` section.
        tokenizer: takes the place of one learned from the text.

    Raises InputError as `prepare` does.
    """
    from data_module.corpus.manifest import is_corpus, read_manifest, summary
    from data_module.corpus.preparation import differs_from, prepare
    from data_module.errors import InputError
    from data_module.readers.pairs import all_available

    folder = Path(settings.folder)
    if not is_corpus(folder):
        with signals.default_signals():
            manifest = prepare(settings, tokenizer)
        if process_rank() == 0:
            print(summary(manifest), file=sys.stderr)
        return manifest
    if process_rank() == 0 and all_available(settings):
        return prepare(settings)  # Reads all texts to compare their hashes, so one rank does it.
    manifest = read_manifest(folder)
    if differences := differs_from(manifest, settings):
        raise InputError(
            f"{folder}: was made with other settings: {'; '.join(differences)}; name another corpus.folder"
        )
    return manifest
