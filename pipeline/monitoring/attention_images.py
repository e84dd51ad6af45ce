"""Images of attention and of position encodings. Importing this module imports matplotlib.

Figures are drawn with the Agg canvas, without pyplot: threads may draw at the same time, and no display is needed.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager, get_font
from numpy.typing import NDArray
from PIL import Image

from data_module.errors import first_of

PANELS_PER_LINE = 4
CELL_SIZE = 15
"""Width and height of a weight in pixels."""
_DPI, _MARGIN, _GAP, _CAPTION = 100, 200, 24, 110
"""Pixels per inch, for the longest label, between panels, and for the caption of a panel."""
_MAX_LABEL_CHARACTERS = 14
_PALETTE = [level * (255 - dark) // 15 + dark for level in range(16) for dark in (8, 48, 120)]
"""Blue to white. With 16 colors, a pixel takes four bits."""
_FONT = "DejaVu Sans"
"""Comes with matplotlib: Latin, Greek, Cyrillic, Arabic, Hebrew, Armenian and Georgian."""
_TEXT: dict[str, Any] = {"family": [_FONT], "fontsize": 8.5, "color": "black", "parse_math": False, "usetex": False}
_TEXT["transform"] = None  # Positions are in pixels from the lower left corner.
_family_of: dict[str, str | None] = {}
"""Character -> the family of fonts that draws it; None if no font has a glyph."""
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
    shown = {"source": source, "target": target}
    family_of = _families(set("".join([*source, *target])))
    lacking = {side: {one for one in "".join(shown[side]) if family_of[one] is None} for side in shown}
    note = ""
    if sides := [side for side in shown if lacking[side]]:
        shown |= {side: [str(number + 1) for number in range(len(shown[side]))] for side in sides}
        characters = first_of([f"U+{ord(one):04X}" for one in sorted(set.union(*lacking.values()))], 4, ", ")
        note = f"{' and '.join(sides)} pieces are numbered: no font has glyphs for {characters}"
    by_axis = {
        "source": [*shown["source"], eos],
        "next": [*shown["target"], eos],
        "previous": [bos, *shown["target"]],
    }
    others = {family for family in family_of.values() if family} - {_FONT}
    return Labels(by_axis, note, [_FONT, *sorted(others)])


def draw_attention(
    kind: str,
    weights: Sequence[NDArray[np.float32]],
    labels: Labels,
    layers: Sequence[int],
    heads: Sequence[int],
    subject: str,
) -> Image.Image:
    """Draw a heat map for each of the layers and heads, of which there is at least one.

    `kind` is a key of `AXES`; `weights` are [heads, rows, columns] for each layer; `subject` follows the kind in the
    title.
    """
    description, rows, columns = AXES[kind]
    title = f"{kind} attention{subject}\n{description}" + (f"\n{labels.note}" if labels.note else "")
    frame = _draw_labels(labels.by_axis[rows], labels.by_axis[columns], labels.families)
    cell_rows, cell_columns = (CELL_SIZE * size for size in weights[0].shape[1:])
    height, width = frame.shape[0] + _GAP, frame.shape[1] + max(0, _CAPTION - cell_columns) + _GAP
    per_line = min(PANELS_PER_LINE, len(heads))
    title_lines = title.split("\n")
    top = 20 * len(title_lines)
    size = top - (-len(layers) * len(heads) // per_line) * height, max(per_line * width, 9 * max(map(len, title_lines)))
    figure, panels = _figure(*size), np.full(size, 255, np.uint8)
    figure.text(8, size[0] - 8, title, verticalalignment="top", **_TEXT | {"fontsize": 10.5})
    for index, (layer, head) in enumerate(product(layers, heads)):
        y, x = top + index // per_line * height, index % per_line * width
        cells = 255 * (1 - weights[layer][head].clip(0, 1))
        frame[-cell_rows:, -cell_columns:] = cells.repeat(CELL_SIZE, 0).repeat(CELL_SIZE, 1)
        panels[y : y + len(frame), x : x + frame.shape[1]] = frame
        place = x + frame.shape[1] - cell_columns, size[0] - y - height + 4
        figure.text(*place, f"layer {layer + 1}, head {head + 1}", **_TEXT)
    image = Image.fromarray(np.minimum(panels, _draw(figure)[..., 0]) // 16)
    image.putpalette(_PALETTE)
    return image


def draw_matrix(title: str, values: NDArray[np.float32], row_axis: str, column_axis: str) -> Image.Image:
    """Draw one large matrix [rows, columns], from -1 (red) over 0 (white) to 1 (blue), with numbered rows."""
    figure = _figure(3 * len(values) + 90, 720)
    axes = figure.add_axes((0.1, 30 / figure.bbox.height, 0.88, 1 - 80 / figure.bbox.height))
    colors = LinearSegmentedColormap.from_list("red to blue", ["#a01414", "white", "#083078"])
    axes.imshow(values, colors, vmin=-1, vmax=1, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(column_axis, fontsize=9)
    axes.set_ylabel(row_axis, fontsize=9)
    return Image.fromarray(_draw(figure)).quantize(128, dither=Image.Dither.NONE)


def _families(characters: set[str]) -> dict[str, str | None]:
    """Return the family of fonts that draws each of the characters, None for those without a glyph in any font."""
    missing = characters - _family_of.keys()
    for family in dict.fromkeys([_FONT, *sorted(font.name for font in fontManager.ttflist)]):
        if not missing:
            break
        if family.startswith("Last Resort"):  # draws the same box for all characters of a script
            continue
        with suppress(OSError, RuntimeError, ValueError):  # a font that is gone or damaged
            # A bold or narrow font of a family may have more glyphs than this one, with which matplotlib draws.
            glyphs = get_font(fontManager.findfont(FontProperties(family=[family])))
            # Other fonts have glyphs of their own for control characters and for private use.
            drawn = {one for one in missing if one.isprintable() or family == _FONT}
            drawn = {one for one in drawn if glyphs.get_char_index(ord(one))}
            _family_of.update(dict.fromkeys(drawn, family))
            missing -= drawn
    _family_of.update(dict.fromkeys(missing))
    return {character: _family_of[character] for character in characters}


def _draw_labels(rows: list[str], columns: list[str], families: list[str]) -> NDArray[np.uint8]:
    """Return the gray values of the labels around a matrix, drawn once for all panels because drawing text is slow."""
    width, height = CELL_SIZE * len(columns), CELL_SIZE * len(rows)
    figure = _figure(height + _MARGIN, _MARGIN + width)
    style = _TEXT | {"family": families}
    for index, label in enumerate(map(_shorten, columns)):
        x = _MARGIN + (index + 0.5) * CELL_SIZE
        figure.text(x, height + 4, label, horizontalalignment="center", rotation=90, **style)
    for index, label in enumerate(map(_shorten, reversed(rows))):
        y = (index + 0.5) * CELL_SIZE
        figure.text(_MARGIN - 4, y, label, horizontalalignment="right", verticalalignment="center_baseline", **style)
    pixels = _draw(figure)[..., 0]
    inked_rows, inked_columns = np.nonzero(pixels < 255)
    pixels[-height - 1 :, -width - 1 :] = 192  # lines above and left of the values
    return pixels[max(0, inked_rows.min() - 8) :, max(0, inked_columns.min() - 8) :]


def _figure(height: int, width: int) -> Figure:
    """Return an empty figure of this size in pixels."""
    # The canvas rounds sizes down: half a pixel makes up for rounding errors.
    return Figure(((width + 0.5) / _DPI, (height + 0.5) / _DPI), dpi=_DPI, facecolor="white")


def _draw(figure: Figure) -> NDArray[np.uint8]:
    """Return the pixels: [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def _shorten(label: str) -> str:
    return label if len(label) <= _MAX_LABEL_CHARACTERS else label[: _MAX_LABEL_CHARACTERS - 1] + "…"
