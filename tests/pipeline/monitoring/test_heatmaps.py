"""Heat maps: which pixels show a value, and which scripts the font has."""

import numpy as np
import pytest

from pipeline.monitoring.heatmaps import CELL_SIZE, Panel, _font, draw_matrix, draw_panels


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
