"""Names of text sources, and which pairs of a split come from which of them."""

import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_module.settings import TextSource


class SplitSources(NamedTuple):
    """Which pairs of a split come from which source. Sources that share a name are one."""

    names: list[str]
    """In the order of the recipe."""
    of_pair: NDArray[np.int64]
    """[pairs]: the index into `names` of each pair's source."""


def split_sources(account: dict[str, Any]) -> SplitSources | None:
    """Return the sources of a split from its entry in the manifest; None if all have one name."""
    record = account["sources"]
    names = list(dict.fromkeys(source["name"] for source in record))
    if len(names) < 2:
        return None
    indices = [names.index(source["name"]) for source in record]
    return SplitSources(names, np.repeat(indices, [source["pairs"] * source["repeat"] for source in record]))


def source_names(texts: Sequence[TextSource]) -> list[str]:
    """Return a name for each text source of a split, of letters, digits, `_`, `-` and `.`.

    A source is named by its `name`, else by the letters and digits of its `prefix` (`de` for `>>de<<`), else by its
    file or data set (`news` for `text/news.en.gz`). Sources may share a name, or a prefix, and then are one in reports.
    A name made from a file gets a number where another source has it.
    """
    given = [text.name or _of_prefix(text.prefix or "") for text in texts]
    taken, names = set(given), []
    for name, text in zip(given, texts, strict=True):
        base = _of_file(text)
        numbered = (f"{base}_{number}" for number in count(2))
        names.append(name or next(one for one in chain([base], numbered) if one not in taken))
        taken.add(names[-1])
    return names


def _of_prefix(prefix: str) -> str:
    """Return the prefix from its first letter or digit to its last; empty if it has none."""
    return _only_allowed(re.sub(r"^[\W_]+|[\W_]+$", "", prefix))


def _of_file(text: TextSource) -> str:
    if text.dataset:
        name = "_".join([Path(text.dataset).name, *([text.subset] if text.subset else [])])
    else:
        name = Path(Path(str(text.source or text.tsv or text.path)).name.removesuffix(".gz")).stem
    return _only_allowed(name) or "text"


def _only_allowed(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)
