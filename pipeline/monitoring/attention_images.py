"""Images of a sentence's attention: a heat map for each head of some layers, labelled with pieces."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.monitoring.heatmaps import Panel, draw_panels, missing_characters

PANELS_PER_LINE = 4
_MAX_NAMED = 4
"""Characters that the font lacks are named up to this number."""
AXES = {
    "encoder": ("rows: source pieces (queries); columns: source pieces (keys)", "source", "source"),
    "decoder": ("rows: the next target piece; columns: the target pieces before it", "next", "previous"),
    "cross": ("rows: the next target piece; columns: source pieces", "next", "source"),
}
"""Kind of attention -> description, labels of the rows, labels of the columns."""


class Labels(NamedTuple):
    """Labels of rows and columns."""

    by_axis: dict[str, list[str]]
    """For "source", "next" and "previous", the names in `AXES`."""
    note: str
    """One line about pieces that are numbered because the font cannot write them; empty if there are none."""


def axis_labels(source: list[str], target: list[str], bos: str, eos: str) -> Labels:
    """Return the labels of a pair's pieces, to which the begin and end symbols are added."""
    shown, note = drawable({"source": source, "target": target})
    by_axis = {
        "source": [*shown["source"], eos],
        "next": [*shown["target"], eos],
        "previous": [bos, *shown["target"]],
    }
    return Labels(by_axis, note)


def draw_attention(
    kind: str,
    weights: Sequence[NDArray[np.float32]],
    labels: Labels,
    layers: Sequence[int],
    heads: Sequence[int],
    subject: str,
) -> Image.Image:
    """Draw a heat map for each of the layers and heads.

    Args:
        kind: a key of `AXES`.
        weights: for each layer, [heads, rows, columns].
        labels: what `axis_labels` returned.
        layers: layers to draw, counted from 0; at least one.
        heads: heads to draw, counted from 0; at least one.
        subject: what the title says after the kind.
    """
    description, rows, columns = AXES[kind]
    panels = [
        Panel(
            f"layer {layer + 1}, head {head + 1}",
            weights[layer][head],
            labels.by_axis[rows],
            labels.by_axis[columns],
        )
        for layer in layers
        for head in heads
    ]
    title = f"{kind} attention{subject}\n{description}" + (f"\n{labels.note}" if labels.note else "")
    return draw_panels(title, panels, min(PANELS_PER_LINE, len(heads)))


def drawable(pieces: dict[str, list[str]]) -> tuple[dict[str, list[str]], str]:
    """Return labels that the font has signs for, and one line about those that it has not.

    A side with a piece that the font cannot write has the numbers of its pieces, from 1, as labels.

    Args:
        pieces: for each side, source and target, its pieces.
    """
    lacking = {side: missing_characters(labels) for side, labels in pieces.items()}
    characters = sorted({character for found in lacking.values() for character in found})
    if not characters:
        return pieces, ""
    shown = {side: numbers(len(labels)) if lacking[side] else labels for side, labels in pieces.items()}
    sides = " and ".join(side for side, found in lacking.items() if found)
    scripts = sorted({unicodedata.name(character, "UNNAMED").split()[0] for character in characters})
    named = " ".join(f"U+{ord(character):04X}" for character in characters[:_MAX_NAMED])
    more = f" and {len(characters) - _MAX_NAMED} more" if len(characters) > _MAX_NAMED else ""
    return shown, f"{sides} pieces are numbered: the font has no signs for {named}{more} ({', '.join(scripts)})"


def numbers(count: int) -> list[str]:
    """Return the numbers from 1 on as labels."""
    return [str(number) for number in range(1, count + 1)]
