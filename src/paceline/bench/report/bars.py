"""Bars from zero to the right, in groups, each of several pieces; and the key to the colours of pieces."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.bench.report.drawing import Drawing, Line, Mark, Rect, Text, shortened, width_of
from paceline.bench.report.scales import Axis

ROW, LOW_ROW, HEADING, GAP = 24.0, 18.0, 22.0, 12.0
MANY = 16  # bars; more are lower


@dataclass(frozen=True)
class Piece:
    """Part of a bar; ``says`` is shown to who points at it."""

    value: float
    colour: str
    says: str


@dataclass(frozen=True)
class Bar:
    """Pieces end to end, and what stands behind them."""

    label: str
    pieces: tuple[Piece, ...]
    end: str


@dataclass(frozen=True)
class Group:
    """Bars with a heading."""

    heading: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Meaning:
    """What a colour means, or a mark in that colour."""

    words: str
    colour: str
    shape: str = ""


def bar_chart(groups: Sequence[Group], axis: Axis, width: float, key: Sequence[Meaning] = ()) -> Drawing:
    """Draw the bars, one below the other, on an axis that begins at zero."""
    bars = [bar for group in groups for bar in group.bars]
    row = ROW if len(bars) <= MANY else LOW_ROW
    left = min(max(width_of(bar.label) for bar in bars), 0.4 * width) + 8
    right = width - max(width_of(bar.end) for bar in bars) - 10
    drawing = Drawing(width, 0)
    y = draw_key(drawing, key, width)
    shapes = Drawing(width, 0)
    for group in groups:
        shapes.add(Text(0, y + 14, shortened(group.heading, width, is_bold=True), is_bold=True))
        y += HEADING
        draw_grid(drawing, axis, left, right, y - 3, y + row * len(group.bars) - 3)
        for bar in group.bars:
            shapes.add(Text(left - 8, y + row / 2, shortened(bar.label, left - 8), "quiet", "end"))
            x = left
            for piece in bar.pieces:
                end = x + axis.place(piece.value, 0, right - left)
                if piece.value > 0:
                    shapes.add(Rect(x, y, max(end - x, 0.75), row - 8 + 2, piece.colour, piece.says, radius=1.0))
                x = end
            shapes.add(Text(x + 6, y + row / 2, bar.end))
            y += row
        y += GAP
    y -= GAP
    draw_ticks(drawing, axis, left, right, y)
    drawing.add(Text(left - 14, y + 16, shortened(axis.label, left - 14), "quiet", "end"), *shapes.parts)
    drawing.height = y + 22
    return drawing


def draw_key(drawing: Drawing, key: Sequence[Meaning], width: float) -> float:
    """Patches of colour and what they mean, in as many rows as they need; return where what follows begins."""
    x = y = 0.0
    for meaning in key:
        needed = 20 + width_of(meaning.words)
        if x and x + needed > width:
            x, y = 0.0, y + 20
        if meaning.shape:
            drawing.add(Mark(x + 7, y + 7, meaning.colour, meaning.shape))
        else:
            drawing.add(Rect(x, y + 1, 14, 12, meaning.colour))
        drawing.add(Text(x + 20, y + 11, meaning.words))
        x += needed + 16
    return y + 26 if key else y


def draw_grid(drawing: Drawing, axis: Axis, left: float, right: float, top: float, low: float) -> None:
    """A line for each tick."""
    places = (axis.place(tick, left, right) for tick in axis.ticks)
    drawing.add(*(Line(((x, top), (x, low)), "grid") for x in places))


def draw_ticks(drawing: Drawing, axis: Axis, left: float, right: float, low: float) -> None:
    """The ticks' values below ``low``, where there is room."""
    free = -1e9
    for tick in axis.ticks:
        x, name = axis.place(tick, left, right), axis.text(tick)
        half = width_of(name) / 2
        if free < x - half and x + half <= drawing.width:
            drawing.add(Text(x, low + 16, name, "quiet", "middle"))
            free = x + half + 6
