"""Where a step's time goes, for each way and number of devices."""

from collections.abc import Iterator

from paceline.bench.report import units
from paceline.bench.report.bars import Bar, Group, Meaning, Piece, bar_chart
from paceline.bench.report.drawing import Drawing
from paceline.bench.report.figures.figure import Figure, Table
from paceline.bench.report.looks import name_of, named, short_name_of
from paceline.bench.report.scales import from_zero
from paceline.bench.results import MORE_THREADS, Bench, Run

KEY = (
    Meaning("forward", "forward"),
    Meaning("backward", "backward"),
    Meaning("waiting for communication", "exposed"),
    Meaning("optimizer", "optimizer"),
    Meaning("other, or not looked into", "rest"),
)


def step(bench: Bench) -> Figure | None:
    """None where no step was measured."""
    runs = [run for run in bench.runs if run.median_s]
    if not runs:
        return None
    groups = [
        Group(
            f"{number} device" + ("s" if number > 1 else ""),
            tuple(_bar(bench, run) for run in runs if run.num_devices == number),
        )
        for number in sorted({run.num_devices for run in runs})
    ]
    most_ms = max(sum(piece.value for piece in bar.pieces) for group in groups for bar in group.bars)

    def draw(width: float) -> Drawing:
        return bar_chart(groups, from_zero(most_ms, units.plain, "ms", most=6 if width > 600 else 3), width, KEY)

    says = (
        "A step on the slowest rank; each part is a median. "
        "With the same batch for each device, what is longer than one process's step is what several cost."
    )
    head = ("way", "devices", "forward", "backward", "waiting for communication", "optimizer", "whole step")
    return Figure("step", "Where a step's time goes", says, draw, Table(head, tuple(_row(bench, run) for run in runs)))


def _times(run: Run) -> tuple[float, ...]:
    """In the order of the key, without the rest; empty where the way was not looked into."""
    phases = run.phases
    return (phases.forward_s, phases.backward_s, phases.exposed_s, phases.optimizer_s) if phases else ()


def _parts(run: Run) -> Iterator[tuple[Meaning, float]]:
    times = _times(run)
    yield from zip(KEY, times, strict=False)
    yield KEY[-1], max(0.0, (run.median_s or 0.0) - sum(times))


def _bar(bench: Bench, run: Run) -> Bar:
    name = named(bench, run)
    pieces = tuple(
        Piece(time_s * 1e3, meaning.colour, f"{name}, {meaning.words}: {units.seconds(time_s)}")
        for meaning, time_s in _parts(run)
    )
    label = f"{run.num_devices} × threads" if run.way == MORE_THREADS else short_name_of(bench, run)
    return Bar(label, pieces, units.seconds(run.median_s or 0.0))


def _row(bench: Bench, run: Run) -> tuple[str, ...]:
    cells = (
        "" if time_s is None else units.seconds(time_s) for time_s in (*(_times(run) or (None,) * 4), run.median_s)
    )
    return (name_of(bench, run), str(run.num_devices), *cells)
