"""Makes sure that a recipe's corpus is prepared before anything reads it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.runtime import signals as stop_request
from pipeline.runtime.launch import process_rank

if TYPE_CHECKING:
    from data_module.settings import CorpusSettings
    from data_module.tokenization.tokenizer import Tokenizer


def ensure_corpus(settings: "CorpusSettings", tokenizer: "Tokenizer | None" = None) -> None:
    """Prepare the corpus, or see that the one that is there is of these texts and settings.

    A given tokenizer takes the place of one learned from the text.

    Of several ranks one prepares it and the others wait; only the first looks at texts again, where they are at hand.
    Asked to stop while a corpus is made, all end at once. Where there is one, no rank ends by itself, before or after:
    the others would wait for it in vain until they are killed. They agree on it when they have met.

    Raises InputError as `prepare` does.
    """
    from data_module.corpus.manifest import is_corpus, read_manifest, summary
    from data_module.corpus.preparation import differs_from, prepare
    from data_module.errors import InputError
    from data_module.readers.text_sources import is_available

    folder = Path(settings.folder)
    if not is_corpus(folder):
        with stop_request.default_signals():
            manifest = prepare(settings, tokenizer)
        if process_rank() == 0:
            print(summary(manifest), file=sys.stderr)
    elif process_rank() == 0 and all(map(is_available, settings.texts())):
        prepare(settings)  # reads all texts to see that they are the same: once is enough
    elif differences := differs_from(read_manifest(folder), settings):
        raise InputError(
            f"{folder}: was made with other settings: {'; '.join(differences)}; name another corpus.folder"
        )
