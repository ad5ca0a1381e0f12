"""The most memory that each device held, for each way: where it is more on some than on others."""

from collections.abc import Iterator

from paceline.bench.report import units
from paceline.bench.report.bars import Bar, Group, Piece, bar_chart
from paceline.bench.report.drawing import Drawing
from paceline.bench.report.figures.figure import Figure, Table
from paceline.bench.report.looks import look_of, name_of, named, on
from paceline.bench.report.scales import from_zero
from paceline.bench.results import MORE_THREADS, Bench, Run

UNEVEN = 1.05  # times the mean: less is not worth a word


def memory(bench: Bench) -> Figure | None:
    """None where none was measured. Of each way, on the most devices."""
    runs: dict[str, Run] = {}
    for run in sorted(bench.runs, key=lambda run: run.num_devices):
        if run.peak_bytes and run.way != MORE_THREADS:
            runs[name_of(bench, run)] = run
    if not runs:
        return None
    top_bytes = max(max(run.peak_bytes) for run in runs.values())
    unit, unit_bytes = ("GiB", 2**30) if top_bytes >= 2**31 else ("MiB", 2**20)

    def draw(width: float) -> Drawing:
        groups = [
            Group(named(bench, run), tuple(_bars(name, run, unit_bytes, has_room=width > 400)))
            for name, run in runs.items()
        ]
        axis = from_zero(top_bytes / unit_bytes, units.plain, unit, most=6 if width > 600 else 3)
        return bar_chart(groups, axis, width)

    rows = tuple(
        (name, on(run), units.size(max(run.peak_bytes)), units.size(min(run.peak_bytes)), imbalance(run))
        for name, run in runs.items()
    )
    head = ("way", "on", "most", "least", "most over mean")
    says = "The peak of each device. The fullest one decides how large a model or a batch can be."
    if not bench.machine.devices:
        says += " On the CPU that of a process is what it grows by, and that of a replica what its tensors take."
    return Figure("memory", "Memory per device", says, draw, Table(head, rows))


def imbalance(run: Run) -> str:
    """The fullest device over the mean, in words; empty where that says nothing."""
    return f"{run.imbalance:.2f}" if run.imbalance is not None and len(run.peak_bytes) > 1 else ""


def _bars(name: str, run: Run, unit_bytes: int, *, has_room: bool) -> Iterator[Bar]:
    noun = look_of(run.way).devices
    for number, peak in enumerate(run.peak_bytes):
        label = f"{noun} {number}" if len(run.peak_bytes) > 1 else noun
        piece = Piece(peak / unit_bytes, look_of(run.way).colour, f"{name}, {label}: {units.size(peak)}")
        is_uneven = has_room and peak == max(run.peak_bytes) and (run.imbalance or 0.0) >= UNEVEN
        yield Bar(label, (piece,), units.size(peak) + (f", {imbalance(run)} × mean" if is_uneven else ""))
