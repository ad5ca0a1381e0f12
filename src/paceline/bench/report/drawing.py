"""What a picture is made of, whatever it is written as: SVG in a page, or PNG.

The invariant: a drawing is a value in pixels, with y downwards; colours are names from the palette.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]

TEXT = 12.0  # the size of words


@dataclass(frozen=True)
class Line:
    """A polyline."""

    points: tuple[Point, ...]
    colour: str
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True)
class Rect:
    """A bar; ``says`` is shown to who points at it."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    says: str = ""
    radius: float = 2.0


@dataclass(frozen=True)
class Mark:
    """A small shape around a point."""

    x: float
    y: float
    colour: str
    shape: str = "circle"  # or one of SHAPES
    says: str = ""
    radius: float = 4.0

    @property
    def corners(self) -> tuple[Point, ...]:
        return tuple((self.x + self.radius * x, self.y + self.radius * y) for x, y in SHAPES[self.shape])


SHAPES: dict[str, tuple[Point, ...]] = {
    "diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    "triangle": ((0, -1.15), (1.15, 0.85), (-1.15, 0.85)),
}


@dataclass(frozen=True)
class Text:
    """Words; ``y`` is their baseline."""

    x: float
    y: float
    words: str
    colour: str = "ink"
    anchor: str = "start"  # or "middle", "end"
    is_bold: bool = False


Part: TypeAlias = Line | Rect | Mark | Text


@dataclass
class Drawing:
    """Parts, painted in their order."""

    width: float
    height: float
    parts: list[Part] = field(default_factory=list)

    def add(self, *parts: Part) -> None:
        self.parts += parts


def moved(drawing: Drawing, down: float) -> Drawing:
    """The same with ``down`` pixels of room above it."""
    parts: list[Part] = []
    for part in drawing.parts:
        if isinstance(part, Line):
            parts.append(dataclasses.replace(part, points=tuple((x, y + down) for x, y in part.points)))
        else:
            parts.append(dataclasses.replace(part, y=part.y + down))
    return Drawing(drawing.width, drawing.height + down, parts)


def width_of(words: str, *, is_bold: bool = False) -> float:
    """About how many pixels words take, in a font as wide as DejaVu Sans."""
    ems = sum(
        1.0 if character > "\u2e80" else 0.9 if character in "mwMW%" else 0.36 if character in " .,:;'|!ijlIf" else 0.63
        for character in words
    )
    return ems * TEXT * (1.17 if is_bold else 1.0)


def shortened(words: str, width: float, *, is_bold: bool = False) -> str:
    """As many of the words as fit."""
    if width_of(words, is_bold=is_bold) <= width:
        return words
    fitting = (words[:end].rstrip() + "…" for end in range(len(words) - 1, 0, -1))
    return next((text for text in fitting if width_of(text, is_bold=is_bold) <= width), "…")


def spread(wished: Sequence[float], distance: float, low: float, high: float) -> list[float]:
    """Places near those wished for, in the same order, at least ``distance`` apart, between ``low`` and ``high``.

    Where there is too little room for that, they are nearer to one another.
    """
    if len(wished) > 1:
        distance = min(distance, (high - low) / (len(wished) - 1))
    places = [0.0] * len(wished)
    order = sorted(range(len(wished)), key=lambda index: wished[index])
    least = low
    for index in order:
        places[index] = least = max(wished[index], least)
        least += distance
    most = high
    for index in reversed(order):
        places[index] = most = min(places[index], most)
        most -= distance
    return places
