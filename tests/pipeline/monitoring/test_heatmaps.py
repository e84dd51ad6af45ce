"""Heat maps: which pixels show a value, and which scripts the font has."""

import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.monitoring.attention_images import drawable
from pipeline.monitoring.heatmaps import CELL_SIZE, Panel, _font, draw_matrix, draw_panels, missing_characters


def darkened(row: int, column: int) -> tuple[int, int, int, int]:
    """Left, upper, right and lower end of what gets dark when one value of the second panel is 1 and not 0."""
    images = []
    for value in (0.0, 1.0):
        matrix = np.zeros((2, 3), dtype=np.float32)
        matrix[row, column] = value
        panels = [Panel("one", np.zeros((2, 3), dtype=np.float32), ["a", "b"], ["x", "y", "z"])]
        panels.append(Panel("two", matrix, ["a", "b"], ["x", "y", "z"]))
        images.append(np.asarray(draw_panels("title\nsecond line", panels, 1).convert("L")).astype(int))
    rows, columns = np.nonzero(images[0] - images[1] > 150)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_a_value_is_a_square_in_its_row_and_column() -> None:
    left, upper, right, lower = darkened(0, 0)
    assert (right - left, lower - upper) == (CELL_SIZE, CELL_SIZE)
    down, aside = CELL_SIZE, 2 * CELL_SIZE
    assert darkened(1, 2) == (left + aside, upper + down, right + aside, lower + down)


def test_a_matrix_is_blue_above_zero_and_red_below() -> None:
    values = np.array([[1.0, -1.0], [0.0, 0.0]], dtype=np.float32)
    pixels = np.asarray(draw_matrix("title", values, "row", "column").convert("RGB"))
    upper = pixels[50:53, 70:710].reshape(-1, 3)
    assert [tuple(color) for color in (upper[0], upper[-1])] == [(8, 48, 120), (160, 20, 20)]
    assert (pixels[53:56, 70:710] == 255).all()


@pytest.mark.parametrize("character", "äßéñřłğőΩЖїعשԱა₁▁…")
def test_the_font_has(character: str) -> None:
    """German, French, Spanish, Czech, Polish, Turkish, Hungarian, Greek, Cyrillic, Arabic, Hebrew, and so on."""
    missing = bytes(_font(12).getmask("\uffff"))
    assert bytes(_font(12).getmask(character)) != missing
    assert bytes(_font(12).getmask("漢")) == missing


def test_missing_characters_are_those_without_a_glyph() -> None:
    """Against the font's own table of the characters up to U+FFFF, in format 4."""
    font = _font(12)
    data = Path(font.path).read_bytes()
    tables = {data[at : at + 4]: struct.unpack_from(">II", data, at + 8) for at in range(12, 12 + 16 * data[5], 16)}
    start = tables[b"cmap"][0]
    records = [struct.unpack_from(">HHI", data, start + 4 + 8 * i) for i in range(data[start + 3])]
    begin = next(start + offset for platform, encoding, offset in records if (platform, encoding) == (3, 1))
    count = struct.unpack_from(">H", data, begin + 6)[0] // 2
    ends = struct.unpack_from(f">{count}H", data, begin + 14)
    starts, deltas, offsets = (
        struct.unpack_from(f">{count}H", data, begin + 16 + part * 2 * count) for part in (1, 2, 3)
    )

    def is_mapped(code: int) -> bool:
        segment = next(i for i, last in enumerate(ends) if code <= last)
        if code < starts[segment]:
            return False
        if not offsets[segment]:
            return (code + deltas[segment]) % 0x10000 != 0
        place = begin + 16 + 6 * count + 2 * segment
        return struct.unpack_from(">H", data, place + offsets[segment] + 2 * (code - starts[segment]))[0] != 0

    checked = [*range(0x21, 0x600, 7), *range(0x900, 0x1000, 5), 0x2581, 0x3042, 0x4E00, 0x6F22, 0xAC00]
    characters = [chr(code) for code in checked if chr(code).isprintable()]
    assert missing_characters(characters) == [one for one in characters if not is_mapped(ord(one))]


def test_a_side_that_the_font_cannot_write_is_numbered() -> None:
    pieces = {"source": ["▁two", "▁dogs"], "target": ["二匹", "の", "a"]}
    shown, note = drawable(pieces)
    assert shown == {"source": ["▁two", "▁dogs"], "target": ["1", "2", "3"]}
    assert note == "target pieces are numbered: the font has no signs for U+306E U+4E8C U+5339 (CJK, HIRAGANA)"
    shown, note = drawable({"source": ["가나다라마"], "target": ["ก"]})
    assert shown == {"source": ["1"], "target": ["1"]}
    assert note.startswith("source and target pieces are numbered: the font has no signs for U+0E01 U+AC00 ")
    assert note.endswith(" and 2 more (HANGUL, THAI)")
    assert drawable({"source": ["▁zwei"], "target": ["▁Hunde", "é"]}) == (
        {"source": ["▁zwei"], "target": ["▁Hunde", "é"]},
        "",
    )
