"""Makes sure that a recipe's corpus is prepared before anything reads it."""

import sys
from typing import TYPE_CHECKING, Any

from pipeline.runtime import signals
from pipeline.runtime.console import say
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
    from data_module.corpus.manifest import summary
    from data_module.corpus.preparation import existing_corpus, prepare

    # One rank reads all texts to compare their hashes.
    manifest = existing_corpus(settings, compare_texts=process_rank() == 0)
    if manifest is not None:
        say(f"{settings.folder} is up to date")
        return manifest
    with signals.default_signals():
        manifest = prepare(settings, tokenizer)
    if process_rank() == 0:
        print(summary(manifest), file=sys.stderr)
    return manifest
