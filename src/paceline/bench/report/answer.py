"""What a bench has found, in words: the answer first, and no better than the figures are.

The invariant: every number is computed from the bench, and what lies within the rounds' own spread is called equal.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.bench.report import units
from paceline.bench.report.looks import name_of, named, on
from paceline.bench.results import DATA_PARALLEL, MORE_THREADS, ONE_PROCESS, OURS, TORCHS, Bench, Run


@dataclass(frozen=True)
class Headline:
    """A number that matters, and what it is."""

    number: str
    says: str


def best(bench: Bench, way: str, num_devices: int | None = None) -> Run | None:
    """Of that way, the fastest on the most devices, or on so many; None where none was measured."""
    runs = [run for run in bench.runs if run.way == way and run.median_s and num_devices in (None, run.num_devices)]
    most = max((run.num_devices for run in runs), default=0)
    return min((run for run in runs if run.num_devices == most), key=lambda run: run.median_s or 0.0, default=None)


def answer(bench: Bench) -> str:
    """The first sentence of a report."""
    run = _subject(bench)
    if run is None:
        return "Nothing was measured"
    rate = bench.samples_per_s(run) or 0.0
    who = "paceline" if run.way == OURS else name_of(bench, run)
    if run.way == ONE_PROCESS or bench.gain(run) is None:
        where = "One process" if run.way == ONE_PROCESS else f"On {on(run)} {who}"
        return f"{where} trains {units.digits(rate)} samples a second"
    return f"On {on(run)} {who} trains {_compared(bench, run)}{_and_torch(bench, run)}"


def more(bench: Bench) -> Iterator[str]:
    """What else a reader should know before he looks at figures."""
    run = _subject(bench)
    if run is None or run.num_devices == 1:
        return
    for way in (DATA_PARALLEL, MORE_THREADS):
        other = best(bench, way, run.num_devices)
        gain = bench.gain(other) if other and way != run.way else None
        if other and gain is not None:
            name = f"One process with {on(other)}" if way == MORE_THREADS else f"{name_of(bench, other)} on {on(other)}"
            yield f"{name} trains {units.times(gain)} times as many."
    if run.phases and run.median_s:
        share = run.phases.exposed_s / run.median_s
        yield f"Of a step, {units.percent(share)} waits for communication that nothing hides."


def headlines(bench: Bench) -> Iterator[Headline]:
    """The numbers of the way that the answer is about."""
    run = _subject(bench)
    if run is None or run.median_s is None:
        return
    yield Headline(units.digits(bench.samples_per_s(run) or 0.0), f"samples a second, {named(bench, run)}")
    gain, efficiency = bench.gain(run), bench.efficiency(run)
    if gain is not None and efficiency is not None and run.way != ONE_PROCESS:
        yield Headline(f"{units.times(gain)} ×", f"one process; {units.percent(efficiency)} of the most possible")
    yield Headline(units.seconds(run.median_s), "a step, the median")
    if run.phases and run.num_devices > 1:
        yield Headline(units.seconds(run.phases.exposed_s), "of it waiting for communication")
    if run.peak_bytes:
        yield Headline(units.size(max(run.peak_bytes)), "memory, on the fullest device")
    if run.bytes_sent is not None:
        yield Headline(units.size(run.bytes_sent), "sent by a rank in a step")


def warnings(bench: Bench) -> Iterator[str]:
    """What a reader must know to trust the figures."""
    if bench.interrupted:
        yield "It was interrupted: this is what had been measured until then."
    failed = sum(run.error is not None for run in bench.runs)
    if failed:
        yield f"{units.several(failed, 'way')} could not be measured; what went wrong is said below."
    if bench.machine.load > max(0.5, 0.25 * bench.machine.cores):
        yield (
            f"The machine was busy when this began: {bench.machine.load:.1f} runnable processes on "
            f"{units.several(bench.machine.cores, 'core')}, so figures may be worse than they could be."
        )


def _subject(bench: Bench) -> Run | None:
    """The run that the answer is about: on several devices, paceline's if there is one."""
    several = [run for way in (OURS, DATA_PARALLEL, TORCHS) if (run := best(bench, way)) and run.num_devices > 1]
    alone = best(bench, ONE_PROCESS) or best(bench, OURS)
    return several[0] if several else alone


def _compared(bench: Bench, run: Run) -> str:
    gain = bench.gain(run) or 0.0
    low, high = spread_of_gain(run)
    if low <= 1 <= high:
        return f"about as many samples a second as one process ({units.times(gain)} times)"
    if gain < 1:
        return f"fewer samples a second than one process: {units.times(gain)} times as many"
    return f"{units.times(gain)} times as many samples a second as one process"


def spread_of_gain(run: Run) -> tuple[float, float]:
    """The quartiles of the gain over the rounds; where there are fewer than four, the least and the most."""
    gains = [run.num_devices * alone_s / step_s for alone_s, step_s in zip(run.alone_s, run.step_s, strict=False)]
    if len(gains) < 4:
        return min(gains), max(gains)
    low, _, high = statistics.quantiles(gains, n=4)
    return low, high


def _and_torch(bench: Bench, run: Run) -> str:
    torchs = best(bench, TORCHS, run.num_devices)
    if torchs is None or run.way == TORCHS:
        return ""
    theirs = bench.gain(torchs)
    if theirs is None:
        return ""
    is_more = spread_of_gain(torchs)[0] > spread_of_gain(run)[1]
    return f"; torch's DDP {units.times(theirs)} times" + (", which is more" if is_more else "")
