"""Drawings as PNG, painted by matplotlib, which is imported only for that."""

import io
import warnings
from typing import TYPE_CHECKING

from paceline.bench.report.drawing import TEXT, Drawing, Line, Mark, Part, Rect, Text, moved, shortened
from paceline.bench.report.palette import LIGHT_AND_DARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARGIN, SCALE = 18.0, 2  # pixels around a drawing; pixels of the picture to one of the drawing
_POINT = 0.72  # of a pixel, at 100 dots an inch


def to_png(drawing: Drawing, title: str) -> bytes:
    """The picture in light colours, with its title above it. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = moved(drawing, 34)
    whole.add(Text(0, 14, shortened(title, drawing.width, is_bold=True), is_bold=True))
    width, height = whole.width + 2 * MARGIN, whole.height + 2 * MARGIN
    figure = Figure(figsize=(width / 100, height / 100), dpi=100 * SCALE, facecolor=_rgb("surface"))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-MARGIN, width - MARGIN), ylim=(height - MARGIN, -MARGIN))
    axes.set_axis_off()
    for order, part in enumerate(whole.parts):
        _paint(axes, part, order)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a letter that the font lacks is drawn as a box
        figure.savefig(file, format="png")
    return file.getvalue()


def _paint(axes: "Axes", part: Part, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle, FancyBboxPatch, Polygon

    colour = _rgb(part.colour)
    match part:
        case Line():
            xs, ys = zip(*part.points, strict=True)
            dashes = (0, (3, 3)) if part.is_dashed else "-"
            axes.add_line(Line2D(xs, ys, color=colour, lw=part.width * _POINT, ls=dashes, zorder=order))
        case Rect():
            radius = min(part.radius, part.width / 2, part.height / 2)
            box = f"round,pad=0,rounding_size={radius}"
            place = (part.x, part.y)
            axes.add_patch(FancyBboxPatch(place, part.width, part.height, box, fc=colour, lw=0, zorder=order))
        case Mark(shape="circle"):
            axes.add_patch(Circle((part.x, part.y), part.radius, fc=colour, lw=0, zorder=order))
        case Mark():
            axes.add_patch(Polygon(part.corners, fc=colour, lw=0, zorder=order))
        case Text():
            anchors = {"start": "left", "middle": "center", "end": "right"}
            axes.text(
                part.x,
                part.y,
                part.words,
                parse_math=False,
                color=colour,
                fontsize=TEXT * _POINT,
                fontweight="bold" if part.is_bold else "normal",
                ha=anchors[part.anchor],
                va="baseline",
                zorder=order,
            )


def _rgb(colour: str) -> str:
    return LIGHT_AND_DARK[colour][0]
