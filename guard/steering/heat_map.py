"""A table of numbers as a picture: rows, columns, a colour for each cell, in SVG. Owns the drawing.

Plain SVG, because a picture of fifty rectangles needs no library. The same numbers give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

TOP, FOOT, LINE = 62, 30, 17
CELL = (92, 40)
"""Width and height of a cell with two lines."""
LOW, HIGH = (247, 251, 255), (8, 69, 148)
"""Colours of the least and the greatest value."""


@dataclass(frozen=True)
class Cell:
    """value: decides the colour. text, small: the two lines in it. faded: struck out. framed: the chosen one."""

    value: float
    text: str
    small: str = ""
    faded: bool = False
    framed: bool = False


def heat_map(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Sequence[Sequence[Cell]],
    notes: Sequence[str] = (),
    size: tuple[int, int] = CELL,
) -> str:
    """``cells[row][column]``. title: one line; the names of rows and columns stand at the edges, notes below.

    size: width and height of a cell, in pixels.
    """
    cell_w, cell_h = size
    left = 24 + int(7.5 * max(map(len, rows)))
    values = [cell.value for row in cells for cell in row]
    low, high = min(values), max(values)
    width = max(left + cell_w * len(columns) + 12, 12 + int(7.0 * max(map(len, (title, *notes)))))
    height = TOP + cell_h * len(rows) + FOOT + LINE * len(notes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 22, title, size=15, anchor="start", weight="bold"),
    ]
    parts += [_text(left + cell_w * (j + 0.5), TOP - 8, name) for j, name in enumerate(columns)]
    for i, (name, row) in enumerate(zip(rows, cells, strict=True)):
        y = TOP + cell_h * i
        parts.append(_text(left - 8, y + cell_h / 2 + 4, name, anchor="end"))
        parts += [_cell(left + cell_w * j, y, cell, _share(cell.value, low, high), size) for j, cell in enumerate(row)]
    for i, row in enumerate(cells):
        parts += [_frame(left + cell_w * j, TOP + cell_h * i, size) for j, cell in enumerate(row) if cell.framed]
    below = TOP + cell_h * len(rows) + FOOT - 6
    parts += [_text(12, below + LINE * i, note, size=12, anchor="start") for i, note in enumerate(notes)]
    return "\n".join([*parts, "</svg>", ""])


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


def _cell(x: float, y: float, cell: Cell, share: float, size: tuple[int, int]) -> str:
    width, height = size
    colour = ",".join(str(round(a + share * (b - a))) for a, b in zip(LOW, HIGH, strict=True))
    ink = "white" if share > 0.55 else "black"
    middle, second = x + width / 2, y + height - 8
    drawn = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="rgb({colour})" stroke="white"/>'
    if cell.faded:
        drawn += f'<path d="M{x + 3} {y + height - 3}L{x + width - 3} {y + 3}" stroke="#b2182b" stroke-width="1.5"/>'
    drawn += _text(middle, y + (17 if cell.small else height / 2 + 5), cell.text, fill=ink)
    if cell.small:
        drawn += _text(middle, second, cell.small, size=11, fill=ink)
    return drawn


def _frame(x: float, y: float, size: tuple[int, int]) -> str:
    inside = f'width="{size[0] - 3}" height="{size[1] - 3}"'
    return f'<rect x="{x + 1.5}" y="{y + 1.5}" {inside} fill="none" stroke="#e08214" stroke-width="4"/>'


def _text(
    x: float, y: float, text: str, size: int = 13, anchor: str = "middle", fill: str = "black", weight: str = "normal"
) -> str:
    where = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f"<text {where}>{escape(text, quote=False)}</text>"
