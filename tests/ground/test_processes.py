import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import pytest

from paceline.processes import Launcher, is_left_over, is_own, launcher_of, read_stat, spell_command, started_at
from support.commands import wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@contextlib.contextmanager
def marked(mark, *command, **options):
    """A process with ``mark`` in its environment; one that sleeps, unless ``command`` says otherwise."""
    process = subprocess.Popen(command or ["sleep", "60"], env={**os.environ, "PACELINE_LAUNCHER": mark}, **options)
    try:
        # Popen returns once exec has closed its pipe, which is shortly before the kernel shows the new environment.
        wait_until(pathlib.Path(f"/proc/{process.pid}/environ").read_bytes)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_the_kernel_tells_what_a_process_is():
    stat = read_stat(os.getpid())
    assert (stat.state, stat.parent, stat.group) == ("R", os.getppid(), os.getpgrp())
    assert stat.started == started_at(os.getpid()) > started_at(1) >= 0


def test_unreaped_remains_are_no_process():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (read_stat(pid), started_at(pid)) == (None, None)
    os.waitpid(pid, 0)
    assert started_at(pid) is None


@pytest.mark.parametrize(
    "mark", ["", "12", "12:", "12:None", "0:1", "-1:5", "12:5:7", "x:y", "9999999999:1", "1" * 5000]
)
def test_a_mark_that_is_none_of_ours_names_nobody(mark):
    assert Launcher.from_mark(mark) is None


def test_a_mark_names_a_launcher_which_lives_while_both_numbers_are_a_process():
    me = Launcher.from_mark(f"{os.getpid()}:{started_at(os.getpid())}")
    assert me == Launcher(os.getpid(), started_at(os.getpid()))
    assert me.is_alive()
    assert not Launcher(me.pid, me.started + 1).is_alive()  # the pid was taken over
    assert not Launcher(999_999_999, 1).is_alive()


def test_what_descends_from_a_dead_launcher_is_left_over():
    mine = f"{os.getpid()}:{started_at(os.getpid())}"
    with marked(mine) as living, marked("999999999:1") as orphan, marked("nonsense") as stranger:
        assert launcher_of(living) == Launcher(os.getpid(), started_at(os.getpid()))
        assert launcher_of(orphan) == Launcher(999_999_999, 1)
        assert launcher_of(stranger) is None
        assert [is_left_over(pid) for pid in (living, orphan, stranger)] == [False, True, False]
    assert launcher_of(orphan) is None


@needs_root
def test_another_users_process_is_nobodys_here():
    with marked("999999999:1", user=65534) as pid:
        assert (is_own(pid), launcher_of(pid), is_left_over(pid)) == (False, None, False)


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
def test_a_containers_process_is_nobodys_here():
    # Within it, a launcher's pid is another number than here.
    with marked("999999999:1", "unshare", "--pid", "--fork", "--kill-child", "sleep", "60") as parent:
        children = []
        while not children:
            with open(f"/proc/{parent}/task/{parent}/children") as file:
                children = [int(pid) for pid in file.read().split()]
        assert launcher_of(parent) == Launcher(999_999_999, 1)
        assert launcher_of(children[0]) is None


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare(1)")
def test_a_launcher_that_may_not_be_seen_counts_as_alive():
    code = """
    import os, sys
    sys.path.insert(0, sys.argv[1])
    import paceline.processes
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    print(os.path.exists("/proc/1"), *(paceline.processes.Launcher(pid, 0).is_alive() for pid in (1, 999999999)))
    """
    hide = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    source = os.path.join(os.path.dirname(__file__), "..", "..", "src")
    hidden = ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", textwrap.dedent(code), source]
    ran = subprocess.run(hidden, capture_output=True, text=True)
    if ran.returncode == 32:
        pytest.skip("may not mount /proc here")
    assert (ran.stdout, ran.stderr) == ("False True False\n", "")


BOOT = "import sys; from paceline.launch.server.forkserver import main; sys.path.pop(); main()()"
AGENT = "import sys; from paceline.cli import main; main(['agent'])"


@pytest.mark.parametrize(
    ("argv", "spelt"),
    [
        (["/v/bin/python", "/v/bin/paceline", "run", "-n", "2", "a b.py"], "paceline run -n 2 'a b.py'"),
        (["python", "-m", "paceline", "run", "x.py"], "python -m paceline run x.py"),
        (["/v/bin/python", "-u", "-c", BOOT, "7", "train.py", "--lr", "1"], "/v/bin/python -u train.py --lr 1"),
        (["python", "-u", "-c", AGENT, "train.py", "--lr", "1"], "paceline agent train.py --lr 1"),
        (["python", "-c", "print(1)\nprint('\x1b[2J')"], "python -c 'print(1) print('\"'\"'?[2J'\"'\"')'"),
        (["a title: with blanks"], "a title: with blanks"),
        (["python", "-c"], "python -c"),
        ([], ""),
    ],
)
def test_a_command_is_spelt_as_its_user_typed_it(argv, spelt):
    assert spell_command(argv) == spelt
