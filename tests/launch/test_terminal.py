"""What a person sees who types ``paceline run`` into a shell: keys are pressed in a terminal, which is then read."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from support.commands import processes_with, wait_until, write_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]
PACELINE = f"{sys.executable} -m paceline"
PROMPT = "$ "


class Terminal:
    """A shell in a terminal of 30 x 100, on a tmux server of its own."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._is_closed = False
        shell = f"env PS1={shlex.quote(PROMPT)} bash --noprofile --norc"
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", "100", "-y", "30", shell)
        self._wait(lambda: self.lines == [PROMPT.strip()])

    @property
    def lines(self) -> list[str]:
        """What the screen shows, without blank lines at its end."""
        return self._tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def type(self, command: str) -> None:
        """Clear the screen, and run a command."""
        self._tmux("send-keys", "-l", f"clear; {command}")
        self._tmux("send-keys", "Enter")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until the screen shows ``text``, which must not be part of the command that was typed."""
        self._wait(lambda: "\n".join(self.lines).count(text) >= times)

    def wait_for_prompt(self) -> list[str]:
        """What the screen shows once the shell waits for a command again."""
        self._wait(lambda: self.lines[-1] == PROMPT.strip())
        return self.lines[:-1]

    def close(self) -> None:
        """As closing the window does: the shell and what runs in it get SIGHUP. Twice does no harm."""
        if not self._is_closed:
            self._is_closed = True
            self._tmux("kill-server")

    def _wait(self, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition)
        except AssertionError:
            raise AssertionError("the screen shows\n" + "\n".join(self.lines)) from None

    def _tmux(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "TMUX"}
        ran = subprocess.run(
            ["tmux", "-S", self._socket, *arguments], env=environment, capture_output=True, text=True, timeout=30
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        terminal = Terminal(f"{folder}/tmux")
        try:
            yield terminal
        finally:
            terminal.close()


def test_ctrl_z_fg_and_ctrl_c(terminal, tmp_path):
    script = write_script(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGCONT, lambda *_: print("goes on", flush=True))
        print("ready", flush=True)
        while True:
            time.sleep(600)
        """,
    )
    terminal.type(f"{PACELINE} run -n 2 {script}")
    terminal.wait_for("ready", times=2)
    terminal.press("C-z")
    terminal.wait_for("Stopped")
    terminal.wait_for_prompt()
    terminal.type("fg; echo status $?")
    terminal.wait_for("goes on", times=2)
    terminal.press("C-c")
    terminal.wait_for("status 130")
    shown = [line for line in terminal.wait_for_prompt() if "waiting for" not in line]  # which is said after a second
    assert [re.sub(r":\d+, in", ":N, in", line) for line in shown[-5:]] == [
        "^C",
        "paceline: rank 0 was at script.py:N, in <module>",
        "paceline: rank 1 was at script.py:N, in <module>",
        "paceline: interrupted by SIGINT, all ranks have ended",
        "status 130",
    ]
    assert not processes_with(str(tmp_path))


def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first(terminal, tmp_path):
    script = write_script(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
        """,
    )
    terminal.type(f"{PACELINE} run -n 2 --grace 600 {script}; echo status $?")
    terminal.wait_for("ready", times=2)
    terminal.press("C-c")
    terminal.wait_for("waiting for ranks 0-1")
    terminal.press("C-c")
    terminal.wait_for("status 130")
    assert terminal.wait_for_prompt()[-5:] == [
        "^C",
        "paceline: waiting for ranks 0-1 to end; Ctrl-C ends them at once",
        "^C",
        "paceline: interrupted by SIGINT, all ranks have ended",
        "status 130",
    ]
    assert not processes_with(str(tmp_path))


def test_a_progress_bar_stays_one_line_and_nothing_outlives_the_window(terminal, tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        if os.environ["RANK"] == "0":
            for step in range(21):
                sys.stderr.write(f"\\r{5 * step:3}%|{'#' * step:20}| {step}/20")
                sys.stderr.flush()
                time.sleep(0.02)
        time.sleep(600)
        """,
    )
    terminal.type(f"{PACELINE} run -n 2 {script}")
    terminal.wait_for("20/20")
    assert terminal.lines == [f"100%|{'#' * 20}| 20/20"]
    assert processes_with(str(tmp_path))
    terminal.close()
    wait_until(lambda: not processes_with(str(tmp_path)))
