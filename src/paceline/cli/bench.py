"""``paceline bench``: what several devices would gain, measured here."""

import contextlib
import dataclasses
import pathlib
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from paceline.errors import BenchError

if TYPE_CHECKING:
    from paceline.bench import Bench

_COUNT = click.IntRange(min=1)


@click.command(short_help="Measure what several devices would gain.")
@click.option(
    "--model",
    default="mnist",
    show_default=True,
    metavar="NAME|FILE.py:FUNCTION|MODULE:FUNCTION",
    help="mnist, unet or gpt; or a function of yours that returns a model, a batch (inputs, target) and, if you like, "
    "a loss(output, target) and an optimizer.",
)
@click.option("-n", "--devices", "most", type=_COUNT, metavar="N", help="At most. [default: all GPUs, or all cores]")
@click.option("--batch-size", type=_COUNT, metavar="B", help="Samples a device and step. [default: the model's]")
@click.option(
    "--steps", type=_COUNT, default=40, show_default=True, metavar="S", help="Timed steps of each way, at least."
)
@click.option(
    "--ways",
    default="threads,dp,ddp,torch",
    show_default=True,
    help="What to compare with one process: one process with more threads (on CPUs), DataParallel, "
    "DistributedDataParallel, torch's.",
)
@click.option("--backend", default="auto", help="Over which paceline's ranks talk. [default: nccl, or shm on CPUs]")
@click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "cuda"]), show_default=True)
@click.option(
    "--threads",
    type=_COUNT,
    envvar="OMP_NUM_THREADS",
    metavar="T",
    help="Of torch's, a rank. [default: a share of the cores]",
)
@click.option("--out", default="report.html", show_default=True, metavar="FILE", help="The report.")
@click.option("--no-report", is_flag=True, help="Write none.")
@click.option("--png", metavar="FOLDER", help="The report's pictures, too.")
@click.option("--json", "json_path", metavar="FILE", help="The figures.")
@click.option("--from", "source", metavar="FILE", help="Measure nothing: show what --json has written.")
def bench(source: str | None, out: str, no_report: bool, png: str | None, json_path: str | None, **given: Any) -> int:
    """Measure what training on several devices gains, on this machine.

    \b
        paceline bench                         # a small net, about a minute
        paceline bench --model gpt -n 4
        paceline bench --model train.py:make   # yours

    One process, DataParallel, DistributedDataParallel and torch's take turns, on 2, 4, 8 ... devices. A table says how
    many samples a second each trains, where a step's time goes, what is sent and what memory is held; report.html draws
    it. Ctrl-C ends it early and shows what is finished.
    """
    for path in (None if no_report else out, json_path):
        _check_folder(path)
    with _libraries():
        from rich.console import Console

        from paceline.bench import document, report
        from paceline.bench.table import WIDTH, tables_of

        if png:
            report.check_png()
    found = _measure(**given) if source is None else document.load(pathlib.Path(source))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(tables_of(found))
    written = []
    if json_path:
        with _writing(json_path):
            document.save(found, pathlib.Path(json_path))
        written.append(json_path)
    if not no_report:
        with _writing(out):
            report.write(found, pathlib.Path(out))
        written.append(out)
    if png:
        with _writing(png):
            written += map(str, report.write_pngs(found, pathlib.Path(png)))
    if written:
        click.echo(f"written: {', '.join(written)}", err=True)
    return 130 if found.interrupted else 1 if any(run.error for run in found.runs) else 0


def _measure(model: str, batch_size: int | None, ways: str, **given: Any) -> "Bench":
    with _libraries():
        from rich.console import Console

        from paceline.bench.conduct import Wanted, measure
        from paceline.bench.progress import progress_on
        from paceline.bench.recipe import Recipe
        from paceline.bench.ways import KEYS
    names = tuple(dict.fromkeys(KEYS.get(key, key) for key in ways.split(",") if key))
    wanted = Wanted(Recipe(model, batch_size), ways=names, **given)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the command begins
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with progress_on(Console(stderr=True)) as show:
        return dataclasses.replace(measure(wanted, show), command=_command())


def _command() -> str:
    """What was typed, so that it can be typed again."""
    context = click.get_current_context()
    told = context.get_parameter_source("threads") is ParameterSource.ENVIRONMENT
    variable = f"OMP_NUM_THREADS={context.params['threads']} " if told else ""
    return variable + shlex.join(["paceline", *sys.argv[1:]])


def _check_folder(path: str | None) -> None:
    """Now, rather than after all has been measured."""
    if path is not None and not pathlib.Path(path).absolute().parent.is_dir():
        raise BenchError(f"{path}: there is no such folder to write it in; make it, or name another")


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BenchError(f"{path} could not be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _libraries() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if name == "paceline":
            raise
        raise BenchError(f"a bench needs {name}: `pip install 'paceline[bench]'` installs it") from error
