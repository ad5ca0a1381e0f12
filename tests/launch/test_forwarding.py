"""The ranks' output as it arrives at the launcher's own: the real command, on pipes, files and terminals."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import time

import pytest

from support.commands import PACELINE, paceline_run, processes_with, run_command, start, wait_until, write_script


class Terminal:
    """A terminal of 30 x 100 with a command on it."""

    def __init__(self, arguments: list[str]) -> None:
        self.fd, other_end = pty.openpty()
        fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = start(arguments, stdin=other_end, stdout=other_end, stderr=other_end, text=False)
        os.close(other_end)
        self.seen = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.seen:
            self.seen += os.read(self.fd, 4096)

    def read_to_end(self) -> bytes:
        try:
            while data := os.read(self.fd, 4096):
                self.seen += data
        except OSError:  # nobody holds the other end
            pass
        os.close(self.fd)
        self.process.wait(30)
        return self.seen


def test_rank_0_is_not_marked_while_no_other_speaks(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK"] == "0":
            sys.stdout.buffer.write(b"loss\\r 10%\\r 20%\\n\\xff\\x00 no newline")
            print("to stderr", file=sys.stderr)
        """,
    )
    ran = paceline_run("-n", "2", script, text=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"loss\r 10%\r 20%\n\xff\x00 no newline", b"to stderr\n")


def test_lines_of_several_ranks_are_whole_and_marked(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        here, rank = pathlib.Path(__file__).parent, int(os.environ["RANK"])
        while len(list(here.glob("spoken*"))) < rank:
            time.sleep(0.01)
        os.write(1, b"first\\n")
        (here / f"spoken{rank}").touch()
        while len(list(here.glob("spoken*"))) < 3:
            time.sleep(0.01)
        for n in range(2000):
            os.write(1, b"%d " % n)
            os.write(1, b"x" * 100 + b"\\n")
        os.write(2, b"the end")
        """,
    )
    ran = paceline_run("-n", "3", script)
    assert ran.returncode == 0
    lines = ran.stdout.splitlines()
    for rank in range(3):
        mark = f"[{rank}]: "
        own = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        assert own[-2000:] == [f"{n} " + "x" * 100 for n in range(2000)]
    assert sum("first" in line for line in lines) == 3
    assert len(lines) == 3 + 3 * 2000
    assert sorted(ran.stderr.splitlines()) == ["[0]: the end", "[1]: the end", "[2]: the end"]


def test_a_lot_of_output_passes_whole(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os
        block = b"y" * 63 + b"\\n"
        for _ in range(50):
            view = memoryview(block * (1 << 14))
            while view:
                view = view[os.write(1, view):]
        """,
    )
    ran = paceline_run("-n", "2", script, text=False, timeout_s=60)
    assert ran.returncode == 0
    assert ran.stdout.count(b"y" * 63 + b"\n") == ran.stdout.count(b"\n") == 2 * 50 * (1 << 14)


def test_stdout_and_stderr_in_one_file_keep_their_order(tmp_path):
    script = write_script(
        tmp_path,
        """
        import sys
        for n in range(200):
            print(n, file=(sys.stdout, sys.stderr)[n % 2], flush=True)
        """,
    )
    with open(tmp_path / "log", "w+") as log:
        run_command([*PACELINE, "run", script], stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        assert log.read().split() == [str(n) for n in range(200)]


def test_a_reader_that_leaves_ends_the_launch_quietly(tmp_path):
    script = write_script(tmp_path, "import time\nwhile True:\n    print('y', flush=True)\n    time.sleep(0.001)")
    process = start([*PACELINE, "run", "-n", "2", script])
    assert process.stdout.readline() in {"y\n", "[1]: y\n"}  # whichever rank is first
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(30) == 141
    process.stderr.close()
    assert not processes_with(str(tmp_path))


@pytest.mark.parametrize("hosts", [["-n", "2"], ["--hosts", "localhost:2"]])
def test_an_output_that_is_full_is_an_error(hosts):
    with open("/dev/full", "w") as full:
        ran = run_command([*PACELINE, "run", *hosts, "--no-python", "echo", "x"], stdout=full)
    why = "what the ranks say cannot be written any more: No space left on device; the ranks were stopped"
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, f"paceline: {why}")


def test_ctrl_c_works_while_the_reader_stands_still(tmp_path):
    script = write_script(tmp_path, "while True:\n    print('y' * 1000, flush=True)")
    process = start([*PACELINE, "run", script])
    assert process.stdout.readline().startswith("y")
    wait_until(lambda: _stands_still(process.stdout.fileno()))
    assert len(processes_with(str(tmp_path))) == 3  # the launcher, its server and the rank
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(processes_with(str(tmp_path))) == 2)  # the rank is gone, though its output is not read yet
    assert process.communicate(timeout=30)[1].endswith("paceline: interrupted by SIGINT, all ranks have ended\n")
    assert process.returncode == 130


@pytest.mark.slow
def test_ranks_are_ended_while_the_reader_of_all_that_is_said_stands_still(tmp_path):
    script = write_script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            print("y" * 1000, flush=True)
        """,
    )
    process = start([*PACELINE, "run", "--grace", "1", script], stderr=subprocess.STDOUT)
    assert process.stdout.readline().startswith("y")
    wait_until(lambda: _stands_still(process.stdout.fileno()), 60)
    process.send_signal(signal.SIGINT)
    # Killed, though nobody reads that rank 0 is waited for.
    wait_until(lambda: len(processes_with(str(tmp_path))) == 3, 60)
    assert process.communicate(timeout=60)[0].endswith("paceline: interrupted by SIGINT, all ranks have ended\n")
    assert process.returncode == 130


def _stands_still(pipe: int) -> bool:
    """Whether ``pipe`` is as full as it gets."""
    before = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    time.sleep(0.3)
    return any(before) and fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4) == before


@pytest.mark.parametrize("noise", ["time.sleep(600)", "[print('noise', flush=True) for _ in iter(int, 1)]"])
def test_a_process_that_holds_the_output_open_does_not_hold_the_launcher(tmp_path, noise):
    script = write_script(
        tmp_path,
        f"""
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; {noise}"])
        print("done")
        """,
    )
    ran = paceline_run(script, timeout_s=30)
    assert ran.returncode == 0
    assert "done\n" in ran.stdout


def test_a_progress_bar_moves_on_a_terminal(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty(), os.get_terminal_size())
        print("\\r10%", end="", flush=True)
        while not (pathlib.Path(__file__).parent / "seen").exists():
            time.sleep(0.01)
        print("\\r20%", file=sys.stderr)
        """,
    )
    terminal = Terminal([*PACELINE, "run", script])
    terminal.read_until(b"\r10%")
    (tmp_path / "seen").touch()
    assert terminal.read_to_end() == (
        b"True True False os.terminal_size(columns=100, lines=30)\r\n\r10%\r20%\r\n"  # one \r before each \n, not two
    )


def test_the_terminal_of_several_ranks_leaves_room_for_their_marks(tmp_path):
    script = write_script(tmp_path, "import os; os.environ['RANK'] == '0' and print(os.get_terminal_size().columns)")
    assert Terminal([*PACELINE, "run", "-n", "11", script]).read_to_end() == b"94\r\n"  # 100 less len("[ 0]: ")


def test_progress_bars_of_two_ranks_stay_apart(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os
        for percent in (10, 20, 30):
            os.write(1, b"\\r%d%% of %s" % (percent, os.environ["RANK"].encode()))
        os.write(1, b"\\n")
        """,
    )
    seen = Terminal([*PACELINE, "run", "-n", "2", script]).read_to_end().decode()
    second = "0" if "[1]: 10" not in seen else "1"
    for percent in (10, 20, 30):
        assert f"[{second}]: {percent}% of {second}\r" in seen


def test_a_change_of_the_window_reaches_the_ranks(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
        print("ready", flush=True)
        signal.sigwait([signal.SIGWINCH])
        print(os.get_terminal_size().columns)
        """,
    )
    terminal = Terminal([*PACELINE, "run", script])
    terminal.read_until(b"ready")
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 77, 0, 0))
    terminal.process.send_signal(signal.SIGWINCH)
    assert terminal.read_to_end() == b"ready\r\n77\r\n"


def test_the_first_failure_is_red_on_a_terminal_and_starts_a_line(tmp_path):
    script = write_script(tmp_path, "print('open', end='', flush=True); raise SystemExit(3)")
    assert Terminal([*PACELINE, "run", script]).read_to_end() == (
        b"open\r\n\x1b[31mpaceline: rank 0 failed first, exit code 3\x1b[0m\r\n"
    )


def test_closed_standard_streams_do_no_harm(tmp_path):
    script = write_script(tmp_path, "print('unseen'); open(__file__ + '.ran', 'w').close()")
    shell = f"{' '.join(PACELINE)} run {script} <&- >&- 2>&-"
    assert run_command(["sh", "-c", shell]).returncode == 0
    assert (tmp_path / "script.py.ran").exists()
