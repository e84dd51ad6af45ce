"""Images of attention and of position encodings. Importing this module imports matplotlib.

Figures are drawn with the Agg canvas, without pyplot: threads may draw at the same time, and no display is needed.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager, get_font
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps

from data_module.errors import first_of

PANELS_PER_LINE = 4
CELL_SIZE = 15
"""Width and height of a weight in pixels."""
_MARGIN = 200
"""Pixels for the longest label, which has 14 characters."""
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
    """One line about pieces that are shown as numbers because no font can draw them; empty if all can be drawn."""
    families: list[str]
    """Families of fonts that together have glyphs for all labels."""


def axis_labels(source: list[str], target: list[str], bos: str, eos: str) -> Labels:
    """Return the labels of a pair's pieces, with the begin and end symbols.

    If no font has a glyph for a character of a side, the pieces of that side are numbered from 1.
    """
    shown, lacking = {"source": source, "target": target}, {}
    for side, pieces in (("source", source), ("target", target)):
        if without := {character for character in "".join(pieces) if not _family(character)}:
            lacking[side] = without
            shown[side] = [str(number) for number in range(1, len(pieces) + 1)]
    note = ""
    if lacking:
        characters = first_of([f"U+{ord(one):04X}" for one in sorted(set.union(*lacking.values()))], 4, ", ")
        note = f"{' and '.join(lacking)} pieces are numbered: no font has glyphs for {characters}"
    source_labels, target_labels = shown.values()
    by_axis = {"source": [*source_labels, eos], "next": [*target_labels, eos], "previous": [bos, *target_labels]}
    others = {_family(character) or _FONT for character in "".join([*source, *target])} - {_FONT}
    return Labels(by_axis, note, [_FONT, *sorted(others)])


def draw_attention(
    kind: str,
    weights: NDArray[np.float32],
    labels: Labels,
    layers: Sequence[int],
    heads: Sequence[int],
    subject: str,
) -> Image.Image:
    """Draw a heat map for each of the layers and heads, of which there is at least one.

    `kind` is a key of `AXES`; `weights` are [layers, heads, rows, columns]; `subject` follows the kind in the title.
    """
    description, rows, columns = AXES[kind]
    panel = _panel(labels.by_axis[rows], labels.by_axis[columns], labels.families)
    per_line, num_panels = min(PANELS_PER_LINE, len(heads)), len(layers) * len(heads)
    beside = max(0, 110 - CELL_SIZE * weights[0].shape[-1])  # A caption may be wider than its cells.
    width, height, top = panel.width + beside + 24, panel.height + 30, 70
    image = Image.new("L", (max(per_line * width, 800), top - (-num_panels // per_line) * height), "white")
    pen = ImageDraw.Draw(image)
    title = f"{kind} attention{subject}\n{description}\n{labels.note}"
    pen.text((8, 8), title, fill="black", font_size=14)
    for index, (layer, head) in enumerate(product(layers, heads)):
        x, y = index % per_line * width, top + index // per_line * height
        cells = Image.fromarray((255 * (1 - weights[layer][head].clip(0, 1))).astype(np.uint8))
        cells = ImageOps.scale(cells, CELL_SIZE, Image.Resampling.NEAREST)
        left, upper = x + panel.width - cells.width, y + panel.height - cells.height
        image.paste(panel, (x, y))
        image.paste(cells, (left, upper))
        pen.rectangle((left - 1, upper - 1, left + cells.width, upper + cells.height), outline=192)
        pen.text((left, y + panel.height + 4), f"layer {layer + 1}, head {head + 1}", fill="black", font_size=12)
    image = image.point([level // 16 for level in range(256)])
    image.putpalette(_PALETTE)
    return image


def draw_matrix(title: str, values: NDArray[np.float32], row_axis: str, column_axis: str) -> Image.Image:
    """Draw one large matrix [rows, columns], from -1 (red) over 0 (white) to 1 (blue), with numbered rows."""
    figure = Figure((7.2, 0.9 + 0.03 * len(values)), dpi=100, facecolor="white", layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=column_axis, ylabel=row_axis, xticks=[])
    colors = LinearSegmentedColormap.from_list("red to blue", ["#a01414", "white", "#083078"])
    axes.imshow(values, colors, vmin=-1, vmax=1, interpolation="nearest", aspect="auto")
    return _draw(figure).quantize(128, dither=Image.Dither.NONE)


@cache
def _family(character: str) -> str | None:
    """Return the family of fonts that draws a character; None if no font has a glyph."""
    # Other fonts have glyphs of their own for control characters and for private use.
    others = sorted(fontManager.get_font_names()) if character.isprintable() else []
    return next((family for family in [_FONT, *others] if ord(character) in _glyphs(family)), None)


@cache
def _glyphs(family: str) -> frozenset[int]:
    """Return the code points for which a family's font has glyphs."""
    if family.startswith("Last Resort"):  # draws the same box for all characters of a script
        return frozenset()
    try:
        # A bold or narrow font of a family may have more glyphs than this one, with which matplotlib draws.
        return frozenset(get_font(fontManager.findfont(FontProperties(family=[family]))).get_charmap())
    except (OSError, RuntimeError, ValueError):  # The font is gone or damaged.
        return frozenset()


def _panel(rows: list[str], columns: list[str], families: list[str]) -> Image.Image:
    """Draw the labels of a matrix, which has its place in the lower right corner.

    They are drawn once for all panels because drawing text is slow.
    """
    rows, columns = ([label if len(label) < 15 else label[:13] + "…" for label in axis] for axis in (rows, columns))
    width, height = _MARGIN + CELL_SIZE * len(columns), _MARGIN + CELL_SIZE * len(rows)
    figure = Figure((width / 128, height / 128), dpi=128, facecolor="white")  # no rounding errors
    place = _MARGIN / width, 0, 1 - _MARGIN / width, 1 - _MARGIN / height
    axes = figure.add_axes(place, xlim=(0, len(columns)), ylim=(len(rows), 0))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    style: dict[str, Any] = {"fontsize": 6.6, "color": "black", "parse_math": False, "usetex": False}
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, family=families, **style)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, family=families, **style)
    image = _draw(figure).convert("L")
    left, upper, *_ = ImageOps.invert(image).getbbox() or (0, 0)
    return image.crop((max(0, left - 8), max(0, upper - 8), *image.size))


def _draw(figure: Figure) -> Image.Image:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
