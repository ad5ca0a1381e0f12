"""How far a bench is: a bar in a terminal, and elsewhere a line for each thing that begins.

The invariant: it goes to stderr, so that stdout has the result alone.
"""

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Bar:
    """For a terminal; a context manager."""

    def __init__(self, console: Console) -> None:
        columns = [BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}")]
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def at(self, what: str) -> None:
        self._progress.update(self._task, description=escape(what))

    def advance(self) -> None:
        self._progress.advance(self._task)

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


class Lines:
    """For a file or a pipe; a context manager. Ways that take turns are one thing."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        pass

    def begin(self, total: int) -> None:
        pass

    def at(self, what: str) -> None:
        if (first := what.partition(": ")[0]) != self._last:
            self._last = first
            self.note(first)

    def advance(self) -> None:
        pass

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_on(console: Console) -> Bar | Lines:
    """What fits ``console``."""
    return Bar(console) if console.is_terminal else Lines(console)
