"""How long an all_reduce takes and how many bytes a second it moves, over sizes, beside a copy in memory."""

import statistics
from collections.abc import Callable, Sequence

from paceline.bench.report import units
from paceline.bench.report.drawing import Drawing, Point
from paceline.bench.report.figures.figure import Figure, Table
from paceline.bench.report.lines import Series, line_chart
from paceline.bench.report.looks import backend_colour
from paceline.bench.report.scales import Axis, from_zero, of_powers, within
from paceline.bench.results import Bench, Collective

SHAPES = ("circle", "diamond", "triangle", "square")


def latency(bench: Bench) -> Figure | None:
    """None where no all_reduce was measured."""
    chosen = _on_most_ranks(bench)
    if not chosen:
        return None
    series = _series(chosen, lambda _, time_s: time_s, units.seconds)
    low, high = _range(series)

    def draw(width: float) -> Drawing:
        y_axis = of_powers(low, high, 10, units.power_of_seconds, "time of an all_reduce")
        return line_chart(series, _sizes(chosen, width), y_axis, width)

    says = f"On {chosen[0].world_size} ranks, medians. A copy of as many bytes by every rank is what memory allows."
    table = _table(bench, lambda one: (units.seconds(one.seconds), units.seconds(one.copy_s)), ("time", "a copy"))
    return Figure("latency", "all_reduce: time", says, draw, table, True)


def bandwidth(bench: Bench) -> Figure | None:
    """None where no all_reduce was measured."""
    chosen = _on_most_ranks(bench)
    if not chosen:
        return None
    series = _series(chosen, lambda size, time_s: size / time_s / 1e9, lambda value: units.rate(value * 1e9))
    _, high = _range(series)

    def draw(width: float) -> Drawing:
        y_axis = from_zero(high, units.plain, "GB/s: bytes of the tensor over the time")
        return line_chart(series, _sizes(chosen, width), y_axis, width)

    says = "Small messages are bound by latency, large ones by memory or the wire: there a line comes near its limit."
    table = _table(
        bench,
        lambda one: (_rate(one.size_bytes, one.seconds), _rate(one.size_bytes, one.copy_s)),
        ("all_reduce", "a copy"),
    )
    return Figure("bandwidth", "all_reduce: bandwidth", says, draw, table, True)


def _on_most_ranks(bench: Bench) -> list[Collective]:
    good = [one for one in bench.collectives if one.seconds > 0 and one.copy_s > 0 and one.size_bytes > 0]
    most = max((one.world_size for one in good), default=0)
    return sorted((one for one in good if one.world_size == most), key=lambda one: one.size_bytes)


def _series(
    chosen: Sequence[Collective], value: Callable[[int, float], float], text: Callable[[float], str]
) -> list[Series]:
    """The copy's first; then a series for each backend."""
    copies: dict[int, list[float]] = {}
    times: dict[str, list[tuple[int, float]]] = {}
    for one in chosen:
        copies.setdefault(one.size_bytes, []).append(one.copy_s)
        times.setdefault(one.backend, []).append((one.size_bytes, one.seconds))
    limit = tuple((size, value(size, statistics.median(all_s))) for size, all_s in copies.items())
    series = [Series("a copy", "quiet", limit, is_dashed=True)]
    for number, (backend, measured) in enumerate(sorted(times.items(), key=lambda item: item[0] == "shm")):
        points: tuple[Point, ...] = tuple((size, value(size, time_s)) for size, time_s in measured)
        says = tuple(f"{backend}, {units.size(x)}: {text(y)}" for x, y in points)
        series.append(Series(backend, backend_colour(backend), points, says, SHAPES[-number % len(SHAPES)]))
    return series


def _range(series: Sequence[Series]) -> tuple[float, float]:
    values = [y for one in series for _, y in one.points]
    return min(values), max(values)


def _sizes(chosen: Sequence[Collective], width: float) -> Axis:
    low, high = chosen[0].size_bytes, chosen[-1].size_bytes
    return within(low, high, 4, units.size, "bytes of the tensor", most=4 if width < 420 else 8)


def _rate(size_bytes: int, time_s: float) -> str:
    return units.rate(size_bytes / time_s) if time_s > 0 else ""


def _table(bench: Bench, cells: Callable[[Collective], tuple[str, str]], head: tuple[str, str]) -> Table:
    ordered = sorted(bench.collectives, key=lambda one: (one.world_size, one.backend, one.size_bytes))
    rows = tuple((one.backend, str(one.world_size), units.size(one.size_bytes), *cells(one)) for one in ordered)
    return Table(("backend", "ranks", "size", *head), rows)
