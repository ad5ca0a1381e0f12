"""The user's program as ``__main__``: what ``python script.py``, ``python -m module`` and ``python folder`` do.

A script cannot tell the difference: its globals, ``sys.argv``, ``sys.path`` and traceback are the same, so pickling its
classes and starting workers by any method work as ever.
"""

import builtins
import os
import runpy
import signal
import sys
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from paceline.launch import dispositions
from paceline.launch.dispositions import Dispositions
from paceline.launch.ranks.report import Reporter, deliver_through


@dataclass(frozen=True)
class Program:
    """One rank's program; ``run`` is called last thing in the process, and lets what ends the program end python."""

    target: str
    args: tuple[str, ...]
    is_module: bool
    reporter: Reporter
    dispositions: Dispositions

    def run(self) -> None:
        before_c = sys.orig_argv[: sys.orig_argv.index("-c")]
        sys.orig_argv[:] = [*before_c, *(["-m"] if self.is_module else []), self.target, *self.args]
        sys.argv[:] = ["-m" if self.is_module else self.target, *self.args]
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__dict__.update(__builtins__=builtins, __annotations__={})
        try:
            self.dispositions.restore_mask()  # here: Ctrl-C that has come meanwhile is the script's
            if self.is_module:
                _put_first_on_path(os.getcwd())
                _run_as_main(self.target, alter_argv=True)
            elif _is_container(self.target):
                sys.path.insert(0, _absolute(self.target))
                _run_as_main("__main__", alter_argv=False)
            else:
                _put_first_on_path(os.path.dirname(os.path.realpath(self.target)))
                exec(_load_script(main, _absolute(self.target)), main.__dict__)
        except SystemExit as error:
            if self.reporter.exited(error) and isinstance(error.code, str):
                error.code = 1  # what it says the launcher prints, last
            raise
        except BaseException as error:
            deliver_through(self.reporter, error, _frames_of_program(error))
            raise


def _put_first_on_path(folder: str) -> None:
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, folder)


def _is_container(path: str) -> bool:
    """Whether python would look for a ``__main__`` inside ``path``: a folder or a zip archive."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _absolute(path: str) -> str:
    """As python writes ``__file__``: absolute, but not normalised."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _run_as_main(module: str, *, alter_argv: bool) -> None:
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(module, alter_argv)


def _load_script(main: ModuleType, path: str) -> CodeType:
    kind = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
    loader = kind("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    if isinstance(loader, SourceFileLoader):
        return loader.source_to_code(loader.get_data(path), path)
    code = loader.get_code("__main__")
    assert code is not None
    return code


def _frames_of_program(error: BaseException) -> TracebackType | None:
    """The traceback without the launcher's own frames on top, or those of the compiler that python would not show."""
    frames = error.__traceback__
    compilers = ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    hidden = (__file__, dispositions.__file__, signal.__file__, *compilers)
    while frames is not None and frames.tb_frame.f_code.co_filename in hidden:
        frames = frames.tb_next
    return frames


@dataclass(frozen=True)
class Command:
    """One rank's program where it is not Python's: it takes this process over."""

    target: str
    args: tuple[str, ...]
    dispositions: Dispositions

    def run(self) -> None:
        """Ends as a shell does where it cannot be started: with 127 or 126."""
        for signum, handler in self.dispositions.handlers.items():
            if callable(handler):  # of Python's, which would raise before the program has taken over
                signal.signal(signum, signal.SIG_DFL)
        self.dispositions.restore_mask()
        try:
            os.execvp(self.target, [self.target, *self.args])
        except OSError as error:
            sys.stderr.write(f"paceline: {self.target!r} cannot be started: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
