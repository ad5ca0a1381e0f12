"""One terminal for all hosts, where the only host is this machine: no ssh, all else alike."""

import fcntl
import json
import os
import pty
import signal
import struct
import sys
import termios

import pytest

from paceline.launch.runs.look import look
from paceline.processes import read_stat
from support.commands import PACELINE, paceline_run, processes_with, start, wait_until, write_script


def run_here(*arguments, **options):
    return paceline_run("--hosts", "localhost:2", *arguments, env={"OMP_NUM_THREADS": "1"}, **options)


@pytest.mark.slow
def test_ranks_here_are_an_ordinary_world(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        import paceline

        with paceline.init(device="cpu") as world:
            for rank in range(world.world_size):
                world.barrier()
                if rank == world.rank:
                    told = [os.environ["EXTRA"], os.getcwd(), sys.stdin.read(), world.num_nodes, world.backend]
                    print(rank, *told, "\\u2713", flush=True)
        """,
    )
    ran = run_here("--workdir", str(tmp_path), "--export", "EXTRA=given", "--report", str(tmp_path / "r.json"), script)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"0 given {tmp_path}  1 shm \u2713\n[1]: 1 given {tmp_path}  1 shm \u2713\n"
    first, second = ran.stderr.splitlines()
    assert first.startswith("paceline: 2 ranks on 1 host, which meet at 127.0.0.1 port ")
    assert second == "paceline:   node 0 is localhost: 2 ranks"
    verdict = json.loads((tmp_path / "r.json").read_text())
    assert (verdict["exit_status"], [each["exit_code"] for each in verdict["ranks"]]) == (0, [0, 0])


def test_bytes_of_the_ranks_arrive_as_they_are_on_their_own_streams(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        if os.environ["RANK"] == "0":
            sys.stdout.buffer.write(bytes(range(256)) * 1000 + b"no newline")
            sys.stderr.buffer.write(b"loss\\r 10%\\r")
        """,
    )
    ran = run_here("--no-python", sys.executable, script, text=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == bytes(range(256)) * 1000 + b"no newline"
    assert ran.stderr.endswith(b"2 ranks\nloss\r 10%\r")


def test_ranks_on_a_terminal_have_one_and_learn_of_its_size(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, sys
        here, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
        (here / f"{rank} {sys.stdout.isatty()} {os.get_terminal_size().columns}").touch()
        signal.sigwait([signal.SIGWINCH])
        (here / f"{rank} {os.get_terminal_size().columns}").touch()
        """,
    )
    fd, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    arguments = [*PACELINE, "run", "--hosts", "localhost:2", "--no-python", sys.executable, script]
    process = start(arguments, stdin=other_end, stdout=other_end, stderr=other_end)
    wait_until(lambda: all((tmp_path / f"{rank} True 95").exists() for rank in range(2)))  # less the mark
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 121, 0, 0))
    process.send_signal(signal.SIGWINCH)
    assert process.wait(60) == 0
    assert all((tmp_path / f"{rank} 116").exists() for rank in range(2))
    os.close(fd)
    os.close(other_end)


def waiting(tmp_path, *, stubborn=False):
    """A running launch of two ranks that wait, once they do; and the folder in which they say what they get."""
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script = write_script(
        tmp_path,
        f"""
        import os, pathlib, signal
        here, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
        signal.signal(signal.SIGUSR1, lambda *_: (here / f"told{{rank}}").touch())
        {ignored if stubborn else ""}
        (here / f"ready{{rank}}").touch()
        while True:
            signal.pause()
        """,
    )
    arguments = ["--hosts", "localhost:2", "--grace", "60" if stubborn else "5", "--no-python", sys.executable, script]
    process = start([*PACELINE, "run", *arguments])
    wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    return process


def test_the_command_is_shown_as_the_run_and_asks_all_ranks_where_they_are(tmp_path):
    process = waiting(tmp_path)
    runs = [run for run in look().runs if any(str(tmp_path) in part.command for part in run.processes)]
    assert [(run.launcher.pid, len(run.ranks)) for run in runs] == [(process.pid, 2)]
    assert runs[0].launcher.command.startswith(f"{sys.executable} -m paceline run --hosts localhost:2 ")
    assert {each.pid for each in runs[0].processes} == set(processes_with(str(tmp_path)))
    process.send_signal(signal.SIGUSR2)
    assert "ranks 0-1 in a program that is not Python's" in [process.stderr.readline() for _ in range(3)][-1]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_signals_reach_the_ranks_and_an_interrupt_ends_them(tmp_path):
    process = waiting(tmp_path)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: all((tmp_path / f"told{rank}").exists() for rank in range(2)))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("paceline: interrupted by SIGINT, all ranks have ended\n")
    assert not processes_with(str(tmp_path))


def test_a_second_interrupt_ends_ranks_that_do_not_heed_the_first(tmp_path):
    process = waiting(tmp_path, stubborn=True)
    process.send_signal(signal.SIGINT)
    assert "waiting for ranks 0-1 to end" in [process.stderr.readline() for _ in range(3)][-1]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)  # long before the grace is over
    assert process.returncode == 130
    assert not processes_with(str(tmp_path))


def test_ranks_stand_still_while_the_command_is_stopped(tmp_path):
    process = waiting(tmp_path)
    process.send_signal(signal.SIGTSTP)
    ranks = [pid for pid in processes_with(str(tmp_path)) if os.getpgid(pid) == pid and pid != process.pid]
    stopped = lambda: [pid for pid in [process.pid, *ranks] if read_stat(pid).state == "T"]  # noqa: E731
    wait_until(lambda: process.pid in stopped() and len(stopped()) == 3)  # the agent goes on
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: not stopped())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_a_reader_that_goes_away_ends_the_ranks(tmp_path):
    script = write_script(tmp_path, "import itertools\nfor n in itertools.count(): print(n, flush=True)")
    process = start([*PACELINE, "run", "--hosts", "localhost:2", "--no-python", sys.executable, script])
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    process.stderr.close()
    assert not processes_with(str(tmp_path))


def test_output_that_is_not_read_holds_the_ranks_up_and_is_not_lost(tmp_path):
    script = write_script(
        tmp_path, "import os\nif os.environ['RANK'] == '0':\n    for n in range(60000): print(n, 'x' * 100)"
    )
    process = start([*PACELINE, "run", "--hosts", "localhost:2", "--no-python", sys.executable, script])
    assert process.stderr.readline()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == "".join(f"{n} {'x' * 100}\n" for n in range(60000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "a", "--nnodes", "2"], "--nnodes 2 says what --hosts or --hostfile finds out by itself"),
        (["--hosts", "a", "--rdzv-backend", "c10d"], "--rdzv-backend c10d says what --hosts or --hostfile finds out"),
        (["--hosts", "a", "-g", "4"], "-g 4 says what --hosts or --hostfile finds out by itself"),
        (["--hosts", "a:2", "-n", "4"], "-n 4 is for hosts of which no number is said, but all have one"),
        (["--hosts", "a", "--hostfile", "f"], "--hosts and --hostfile both name the hosts; leave one of them out"),
        (["--hosts", ""], "--hosts : expected HOST, HOST:RANKS, USER@HOST:RANKS or [IPV6]:RANKS, but got ''"),
        (["--hostfile", ""], "the hostfile  cannot be read: No such file or directory"),
        (["--export", "A=1"], "--export is for hosts that are reached over ssh; name them with --hosts"),
        (["--workdir", "/"], "--workdir is for hosts that are reached over ssh; name them with --hosts"),
        (["--hosts", "a", "--signals-to-handle", "SIGX"], "'SIGX' in --signals-to-handle is no signal"),
        (["--hosts", "localhost", "--workdir", "/absent"], "localhost: there is no folder /absent; make it, or name"),
        (["--hosts", "localhost", "--python", "/absent"], "localhost: there is no interpreter /absent; install it, or"),
        (["--hosts", "localhost"], "localhost: no such script: 'absent.py'"),
        (["--hosts", "localhost", "-n", "many"], "localhost: expected a number, auto, cpu or gpu for -n, but got"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_starts(arguments, message):
    ran = paceline_run(*arguments, "absent.py")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_an_ssh_that_cannot_be_started_is_an_error():
    ran = paceline_run("--hosts", "elsewhere", "train.py", env={"PACELINE_SSH": "/absent/ssh -v"})
    message = "/absent/ssh cannot be started: No such file or directory; install it, or name another in PACELINE_SSH"
    assert (ran.returncode, ran.stderr) == (2, f"paceline: {message}\n")


def test_an_interrupt_while_a_host_does_not_answer_leaves_nothing_of_an_ssh_that_is_a_script(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nsh -c 'sleep 600; : {tmp_path}' &\ntouch {tmp_path}/asked\nwait\n")
    ssh.chmod(0o755)
    process = start([*PACELINE, "run", "--hosts", "b", "train.py"], env={"PACELINE_SSH": str(ssh)})
    wait_until((tmp_path / "asked").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "paceline: interrupted by SIGINT, nothing was started\n")
    wait_until(lambda: not processes_with(str(tmp_path)))


def test_an_interrupt_while_a_host_does_not_answer_starts_nothing(tmp_path):
    asleep = tmp_path / "python"
    asleep.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 600\n")
    asleep.chmod(0o755)
    process = start([*PACELINE, "run", "--hosts", "localhost", "--python", str(asleep), "train.py"])
    wait_until((tmp_path / "asked").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "paceline: interrupted by SIGINT, nothing was started\n")
