"""``paceline ps`` and ``paceline clean``, as they are typed. What is cleaned is named: a test ends nothing else."""

import contextlib
import ctypes
import json
import os
import pty
import re
import signal
import struct
import sys

import pytest

from paceline.cli.clean import clean
from paceline.cli.listing import align, spell_age, spell_bytes
from paceline.cli.ps import ps
from support.commands import PACELINE, processes_with, run_command, start, wait_until, write_script

ORPHANS = f"{os.getpid()}:1"  # marks what this test's pid would have launched, had it been another process


@contextlib.contextmanager
def sleeper(mark=ORPHANS, command=("sleep", "60"), **options):
    with start(command, env={"PACELINE_LAUNCHER": mark}, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def clean_up(*options, launcher=None, **kwargs):
    return run_command([*PACELINE, "clean", *options, str(launcher or os.getpid())], **kwargs)


def shown():
    return json.loads(run_command([*PACELINE, "ps", "--json"]).stdout)


def test_the_flags_are_these():
    assert [parameter.opts for parameter in ps.params] == [["--json"]]
    assert [parameter.opts for parameter in clean.params] == [["--yes"], ["--dry-run", "--dry_run"], ["launchers"]]


@pytest.mark.parametrize("command", ["ps", "clean"])
def test_help_imports_nothing_of_the_launcher(command):
    code = (
        "import sys\n"
        "from paceline.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print([name for name in sys.modules if name.startswith('paceline.launch')], file=sys.stderr)\n"
    )
    ran = run_command([sys.executable, "-c", code, command, "--help"])
    assert (ran.returncode, ran.stderr) == (0, "[]\n")
    assert ran.stdout.startswith(f"Usage: paceline {command} [OPTIONS]")


def test_a_run_is_shown_and_not_touched(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time
        (pathlib.Path(__file__).parent / f"ready{os.environ['RANK']}").touch()
        time.sleep(60)
        """,
    )
    with start([*PACELINE, "run", "-n", "2", script]) as launcher:
        try:
            wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
            command = f"{sys.executable} -m paceline run -n 2 {script}"
            text = run_command([*PACELINE, "ps"]).stdout
            number = len(processes_with(script))
            row = rf"^{launcher.pid} +20\d\d(-\d\d){{2}} \d\d(:\d\d){{2}} +2 +{number} +\d+ MiB .*{re.escape(command)}$"
            assert re.search(row, text, re.MULTILINE), text
            run = next(run for run in shown()["runs"] if run["pid"] == launcher.pid)
            assert (run["command"], len(run["ranks"]), len(run["processes"])) == (command, 2, number)
            assert run["pss_bytes"] == sum(process["pss_bytes"] for process in run["processes"]) > 50 << 20
            ran = clean_up("--yes", launcher=launcher.pid)
            assert (ran.returncode, ran.stdout, ran.stderr) == (0, "nothing was left behind\n", "")
            assert launcher.poll() is None
            assert len(processes_with(script)) == number
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate()


def test_orphans_are_shown_then_ended_and_counted():
    with sleeper() as one, sleeper(command=[sys.executable, "-c", "import time; time.sleep(60)"]) as two:
        entries = {orphan["pid"]: orphan for orphan in shown()["orphans"]}
        assert (entries[one.pid]["launcher"], entries[one.pid]["command"]) == (os.getpid(), "sleep 60")
        text = run_command([*PACELINE, "ps"]).stdout
        assert "left behind by launchers that have died (`paceline clean` ends it):\npid " in text
        assert re.search(rf"^{one.pid} +{os.getpid()} +\d s +\d\.\d MiB +.*sleep 60$", text, re.MULTILINE), text
        for options, status, said in (
            (["--dry-run"], 0, ""),
            ([], 1, "nothing was ended: `paceline clean --yes` ends "),
        ):
            ran = clean_up(*options)
            assert (ran.returncode, ran.stdout.count("\n")) == (status, 3)
            assert ran.stderr.startswith(said)
            assert (one.poll(), two.poll()) == (None, None)
        ran = clean_up("--yes")
        assert ran.returncode == 0
        assert re.search(r"^ended 2 processes; [\d.]+ MiB of memory came back$", ran.stdout, re.MULTILINE)
        assert (one.wait(), two.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
    assert clean_up("--yes").stdout == "nothing was left behind\n"


@pytest.mark.parametrize(("answer", "status"), [("n", 1), ("y", 0)])
def test_on_a_terminal_it_asks_first(answer, status):
    terminal, other_end = pty.openpty()
    try:
        with sleeper() as process:
            os.write(terminal, f"{answer}\n".encode())
            ran = clean_up(stdin=other_end)
            assert (ran.returncode, "end 1 process? [y/N]: " in ran.stdout) == (status, True)
            assert ("nothing was ended\n" in ran.stdout) == (process.poll() is None) == (answer == "n")
    finally:
        os.close(terminal)
        os.close(other_end)


def test_lines_end_where_the_terminal_does():
    terminal, other_end = pty.openpty()
    try:
        with sleeper(command=[sys.executable, "-c", "import time; time.sleep(60)", "x" * 500]) as process:
            clean_up("--dry-run", stdout=other_end, env={"COLUMNS": "60"})
            headings, row = os.read(terminal, 4096).decode().splitlines()
            assert headings.startswith("pid ")
            assert (row.split()[0], len(row)) == (str(process.pid), 60)
    finally:
        os.close(terminal)
        os.close(other_end)


def test_whoever_asks_is_spared():
    with sleeper() as process:
        ran = clean_up("--yes", env={"PACELINE_LAUNCHER": ORPHANS})
        assert (ran.returncode, process.wait()) == (0, -signal.SIGTERM)
        assert "ended 1 process;" in ran.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
def test_another_users_process_is_neither_shown_nor_ended():
    with sleeper(user=65534) as process:
        assert process.pid not in [orphan["pid"] for orphan in shown()["orphans"]]
        assert clean_up("--yes").stdout == "nothing was left behind\n"
        assert process.poll() is None


def test_what_appears_meanwhile_is_left_for_the_next_time(tmp_path):
    script = write_script(
        tmp_path,
        """
        import pathlib, signal, subprocess, sys, time

        def multiply(*_):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", __file__], start_new_session=True)
            sys.exit()

        signal.signal(signal.SIGTERM, multiply)
        (pathlib.Path(__file__).parent / "ready").touch()
        time.sleep(60)
        """,
    )
    try:
        with sleeper(command=[sys.executable, script]):
            wait_until((tmp_path / "ready").exists)
            ran = clean_up("--yes")
            assert (ran.returncode, ran.stderr) == (1, "1 process appeared meanwhile; run `paceline clean` again\n")
            assert clean_up("--yes").returncode == 0
            assert processes_with(script) == []
    finally:
        for pid in processes_with(script):
            os.kill(pid, signal.SIGKILL)


def refuse_pidfd_open():
    """Have this process and its children told that there is no such system call, as an old kernel would."""
    instructions = [(0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x50000 | 38), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    zero, one, two = (ctypes.c_ulong(number) for number in (0, 1, 2))
    assert prctl(38, one, zero, zero, zero) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, two, program, zero, zero) == 0  # PR_SET_SECCOMP


def test_a_kernel_without_handles_on_processes_is_an_error():
    argv = [*PACELINE, "clean", "--yes", str(os.getpid())]
    code = f"import os, sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
    code += f"import test_ps\ntest_ps.refuse_pidfd_open()\nos.execv({argv[0]!r}, {argv!r})"
    with sleeper() as process:
        ran = run_command([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)})
        assert (ran.returncode, process.poll()) == (2, None)
        assert ran.stderr == (
            "paceline: ending orphans wants pidfd_open(2), which this kernel or container refuses (Function not "
            "implemented); it is there since Linux 5.3. End what `paceline ps` shows with `kill PID`\n"
        )


def test_columns_are_as_wide_as_they_must_be_and_empty_ones_are_left_out():
    assert align(["pid", "none", "command"], [["1", "", "a b"], ["4711", "", "c"]]) == (
        "pid   command\n"
        "1     a b\n"
        "4711  c"
    )  # fmt: skip


def test_ages_and_sizes_are_rounded_as_people_say_them():
    ages = [0.4, 59, 61, 3600, 7380, 90_000, 1_000_000]
    assert [spell_age(age) for age in ages] == [
        "0 s",
        "59 s",
        "1 min 1 s",
        "1 h 0 min",
        "2 h 3 min",
        "1 d 1 h",
        "11 d 13 h",
    ]
    assert [spell_bytes(n) for n in (None, 0, 5 << 19, 300 << 20)] == ["", "0.0 MiB", "2.5 MiB", "300 MiB"]
