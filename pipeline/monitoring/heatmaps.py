"""Heat maps of matrices, drawn with Pillow."""

from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CELL_SIZE, LABEL_SIZE, TITLE_SIZE = 15, 12, 15
"""Pixels of a matrix element, and of the fonts of labels and titles."""
_GAP = 18
_MAX_LABEL_CHARACTERS = 14
_WHITE, _BLUE, _RED, _GREY = (255, 255, 255), (8, 48, 120), (160, 20, 20), (193, 203, 221)
_TEXT_COLOR = _BLUE
"""The hue of the values, so that a small palette holds both."""
_NO_CHARACTER = "\uffff"
"""Not a character: drawn as the box that stands for all characters that the font lacks."""


class Panel(NamedTuple):
    """One matrix of an image."""

    title: str
    values: NDArray[np.float32]
    """[rows, columns], from 0 (white) to 1 (dark)."""
    rows: list[str]
    """A label for each row; `columns` has one for each column."""
    columns: list[str]


def missing_characters(labels: Iterable[str]) -> list[str]:
    """Return the characters of the labels that the font has no sign for, in order."""
    return sorted(character for character in set("".join(labels)) if _glyph(character) == _glyph(_NO_CHARACTER))


def draw_panels(title: str, panels: list[Panel], panels_per_line: int) -> Image.Image:
    """Draw matrices of one shape in a grid, with labels left of and above each of them."""
    left = max(_text_width(_shorten(label)) for panel in panels for label in panel.rows) + 6
    top = max(_text_width(_shorten(label)) for panel in panels for label in panel.columns) + 6
    rows, columns = panels[0].values.shape
    width, height = left + columns * CELL_SIZE + _GAP, top + rows * CELL_SIZE + TITLE_SIZE + _GAP + 4
    num_lines = -(-len(panels) // panels_per_line)
    title_height = TITLE_SIZE + 14 + (TITLE_SIZE + 3) * title.count("\n")
    title_width = max(_text_width(line, TITLE_SIZE) for line in title.split("\n"))
    size = (max(panels_per_line * width, title_width) + _GAP, title_height + num_lines * height)
    image = Image.new("RGB", size, _WHITE)
    draw = ImageDraw.Draw(image)
    draw.text((_GAP // 2, 4), title, _TEXT_COLOR, _font(TITLE_SIZE))
    for index, panel in enumerate(panels):
        x, y = _GAP // 2 + index % panels_per_line * width, title_height + index // panels_per_line * height
        draw.text((x + left, y), panel.title, _TEXT_COLOR, _font(TITLE_SIZE - 2))
        _draw_panel(image, panel, x + left, y + TITLE_SIZE + 4 + top)
    # With 16 colors, a pixel takes four bits.
    return image.quantize(16, dither=Image.Dither.NONE)


def _draw_panel(image: Image.Image, panel: Panel, x: int, y: int) -> None:
    """Draw a matrix whose upper left corner is at (x, y), and its labels."""
    draw = ImageDraw.Draw(image)
    for column, label in enumerate(panel.columns):
        vertical = _vertical_label(_shorten(label))
        image.paste(vertical, (x + column * CELL_SIZE, y - vertical.height - 2))
    for row, label in enumerate(panel.rows):
        text = _shorten(label)
        draw.text((x - 4 - _text_width(text), y + row * CELL_SIZE), text, _TEXT_COLOR, _font(LABEL_SIZE))
    rows, columns = panel.values.shape
    right, bottom = x + columns * CELL_SIZE, y + rows * CELL_SIZE
    image.paste(_shade(panel.values, _BLUE).resize((right - x, bottom - y), Image.Resampling.NEAREST), (x, y))
    draw.rectangle((x - 1, y - 1, right, bottom), outline=_GREY)


def draw_matrix(title: str, values: NDArray[np.float32], row_axis: str, column_axis: str) -> Image.Image:
    """Draw one large matrix with numbered rows.

    Args:
        title: printed above the matrix.
        values: [rows, columns], from -1 (red) over 0 (white) to 1 (blue).
        row_axis: what a row is.
        column_axis: what a column is.
    """
    positive = _shade(values.clip(0, 1), _BLUE)
    negative = _shade((-values).clip(0, 1), _RED)
    cells = Image.fromarray(np.minimum(np.asarray(positive), np.asarray(negative)))
    scale = max(1, 640 // cells.width)
    cells = cells.resize((cells.width * scale, cells.height * 3), Image.Resampling.NEAREST)
    left, top = 70, 50
    width = left + max(cells.width, _text_width(title, TITLE_SIZE), _text_width(column_axis)) + _GAP
    image = Image.new("RGB", (width, top + cells.height + _GAP), _WHITE)
    image.paste(cells, (left, top))
    draw = ImageDraw.Draw(image)
    draw.text((left, 4), title, _TEXT_COLOR, _font(TITLE_SIZE))
    draw.text((left, top - 20), column_axis, _TEXT_COLOR, _font(LABEL_SIZE))
    draw.text((4, top - 20), row_axis, _TEXT_COLOR, _font(LABEL_SIZE))
    for row in range(0, values.shape[0], max(1, values.shape[0] // 8)):
        number = str(row)
        draw.text((left - 8 - _text_width(number), top + 3 * row - 6), number, _TEXT_COLOR, _font(LABEL_SIZE))
    return image.quantize(128, dither=Image.Dither.NONE)


def _shade(values: NDArray[np.float32], dark: tuple[int, int, int]) -> Image.Image:
    """Return a pixel per value: white for 0, the dark color for 1."""
    weights = values.clip(0.0, 1.0)[..., None]
    return Image.fromarray((255 + (np.array(dark) - 255) * weights).astype(np.uint8))


@lru_cache(maxsize=256)  # the panels of an image have the same labels
def _vertical_label(label: str) -> Image.Image:
    """Return an image of the label, which reads from bottom to top."""
    image = Image.new("RGB", (_text_width(label) + 2, CELL_SIZE), _WHITE)
    ImageDraw.Draw(image).text((0, 0), label, _TEXT_COLOR, _font(LABEL_SIZE))
    return image.rotate(90, expand=True)


def _shorten(label: str) -> str:
    return label if len(label) <= _MAX_LABEL_CHARACTERS else label[: _MAX_LABEL_CHARACTERS - 1] + "…"


def _text_width(text: str, size: int = LABEL_SIZE) -> int:
    return round(_font(size).getlength(text))


@cache
def _glyph(character: str) -> tuple[tuple[int, int], bytes]:
    """Return size and pixels of a character alone; Raqm's layout would put a circle under a combining one."""
    mask = _font(LABEL_SIZE, ImageFont.Layout.BASIC).getmask(character)
    return mask.size, bytes(mask)


@cache
def _font(size: int, layout: ImageFont.Layout | None = None) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans 2.37, unmodified: it has Latin, Greek, Cyrillic, Arabic, Hebrew, Armenian and Georgian.

    Pillow's built-in font has ASCII letters only. DejaVu has no Chinese, Japanese, Korean, Thai or Indic scripts: it
    draws such characters as boxes; see `missing_characters`.
    """
    return ImageFont.truetype(str(Path(__file__).parent / "font" / "DejaVuSans.ttf"), size, layout_engine=layout)
