"""A bench as text: the answer, tables, and what failed.

The invariant: a figure that could not be had is a dash.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.bench.report.answer import answer, warnings
from paceline.bench.results import Bench, Run

WIDTH = 100  # where there is no terminal
_NONE = "–"


def tables_of(bench: Bench) -> RenderableType:
    """For a console of rich's."""
    measured = [run for run in bench.runs if run.step_s]
    parts: list[RenderableType] = [Text(f"{answer(bench)}.", "bold"), Text("\n".join(_heading(bench)))]
    parts += [*map(Text, warnings(bench)), ""]
    if measured:
        for title, columns in _TABLES.items():
            parts += [_table(title, columns, measured, bench), ""]
    parts += [Text(_failure(run)) for run in bench.runs if run.error]
    return Group(*parts)


def _heading(bench: Bench) -> list[str]:
    machine, subject = bench.machine, bench.subject
    samples = "1 sample" if subject.batch_size == 1 else f"{subject.batch_size} samples"
    threads = "1 thread" if subject.threads == 1 else f"{subject.threads} threads"
    devices = "".join(f"{count} x {name}, " for name, count in Counter(machine.devices).items())
    devices = devices or f"{machine.cores} cores of "
    return [
        f"{subject.name}: {subject.num_parameters:,} parameters ({size(subject.parameter_bytes)}), {samples} and "
        f"{threads} a device",
        f"{devices}{machine.processor}, torch {machine.torch}",
    ]


_Column = tuple[str, Callable[[Bench, Run], str]]


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:.1f}"


def _way(_: Bench, run: Run) -> str:
    return run.way


def _devices(_: Bench, run: Run) -> str:
    return str(run.num_devices)


def _rate(bench: Bench, run: Run) -> str:
    rate = bench.samples_per_s(run)
    return _NONE if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _gain(bench: Bench, run: Run) -> str:
    gain = bench.gain(run)
    return _NONE if gain is None else f"{gain:.2f} x"


def _efficiency(bench: Bench, run: Run) -> str:
    efficiency = bench.efficiency(run)
    return _NONE if efficiency is None else f"{efficiency:.0%}"


def _phase(name: str) -> Callable[[Bench, Run], str]:
    return lambda _, run: _ms(None if run.phases is None else getattr(run.phases, name))


def _imbalance(_: Bench, run: Run) -> str:
    return _NONE if run.imbalance is None or len(run.peak_bytes) == 1 else f"{run.imbalance:.2f}"


_ROW: tuple[_Column, ...] = (("way", _way), ("devices", _devices))
_TABLES: dict[str, Sequence[_Column]] = {
    "How fast": (
        *_ROW,
        ("samples/s", _rate),
        ("gain", _gain),
        ("efficiency", _efficiency),
        ("step, ms", lambda _, run: _ms(run.median_s)),
    ),
    "Where a step goes, in ms": (
        *_ROW,
        ("forward", _phase("forward_s")),
        ("backward", _phase("backward_s")),
        ("exposed", _phase("exposed_s")),
        ("optimizer", _phase("optimizer_s")),
    ),
    "What it takes": (
        *_ROW,
        ("over", lambda _, run: run.backend or _NONE),
        ("sent", lambda _, run: _NONE if run.bytes_sent is None else size(run.bytes_sent)),
        ("memory", lambda _, run: size(max(run.peak_bytes)) if run.peak_bytes else _NONE),
        ("imbalance", _imbalance),
    ),
}


def _table(title: str, columns: Sequence[_Column], runs: Sequence[Run], bench: Bench) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1), pad_edge=False)
    for head, _ in columns:
        table.add_column(head, justify="left" if head == "way" else "right", no_wrap=True)
    for run in runs:
        table.add_row(*(Text(cell(bench, run)) for _, cell in columns))
    return table


def _failure(run: Run) -> str:
    where = "" if run.num_devices == 1 else f" on {run.num_devices} devices"
    return f"{run.way}{where} failed: {run.error}"


def size(number: int) -> str:
    """In the largest unit of which there is one: "4 B", "1.5 KiB", "25.0 MiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >> power:
            return f"{number / (1 << power):.1f} {unit}"
    return f"{number} B"
