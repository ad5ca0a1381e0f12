"""Samples a second, and how much of what so many devices could give at most, over their number."""

from collections.abc import Callable

from paceline.bench.report import units
from paceline.bench.report.bars import Bar, Group, Piece, bar_chart
from paceline.bench.report.drawing import Drawing
from paceline.bench.report.figures.figure import Figure, Table
from paceline.bench.report.lines import Series, line_chart
from paceline.bench.report.looks import LOOKS, look_of, name_of, named, short_name_of
from paceline.bench.report.scales import Axis, from_zero
from paceline.bench.results import MORE_THREADS, ONE_PROCESS, Bench, Run

_Measure = Callable[[Run], float | None]


def throughput(bench: Bench) -> Figure | None:
    """None where no step was measured."""
    runs = _runs(bench, bench.samples_per_s)
    if not runs:
        return None
    most, top = max(run.num_devices for run in runs), max(bench.samples_per_s(run) or 0.0 for run in runs)
    series = _series(bench, runs, bench.samples_per_s, lambda value: f"{units.digits(value)} samples/s")
    alone = bench.run(ONE_PROCESS, 1)
    one = bench.samples_per_s(alone) if alone else None
    if one is not None:
        top = max(top, most * one)
        marked = (f"one process: {units.digits(one)} samples/s",)
        ideal = Series(f"{most} × one process", "quiet", ((1, one), (most, most * one)), marked, is_dashed=True)
        series.insert(0, ideal)
    bars = tuple(_bar(bench, run) for run in runs)

    def draw(width: float) -> Drawing:
        if most == 1:  # lines would be points
            return bar_chart([Group("samples a second", bars)], from_zero(top, units.plain, "", most=3), width)
        return line_chart(series, _devices(bench, runs), from_zero(top, units.plain, "samples a second"), width)

    says = "Each device has a batch of its own, so twice the devices could train twice as many samples a second."
    table = _table(bench, runs, bench.samples_per_s, units.digits)
    return Figure("throughput", "Throughput", says, draw, table, is_half=most > 1)


def efficiency(bench: Bench) -> Figure | None:
    """None where nothing was measured on several devices, or one process was not."""
    runs = _runs(bench, bench.efficiency)
    if not any(run.num_devices > 1 for run in runs):
        return None
    series = _series(bench, runs, bench.efficiency, lambda value: f"{units.percent(value)} of the ideal")
    top = max(1.0, *(y for each in series for _, y in each.points))

    def draw(width: float) -> Drawing:
        return line_chart(series, _devices(bench, runs), from_zero(top, units.percent, "share of the ideal"), width)

    says = "How much of what is added is gained. Lines begin at one process, which is 100 %."
    table = _table(bench, runs, bench.efficiency, units.percent)
    return Figure("efficiency", "Scaling efficiency", says, draw, table, is_half=True)


def _runs(bench: Bench, measure: _Measure) -> list[Run]:
    """Those for which there is a figure, as they are drawn: paceline's DistributedDataParallel last, and on top."""
    return sorted(
        (run for run in bench.runs if measure(run) is not None), key=lambda r: (_rank_of_way(r), r.num_devices)
    )


def _series(bench: Bench, runs: list[Run], measure: _Measure, text: Callable[[float], str]) -> list[Series]:
    """For each way and backend; all begin at one process."""
    alone = bench.run(ONE_PROCESS, 1)
    start = measure(alone) if alone else None
    of_each: dict[str, list[Run]] = {}
    for run in runs:
        if run.way != ONE_PROCESS:  # where the ideal begins
            of_each.setdefault(short_name_of(bench, run), []).append(run)
    series = []
    for name, own in of_each.items():
        look = look_of(own[0].way)
        points = [(run.num_devices, measure(run) or 0.0) for run in own]
        says = [f"{named(bench, run)}: {text(y)}" for run, (_, y) in zip(own, points, strict=True)]
        if start is not None and points[0][0] > 1:
            points, says = [(1, start), *points], ["", *says]
        series.append(
            Series(name, look.colour, tuple(points), tuple(says), look.shape, is_dashed=own[0].way == MORE_THREADS)
        )
    return series


def _bar(bench: Bench, run: Run) -> Bar:
    rate = bench.samples_per_s(run) or 0.0
    name = name_of(bench, run)
    return Bar(
        name, (Piece(rate, look_of(run.way).colour, f"{name}: {units.digits(rate)} samples/s"),), units.digits(rate)
    )


def _rank_of_way(run: Run) -> int:
    return list(LOOKS).index(run.way) if run.way in LOOKS else -1


def _devices(bench: Bench, runs: list[Run]) -> Axis:
    numbers = sorted({1, *(run.num_devices for run in runs)})
    label = "devices" if bench.machine.devices else "ranks or replicas"
    return Axis(numbers[0], numbers[-1], tuple(map(float, numbers)), units.plain, label)


def _table(bench: Bench, runs: list[Run], measure: _Measure, text: Callable[[float], str]) -> Table:
    numbers = sorted({run.num_devices for run in runs})
    names = dict.fromkeys(name_of(bench, run) for run in runs)
    cells = {(name_of(bench, run), run.num_devices): text(measure(run) or 0.0) for run in runs}
    head = ("way", *(f"on {number}" for number in numbers))
    return Table(head, tuple((name, *(cells.get((name, number), "") for number in numbers)) for name in names))
