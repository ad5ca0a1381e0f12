"""The report as one page: everything in one file, nothing fetched, no script.

The invariant: whatever a user has named his model, or an error says, is shown and never obeyed.
"""

import pathlib
import statistics
from collections import Counter
from collections.abc import Iterator
from datetime import datetime

import jinja2
from markupsafe import Markup

from paceline.bench.report import palette, units
from paceline.bench.report.answer import answer, headlines, more, warnings
from paceline.bench.report.figures import Figure, Table, figures_of
from paceline.bench.report.figures.memory import imbalance
from paceline.bench.report.looks import look_of, named
from paceline.bench.report.svg import to_svg
from paceline.bench.results import Bench, Run

WIDTHS = (290, 420, 620, 900)  # of each figure; a page shows the widest that fits

_FOLDER = pathlib.Path(__file__).parent


def page_of(bench: Bench) -> str:
    """The page's text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(
        answer=answer(bench),
        more=list(more(bench)),
        subject=bench.subject,
        about=_about(bench),
        warnings=list(warnings(bench)),
        headlines=list(headlines(bench)),
        figures=[(figure, _drawn(figure)) for figure in figures_of(bench)],
        runs=_runs(bench),
        failures=[(named(bench, run), run.error) for run in bench.runs if run.error is not None],
        machine=list(_machine(bench)),
        method=list(_method(bench)),
        colours=Markup(palette.of_page()),
        style=Markup(_choosing() + (_FOLDER / "page.css").read_text()),
    )


def _choosing() -> str:
    """Rules that show of each picture the widest that fits; the first where a browser knows no containers."""
    rules = [f".picture svg:nth-of-type({number + 1}) {{ --w: {width} }}" for number, width in enumerate(WIDTHS)]
    rules.append(".picture svg { display: none } .picture svg:nth-of-type(1) { display: block }")
    rules += [
        f"@container (min-width: {width}px) {{ .picture svg:nth-of-type({number - 1}) {{ display: none }} "
        f".picture svg:nth-of-type({number}) {{ display: block }} }}"
        for number, width in enumerate(WIDTHS[1:], start=2)
    ]
    return "\n".join(rules) + "\n"


def _drawn(figure: Figure) -> Markup:
    pictures = (to_svg(figure.draw(width), f"{figure.name}-{width}", figure.title, figure.says) for width in WIDTHS)
    return Markup("\n".join(pictures))


def _about(bench: Bench) -> str:
    subject = bench.subject
    return (
        f"{subject.num_parameters:,} parameters ({units.size(subject.parameter_bytes)}), "
        f"{units.several(subject.batch_size, 'sample')} a device and step, {_date(bench.machine.began)}"
    )


def _date(moment: str) -> str:
    """As it was given, if it is no date."""
    try:
        return f"{datetime.fromisoformat(moment):%d %B %Y, %H:%M}".lstrip("0")
    except ValueError:
        return moment


def _runs(bench: Bench) -> Table:
    head = (
        "way",
        "devices",
        "samples/s",
        "step",
        "middle half",
        "× one process",
        "efficiency",
        "sent",
        "memory",
        "× mean",
    )
    return Table(head, tuple(_row(bench, run) for run in bench.runs if run.error is None))


def _row(bench: Bench, run: Run) -> tuple[str, ...]:
    rate, gain, efficiency = bench.samples_per_s(run), bench.gain(run), bench.efficiency(run)
    return (
        look_of(run.way).name + (f" over {run.backend}" if run.backend else ""),
        str(run.num_devices),
        "" if rate is None else units.digits(rate),
        "" if run.median_s is None else units.seconds(run.median_s),
        _middle(run.step_s),
        "" if gain is None else f"{gain:.2f}",
        "" if efficiency is None else units.percent(efficiency),
        "" if run.bytes_sent is None else units.size(run.bytes_sent),
        units.size(max(run.peak_bytes)) if run.peak_bytes else "",
        imbalance(run),
    )


def _middle(step_s: tuple[float, ...]) -> str:
    """Between what times the middle half of the steps lies."""
    if len(step_s) < 2:
        return ""
    low, _, high = statistics.quantiles(step_s, n=4, method="inclusive")
    return f"{units.digits(low * 1e3)}–{units.digits(high * 1e3)} ms"


def _machine(bench: Bench) -> Iterator[tuple[str, str]]:
    machine, subject = bench.machine, bench.subject
    yield "Processor", f"{machine.processor}, {units.several(machine.cores, 'core')}"
    yield "Memory", units.size(machine.memory_bytes)
    counts = Counter(machine.devices)
    yield "Accelerators", ", ".join(f"{number} × {name}" for name, number in counts.items()) or "none: ranks on the CPU"
    yield "Threads", f"{subject.threads} a rank or replica"
    yield "System", machine.system
    yield "Software", f"paceline {machine.paceline}, torch {machine.torch}, Python {machine.python}"
    yield "Began", machine.began
    if bench.command:
        yield "Command", bench.command
    yield "Load before it began", f"{machine.load:.2f} runnable processes"


def _method(bench: Bench) -> Iterator[str]:
    batch = units.several(bench.subject.batch_size, "sample")
    yield (
        f"Each device gets {batch} of its own in each step, however many there are. What is compared took turns, so "
        "all of it met the same machine. A step's time is that of its slowest rank, and figures are medians."
    )
    yield (
        "“× one process” is the median over pairs of a step and a step of one process beside it; efficiency is that "
        "over the number of devices. Forward, backward, waiting and optimizer are those of steps that were watched, "
        "which are not among the steps that are timed."
    )
    if any(run.bytes_sent is not None for run in bench.runs):
        yield "Bytes sent are counted from what is reduced: what each rank must send for it, without headers."
    if bench.collectives:
        yield "Bandwidth is the tensor's bytes over the time of the all_reduce, not the bytes that cross a wire."
