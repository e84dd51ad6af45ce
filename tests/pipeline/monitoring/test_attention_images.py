"""Images of attention: which pixels show a value, which scripts have labels, and what drawing leaves."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from pipeline.monitoring.attention_images import CELL_SIZE, Labels, axis_labels, draw_attention
from tests.conftest import ROOT


def picture(values: np.ndarray, rows: list[str], columns: list[str], labels: Labels | None = None) -> np.ndarray:
    """The brightness of an image whose second panel shows the values; the first one is empty."""
    labels = labels or axis_labels([], [], "", "")
    labels = labels._replace(by_axis={"next": rows, "source": columns})
    image = draw_attention("cross", [np.stack((np.zeros_like(values), values))], labels, [0], [0, 1], "")
    return np.asarray(image.convert("L")).astype(int)


def darkened(row: int, column: int, label: str = "a") -> tuple[int, int, int, int]:
    """Left, upper, right and lower end of what gets dark when one value is 1 and not 0."""
    values = np.zeros((2, 3), dtype=np.float32)
    before = picture(values, [label, "b"], [label, "y", "z"])
    values[row, column] = 1
    rows, columns = np.nonzero(before - picture(values, [label, "b"], [label, "y", "z"]) > 150)
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def test_a_value_is_a_square_in_its_row_and_column() -> None:
    left, upper, right, lower = darkened(0, 0)
    assert (right - left, lower - upper) == (CELL_SIZE, CELL_SIZE)
    down, aside = CELL_SIZE, 2 * CELL_SIZE
    assert darkened(1, 2) == (left + aside, upper + down, right + aside, lower + down)


def test_panels_follow_one_another_by_layer_and_head() -> None:
    labels = axis_labels([], [], "", "")._replace(by_axis={"next": ["a"], "source": ["x"]})
    layers, heads = [1, 2], [0, 2, 3, 4, 5]

    def drawn(weights: np.ndarray) -> np.ndarray:
        return np.asarray(draw_attention("cross", list(weights), labels, layers, heads, "").convert("L"))

    places, empty = [], drawn(np.zeros((3, 6, 1, 1), dtype=np.float32))
    for layer, head in product(layers, heads):
        weights = np.zeros((3, 6, 1, 1), dtype=np.float32)
        weights[layer, head] = 1
        places.append(np.argwhere(drawn(weights) != empty).min(axis=0).tolist())
    rows, columns = zip(*places, strict=True)
    assert len({*rows}) == 3
    assert list(rows) == sorted(rows)
    assert list(columns) == [*sorted({*columns}), *sorted({*columns}), *sorted({*columns})[:2]]


def test_a_label_is_beside_its_row_and_above_its_column() -> None:
    left, upper, right, lower = darkened(1, 2, "long")
    values = np.zeros((2, 3), dtype=np.float32)
    labelled, other = (picture(values, ["long", name], ["long", "y", name]) for name in "O.")
    rows, columns = np.nonzero(other - labelled > 100)
    # Both panels have labels above, and the first one has those beside its rows for both.
    above, beside = (columns > left - 3 * CELL_SIZE) & (rows < upper - CELL_SIZE), rows >= upper
    assert left <= columns[above].min() <= columns[above].max() < right
    assert upper <= rows[beside].min() <= rows[beside].max() < lower
    assert columns[beside].max() < left - 2 * CELL_SIZE - 110


@pytest.mark.parametrize(("kind", "rows", "columns"), [("decoder", "next", "previous"), ("cross", "next", "source")])
def test_rows_are_labelled_by_what_is_predicted(kind: str, rows: str, columns: str) -> None:
    def drawn(changed: str = "") -> np.ndarray:
        by_axis = {axis: ["long", "O" if axis == changed else "."] for axis in (rows, columns)}
        labels = axis_labels([], [], "", "")._replace(by_axis=by_axis)
        image = draw_attention(kind, [np.zeros((1, 2, 2), dtype=np.float32)], labels, [0], [0], "")
        return np.asarray(image.convert("L"))

    beside, above = (np.argwhere(drawn() != drawn(axis)) for axis in (rows, columns))
    assert beside[:, 1].max() < above[:, 1].min()
    assert above[:, 0].max() < beside[:, 0].min()


def test_the_font_has_the_letters_of_many_languages() -> None:
    """German, French, Spanish, Czech, Polish, Turkish, Hungarian, Greek, Cyrillic, Arabic, Hebrew, and so on."""
    characters = list("äßéñřłğőΩЖїעשԱა₁▁…$_")
    labels = axis_labels([character * 2 for character in characters], characters, "<s>", "</s>")
    assert labels.by_axis["source"] == [*(character * 2 for character in characters), "</s>"]
    assert labels.by_axis["previous"] == ["<s>", *characters]
    # Dollar signs do not begin a formula, and a character without a glyph would be reported by a warning.
    size = len(characters) + 1
    picture(np.zeros((size, size), dtype=np.float32), labels.by_axis["next"], labels.by_axis["source"], labels)


def test_a_side_that_the_font_cannot_write_is_numbered() -> None:
    source, target = ["▁two", "▁dogs"], ["二匹", "か", "a"]
    by_axis, note = axis_labels(source, target, "<s>", "</s>")
    assert by_axis == {"source": [*source, "</s>"], "next": ["1", "2", "3", "</s>"], "previous": ["<s>", "1", "2", "3"]}
    assert note == "target pieces are numbered: DejaVu Sans has no glyphs for U+304B, U+4E8C, U+5339"
    _, note = axis_labels(["가나다라마"], ["ก"], "<s>", "</s>")
    assert note.startswith("source and target pieces are numbered: DejaVu Sans has no glyphs for U+0E01, U+AC00, ")
    assert note.endswith(", and 2 more")
    assert axis_labels(["\x01"], [], "", "").note.endswith("U+0001")


@pytest.mark.slow
def test_ranks_that_do_not_draw_do_not_import_matplotlib() -> None:
    """Torchmetrics would import it too."""
    program = """
import sys
from pipeline.metrics.private import leave_out_pyplot
leave_out_pyplot()
import pipeline.monitoring.attention_plots
assert "torchmetrics" in sys.modules
assert "matplotlib" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
