"""Images of attention. Importing this module imports matplotlib.

Figures are drawn with the Agg canvas, without pyplot: threads may draw at the same time, and no display is needed.
"""

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from numpy.typing import NDArray
from PIL import Image

from data_module.errors import first_of

PANELS_PER_LINE = 4
CELL_SIZE = 15
"""Width and height of a weight in pixels."""
_DPI = 128
_LABELS = 6.6
"""Size of the labels' font in points."""
_PALETTE = [level * (255 - dark) // 15 + dark for level in range(16) for dark in (8, 48, 120)]
"""Blue to white. With 16 colors, a pixel takes four bits."""
_FONT = "DejaVu Sans"
"""Comes with matplotlib: Latin, Greek, Cyrillic, Arabic, Hebrew, Armenian and Georgian."""
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
    """One line about pieces that are shown as numbers because the font cannot draw them; empty if it draws all."""


def axis_labels(source: list[str], target: list[str], bos: str, eos: str) -> Labels:
    """Return the labels of a pair's pieces, with the begin and end symbols.

    If the font has no glyph for a character of a side, the pieces of that side are numbered from 1.
    """
    glyphs = get_font(findfont(_FONT)).get_charmap()
    shown, lacking = {"source": source, "target": target}, {}
    for side, pieces in (("source", source), ("target", target)):
        if without := {character for character in "".join(pieces) if ord(character) not in glyphs}:
            lacking[side] = without
            shown[side] = [str(number) for number in range(1, len(pieces) + 1)]
    note = ""
    if lacking:
        characters = first_of([f"U+{ord(one):04X}" for one in sorted(set.union(*lacking.values()))], 4, ", ")
        note = f"{' and '.join(lacking)} pieces are numbered: {_FONT} has no glyphs for {characters}"
    source_labels, target_labels = shown.values()
    by_axis = {"source": [*source_labels, eos], "next": [*target_labels, eos], "previous": [bos, *target_labels]}
    return Labels(by_axis, note)


def draw_attention(
    kind: str,
    weights: NDArray[np.float32],
    labels: Labels,
    layers: Sequence[int],
    heads: Sequence[int],
    subject: str,
) -> Image.Image:
    """Draw a heat map for each of the layers and heads, of which there is at least one.

    Labels are left of the first panel of each line and above the first line. `kind` is a key of `AXES`; `weights` are
    [layers, heads, rows, columns]; `subject` follows the kind in the title.
    """
    description, *names = AXES[kind]
    rows, columns = ([one if len(one) < 15 else one[:13] + "…" for one in labels.by_axis[name]] for name in names)
    left_margin, top_margin = _longest(rows), 70 + _longest(columns)
    right, down = CELL_SIZE * len(columns), CELL_SIZE * len(rows)
    per_line, num_panels = min(PANELS_PER_LINE, len(heads)), len(layers) * len(heads)
    # A panel's place, with the space to the next one. A caption may be wider than its cells.
    panel_width, panel_height = max(right, 110) + 24, down + 30
    width = max(left_margin + per_line * panel_width, 800)
    height = top_margin - (-num_panels // per_line) * panel_height
    figure = Figure((width / _DPI, height / _DPI), dpi=_DPI, facecolor="white")
    title = f"{kind} attention{subject}\n{description}\n{labels.note}"
    figure.text(8 / width, 1 - 8 / height, title, va="top", fontsize=8, parse_math=False)
    style: dict[str, Any] = {"fontsize": _LABELS, "family": _FONT, "parse_math": False, "usetex": False}
    for index, (layer, head) in enumerate(product(layers, heads)):
        line, column = divmod(index, per_line)
        left, lower = left_margin + column * panel_width, height - top_margin - line * panel_height - down
        axes = figure.add_axes((left / width, lower / height, right / width, down / height))
        axes.imshow(weights[layer][head], "gray_r", vmin=0, vmax=1, interpolation="nearest", aspect="auto")
        axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
        axes.spines[:].set(color="0.75", linewidth=0.5, position=("outward", 1))
        axes.text(-0.5, len(rows) - 0.3, f"layer {layer + 1}, head {head + 1}", va="top", fontsize=7)
        # Labels are at the outer panels only, because drawing text is slow; ticks would take twice as long.
        for place, label in enumerate(rows if column == 0 else []):
            axes.text(-0.8, place, label, ha="right", va="center_baseline", **style)
        for place, label in enumerate(columns if line == 0 else []):
            axes.text(place, -0.8, label, ha="center", va="bottom", rotation=90, **style)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("L").point([level // 16 for level in range(256)])
    image.putpalette(_PALETTE)
    return image


def _longest(texts: list[str]) -> int:
    """Return the pixels that the longest of some labels takes, with the space around it."""
    renderer, font = FigureCanvasAgg(Figure(dpi=_DPI)).get_renderer(), FontProperties(family=_FONT, size=_LABELS)
    return 16 + max(ceil(renderer.get_text_width_height_descent(text, font, ismath=False)[0]) for text in texts)
