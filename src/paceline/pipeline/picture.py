"""A schedule to look at: as a table of text, and as an SVG that reads in light and dark.

The invariant: both show the very schedule that would run, at the times that ``clock.place`` gives it.
"""

import os
import pathlib
from collections.abc import Callable
from html import escape

from paceline.pipeline.clock import Placed, bubble_fraction, makespan, peak_in_flight, place
from paceline.pipeline.schedule import Action, Schedule

_ROW, _BAR, _LEFT, _TOP, _WIDTH = 34, 28, 80, 44, 900
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 14px; font-weight: 600 } .quiet { fill: #656d76 }
  .inside { fill: #ffffff; font-size: 11px; text-anchor: middle }
  .F { fill: #2a78d6 } .B { fill: #6e7781 } .F2 { fill: #1f5aa3 } .B2 { fill: #4b535c } .wait { fill: #d8dee4 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .quiet { fill: #9198a1 } .inside { fill: #ffffff } .wait { fill: #2b3138 }
    .F { fill: #3987e5 } .F2 { fill: #2766b5 }
  }
"""


def table(schedule: Schedule) -> str:
    """A row a lane, a column a unit of time, with F and B as long as one another; dots are waits."""
    placed = place(schedule)
    labels = {item.action: _label(schedule, item.action) for item in placed}
    width = max(map(len, labels.values()), default=1)
    rows = [[".".rjust(width)] * round(makespan(placed)) for _ in schedule.lanes]
    for item in placed:
        rows[item.lane][round(item.begin)] = labels[item.action].rjust(width)
    lines = [f"lane {lane}  {' '.join(row)}" for lane, row in enumerate(rows)]
    bubble = bubble_fraction(placed, len(schedule.lanes))
    kept = ", ".join(map(str, peak_in_flight(schedule)))
    return "\n".join([*lines, f"{schedule.name}: bubble {bubble:.1%}; activations kept at most, by lane: {kept}"])


def draw(
    schedule: Schedule,
    path: "str | os.PathLike[str] | None" = None,
    duration: Callable[[Action], float] = lambda action: 1.0 if action.kind == "F" else 2.0,
) -> str:
    """The schedule as an SVG.

    Args:
        path: where to write it as well.
        duration: of each action, in any unit; by default a backward takes twice as long as a forward.
    Returns:
        The SVG's text.
    """
    placed = place(schedule, duration)
    bubble = bubble_fraction(placed, len(schedule.lanes))
    title = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, bubble {bubble:.1%}"
    )
    svg = draw_placed(placed, len(schedule.lanes), title, lambda action: _label(schedule, action))
    if path is not None:
        pathlib.Path(path).write_text(svg)
    return svg


def draw_placed(placed: list[Placed], num_lanes: int, title: str, label: Callable[[Action], str] = str) -> str:
    """Actions at their times, planned or measured, as an SVG."""
    span = makespan(placed) or 1.0
    start = min((item.begin for item in placed), default=0.0)
    scale = (_WIDTH - _LEFT - 20) / span
    height = _TOP + _ROW * num_lanes + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
    ]
    for lane in range(num_lanes):
        y = _TOP + _ROW * lane
        parts.append(f'<text class="quiet" x="8" y="{y + 19}">lane {lane}</text>')
        parts.append(f'<rect class="wait" x="{_LEFT}" y="{y}" width="{span * scale:.1f}" height="{_BAR}"/>')
    for lane, action, begin, end in placed:
        x, y, width = _LEFT + (begin - start) * scale, _TOP + _ROW * lane, (end - begin) * scale
        shade = action.kind + ("2" if action.stage // num_lanes % 2 else "")
        parts.append(
            f'<rect class="{shade}" x="{x + 0.5:.1f}" y="{y}" width="{max(width - 1, 0.5):.1f}" height="{_BAR}">'
            f"<title>{escape(str(action))}: {begin:g} to {end:g}</title></rect>"
        )
        text = label(action)
        if width > 7 * len(text):
            parts.append(f'<text class="inside" x="{x + width / 2:.1f}" y="{y + 18}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _label(schedule: Schedule, action: Action) -> str:
    """Without the stage, where the lane says it."""
    return str(action) if schedule.num_stages > len(schedule.lanes) else f"{action.kind}{action.microbatch}"
