"""A timeline: lanes of bars over a common time, for each rank one of its work and one for each bucket."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.bench.report.bars import Meaning, draw_grid, draw_key, draw_ticks
from paceline.bench.report.drawing import Drawing, Line, Mark, Rect, Text, shortened, width_of
from paceline.bench.report.scales import until
from paceline.bench.report.units import plain

ROW, LEAST_ROW, BETWEEN, HEIGHT, RIGHT = 20.0, 5.0, 14.0, 640.0, 10.0
NAMED_ROW = 14.0  # the lowest row that words fit into


@dataclass(frozen=True)
class Stretch:
    """Something that lasts; ``says`` is shown to who points at it."""

    begin_s: float
    end_s: float
    colour: str
    says: str


@dataclass(frozen=True)
class Lane:
    """What one thing does; ``marks`` are moments, and what is said of them."""

    label: str
    stretches: tuple[Stretch, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class RankLanes:
    """The lanes of one rank, the first of which is its own work; ``over_s`` is when backward's was done."""

    label: str
    lanes: tuple[Lane, ...]
    over_s: float | None = None


def lane_chart(ranks: Sequence[RankLanes], width: float, key: Sequence[Meaning]) -> Drawing:
    """Draw all lanes, with moments from 0 on. Where they are many they are low, and only the ranks are named."""
    row = min(ROW, max(LEAST_ROW, HEIGHT / sum(len(rank.lanes) for rank in ranks)))
    left = _room_for_names(ranks, row, width)
    span_s = max(stretch.end_s for rank in ranks for lane in rank.lanes for stretch in lane.stretches)
    axis = until(span_s * 1e3, plain, "ms", most=10 if width > 600 else 5)
    drawing, shapes = Drawing(width, 0), Drawing(width, 0)
    top = y = draw_key(drawing, key, width)
    for rank in ranks:
        y = _draw_rank(shapes, rank, y, row, left, lambda time_s: axis.place(time_s * 1e3, left, width - RIGHT))
    y += 4 - BETWEEN
    draw_grid(drawing, axis, left, width - RIGHT, top, y)
    draw_ticks(drawing, axis, left, width - RIGHT, y)
    drawing.add(Text(left - 14, y + 16, axis.label, "quiet", "end"), *shapes.parts)
    drawing.height = y + 22
    return drawing


def _room_for_names(ranks: Sequence[RankLanes], row: float, width: float) -> float:
    needed = [width_of(rank.label, is_bold=True) + 8 + width_of(_label(rank.lanes[0], row)) for rank in ranks]
    needed += [width_of(_label(lane, row)) for rank in ranks for lane in rank.lanes]
    return min(max(needed) + 8, 0.45 * width)


def _label(lane: Lane, row: float) -> str:
    return lane.label if row >= NAMED_ROW else ""


def _draw_rank(
    shapes: Drawing, rank: RankLanes, top: float, row: float, left: float, x_of: Callable[[float], float]
) -> float:
    """Return where the next rank begins."""
    y, height = top, 0.68 * row
    shapes.add(Text(0, top + 11, shortened(rank.label, left - 8), is_bold=True))
    for number, lane in enumerate(rank.lanes):
        room = left - 8 - (width_of(rank.label, is_bold=True) + 8 if number == 0 else 0)
        if _label(lane, row):
            shapes.add(Text(left - 8, y + 11, shortened(lane.label, room), "quiet" if number else "ink", "end"))
        for stretch in lane.stretches:
            if stretch.end_s > stretch.begin_s:
                begin, end = x_of(stretch.begin_s), x_of(stretch.end_s)
                shapes.add(Rect(begin, y, max(1.0, end - begin), height, stretch.colour, stretch.says))
        shapes.add(*(Mark(x_of(time_s), y + height / 2, "ink", "diamond", says) for time_s, says in lane.marks))
        y += row
    low = max(y, top + 14)  # room for the rank's name
    if rank.over_s is not None:
        x = x_of(rank.over_s)
        shapes.add(Line(((x, top - 3), (x, low - row + height + 3)), "ink", is_dashed=True))
    return low + BETWEEN
