"""Lines over two axes, each named where it ends rather than in a legend."""

from dataclasses import dataclass

from paceline.bench.report.bars import draw_grid, draw_ticks
from paceline.bench.report.drawing import Drawing, Line, Mark, Point, Text, shortened, spread, width_of
from paceline.bench.report.scales import Axis

TOP, BOTTOM, RIGHT = 26.0, 40.0, 14.0
ROW = 16.0  # from one line of words to the next
GAP = 12.0  # from where a line ends to its name


@dataclass(frozen=True)
class Series:
    """A line, or a single point.

    Attributes:
        points: in ascending x, at least one.
        says: of each point, to who points at it; a point of which nothing is said has no mark.
    """

    label: str
    colour: str
    points: tuple[Point, ...]
    says: tuple[str, ...] = ()
    shape: str = "circle"
    is_dashed: bool = False


def line_chart(series: list[Series], x_axis: Axis, y_axis: Axis, width: float) -> Drawing:
    """Draw the series; those that come last are on top."""
    height = min(max(0.62 * width, 230.0), 330.0)
    names = [shortened(one.label, 0.42 * width, is_bold=True) for one in series]
    left = max(width_of(y_axis.text(tick)) for tick in y_axis.ticks) + 10
    right = width - max([RIGHT, *(width_of(name, is_bold=True) + GAP for name in names)])
    low = height - BOTTOM
    drawing = Drawing(width, height)
    _grid(drawing, x_axis, y_axis, left, right, width)
    ends = []
    for one in series:
        points = tuple((x_axis.place(x, left, right), y_axis.place(y, low, TOP)) for x, y in one.points)
        ends.append(points[-1])
        if len(points) > 1:
            drawing.add(Line(points, one.colour, 1.5 if one.is_dashed else 2.25, one.is_dashed))
        marked = zip(points, one.says, strict=False)
        drawing.add(*(Mark(x, y, one.colour, one.shape, says) for (x, y), says in marked if says))
    _name_ends(drawing, list(zip(series, names, ends, strict=True)))
    return drawing


def _name_ends(drawing: Drawing, ends: list[tuple[Series, str, Point]]) -> None:
    """To the right of where the lines end; where several end at one x, apart from one another."""
    for x in sorted({x for _, _, (x, _) in ends}):
        here = [end for end in ends if end[2][0] == x]
        places = spread([y for _, _, (_, y) in here], ROW, TOP + 2, drawing.height - BOTTOM)
        for (one, name, (_, y)), place in zip(here, places, strict=True):
            if abs(place - y) > 3:
                drawing.add(Line(((x + 6, y), (x + GAP - 3, place)), "grid"))
            drawing.add(Text(x + GAP, place + 4, name, one.colour, is_bold=not one.is_dashed))


def _grid(drawing: Drawing, x_axis: Axis, y_axis: Axis, left: float, right: float, width: float) -> None:
    low = drawing.height - BOTTOM
    for tick in y_axis.ticks:
        y = y_axis.place(tick, low, TOP)
        drawing.add(Line(((left, y), (right, y)), "grid"), Text(left - 8, y + 4, y_axis.text(tick), "quiet", "end"))
    draw_grid(drawing, x_axis, left, right, low, low + 4)
    draw_ticks(drawing, x_axis, left, right, low + 3)
    drawing.add(Line(((left, low), (right, low)), "quiet"))
    drawing.add(Text(0, 12, shortened(y_axis.label, width), "quiet"))
    drawing.add(Text((left + right) / 2, drawing.height - 4, x_axis.label, "quiet", "middle"))
