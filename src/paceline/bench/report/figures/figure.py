"""A figure, as a value."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.bench.report.drawing import Drawing


@dataclass(frozen=True)
class Table:
    """Rows of words; the first column names a row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """Something that was measured, to be looked at and read.

    Attributes:
        name: of its place in the page, and of its file.
        says: what is to be seen, in words.
        draw: at a width in pixels.
        is_half: two of these stand side by side where there is room.
    """

    name: str
    title: str
    says: str
    draw: Callable[[float], Drawing]
    table: Table
    is_half: bool = False
