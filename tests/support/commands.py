"""Run the real ``paceline`` command on small scripts, and look at what it leaves."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PACELINE = (sys.executable, "-m", "paceline")


def write_script(folder: pathlib.Path, source: str, name: str = "script.py") -> str:
    """Write a script, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return str(path)


def start(arguments: Sequence[str], *, env: Mapping[str, str | None] | None = None, **options: Any) -> Any:
    """A running command with text pipes unless ``options`` say otherwise; None in ``env`` unsets a variable."""
    changed = {**os.environ, **(env or {})}
    kept = {name: value for name, value in changed.items() if value is not None}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    # The tests may run in the background, where a shell has SIGINT ignored, and nohup SIGHUP.
    def heed_interrupts() -> None:
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)

    return subprocess.Popen(list(arguments), env=kept, preexec_fn=heed_interrupts, **{**pipes, **options})


def run_command(
    arguments: Sequence[str], *, timeout_s: float = 60.0, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run to its end; after ``timeout_s`` it is killed, and the test fails with what it said."""
    process = start(arguments, **options)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not done after {timeout_s} s; it said {out!r} and {err!r}") from None
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def paceline_run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """``paceline run ARGUMENTS``, to its end."""
    return run_command([*PACELINE, "run", *arguments], **options)


def in_the_end(stderr: str) -> str:
    """What a launcher has said, less what it says on a slow machine while it waits for ranks to end."""
    return re.sub(r"(?m)^(paceline: a rank failed, .*\n)?paceline: waiting for .*\n", "", stderr)


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """What ``condition`` returns as soon as that is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} did not come true in {timeout_s} s"
        time.sleep(0.01)
    return value


def processes_with(marker: str) -> list[int]:
    """Pids of live processes whose command line holds ``marker``; a test's temporary folder is a good one."""
    entries = [entry for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit()]
    return [int(entry.name) for entry in entries if marker in _command_line(entry)]


def _command_line(process: pathlib.Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
