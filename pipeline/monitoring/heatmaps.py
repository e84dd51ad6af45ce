"""Matrices as pictures, with names along their sides."""

from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

CELL, TEXT, TITLE = 15, 12, 15
"""Pixels: a matrix's cell, names, titles."""
_GAP = 18
_LONGEST_NAME = 14
_WHITE, _BLUE, _RED = (255, 255, 255), (8, 48, 120), (160, 20, 20)
_INK = _BLUE
"""One hue for all: a small palette then has every shade of it."""


class Panel(NamedTuple):
    """One matrix of the picture."""

    title: str
    values: NDArray[np.float32]
    """[rows, columns], from 0 (white) to 1 (dark)."""
    rows: list[str]
    columns: list[str]


def heat_maps(title: str, panels: list[Panel], across: int) -> Image.Image:
    """Matrices of one size side by side, so many to a line, each with names along its left and its top."""
    names = [name for panel in panels for name in panel.rows]
    left = max(_width(_short(name)) for name in names) + 6
    top = max(_width(_short(name)) for panel in panels for name in panel.columns) + 6
    rows, columns = panels[0].values.shape
    width, height = left + columns * CELL + _GAP, top + rows * CELL + TITLE + _GAP + 4
    lines = -(-len(panels) // across)
    head = TITLE + 14 + (TITLE + 3) * title.count("\n")
    needed = max(across * width, *(_width(line, TITLE) for line in title.split("\n"))) + _GAP
    picture = Image.new("RGB", (needed, head + lines * height), _WHITE)
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP // 2, 4), title, _INK, _font(TITLE))
    for number, panel in enumerate(panels):
        x, y = _GAP // 2 + number % across * width, head + number // across * height
        draw.text((x + left, y), panel.title, _INK, _font(TITLE - 2))
        y += TITLE + 4 + top
        for column, name in enumerate(panel.columns):
            standing = _standing(_short(name))
            picture.paste(standing, (x + left + column * CELL, y - standing.height - 2))
        for row, name in enumerate(panel.rows):
            text = _short(name)
            draw.text((x + left - 4 - _width(text), y + row * CELL), text, _INK, _font(TEXT))
        cells = _colours(panel.values, _BLUE).resize((columns * CELL, rows * CELL), Image.Resampling.NEAREST)
        picture.paste(cells, (x + left, y))
        draw.rectangle((x + left - 1, y - 1, x + left + columns * CELL, y + rows * CELL), outline=(193, 203, 221))
    # Sixteen shades take half a byte a pixel.
    return picture.quantize(16, dither=Image.Dither.NONE)


def matrix_picture(title: str, values: NDArray[np.float32], rows: str, columns: str) -> Image.Image:
    """One large matrix [rows, columns] of values from -1 (red) over 0 (white) to 1 (blue), its rows numbered."""
    above = _colours(values.clip(0, 1), _BLUE)
    below = _colours((-values).clip(0, 1), _RED)
    cells = Image.fromarray(np.minimum(np.asarray(above), np.asarray(below)))
    scale = max(1, 640 // cells.width)
    cells = cells.resize((cells.width * scale, cells.height * 3), Image.Resampling.NEAREST)
    left, top = 70, 50
    width = left + max(cells.width, _width(title, TITLE), _width(columns)) + _GAP
    picture = Image.new("RGB", (width, top + cells.height + _GAP), _WHITE)
    picture.paste(cells, (left, top))
    draw = ImageDraw.Draw(picture)
    draw.text((left, 4), title, _INK, _font(TITLE))
    draw.text((left, top - 20), columns, _INK, _font(TEXT))
    draw.text((4, top - 20), rows, _INK, _font(TEXT))
    for row in range(0, values.shape[0], max(1, values.shape[0] // 8)):
        draw.text((left - 8 - _width(str(row)), top + 3 * row - 6), str(row), _INK, _font(TEXT))
    return picture.quantize(128, dither=Image.Dither.NONE)


def _colours(values: NDArray[np.float32], dark: tuple[int, int, int]) -> Image.Image:
    """From white to dark, values from 0 to 1."""
    share = values.clip(0.0, 1.0)[..., None]
    return Image.fromarray((255 + (np.array(dark) - 255) * share).astype(np.uint8))


@lru_cache(maxsize=256)  # each stands over many matrices
def _standing(name: str) -> Image.Image:
    """A name that reads upwards, its end at the bottom."""
    text = Image.new("RGB", (_width(name) + 2, CELL), _WHITE)
    ImageDraw.Draw(text).text((0, 0), name, _INK, _font(TEXT))
    return text.rotate(90, expand=True)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"


def _width(text: str, size: int = TEXT) -> int:
    return round(_font(size).getlength(text))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # DejaVu has Latin, Greek, Cyrillic, Arabic and more; Pillow's own font not even German.
    return ImageFont.truetype(str(Path(__file__).parent / "font" / "DejaVuSans.ttf"), size)
