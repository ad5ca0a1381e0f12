"""What the launcher does when ranks fail and when it is signalled: the real command, on small scripts."""

import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile

import pytest

from support.commands import (
    PACELINE,
    in_the_end,
    paceline_run,
    processes_with,
    run_command,
    start,
    wait_until,
    write_script,
)

# Each rank touches a file when it has come this far; the tests wait for these rather than for time to pass.
READY = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(__file__).parent

def ready():
    (here / f"ready{rank}").touch()

def wait_for(*ranks):
    while not all((here / f"ready{rank}").exists() for rank in ranks):
        time.sleep(0.01)

"""


def ready_script(folder: pathlib.Path, source: str) -> str:
    path = pathlib.Path(write_script(folder, source))
    path.write_text(READY + path.read_text())
    return str(path)


def wait_ready(folder: pathlib.Path, num_ranks: int) -> None:
    wait_until(lambda: len(list(folder.glob("ready*"))) == num_ranks)


def gone(folder: pathlib.Path) -> bool:
    return not processes_with(str(folder))


def test_the_first_traceback_comes_last_as_python_prints_it(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, time

        def inner():
            raise ValueError("boom \\u00e9 \\udc80")

        try:
            inner() if os.environ["RANK"] == "1" else time.sleep(60)
        except ValueError as error:
            raise RuntimeError("while it was handled") from error
        """,
    )
    ran = paceline_run("-n", "3", script, timeout_s=30)
    assert ran.returncode == 1
    head, _, traceback = in_the_end(ran.stderr).partition("paceline: rank 1 failed first, exit code 1:\n")
    assert head == "paceline: ranks 0, 2 stopped by the launcher (collateral)\n"
    assert "boom \u00e9 \\udc80" in traceback
    assert traceback == run_command([sys.executable, script], env={"RANK": "1"}).stderr


def test_the_first_failure_gives_the_exit_code(tmp_path):
    endings = {
        "sys.exit(42)": (42, "paceline: rank 1 failed first, exit code 42\n"),
        "os._exit(7)": (7, "paceline: rank 1 failed first, exit code 7\n"),
        "sys.exit('no data')": (1, "paceline: rank 1 failed first, exit code 1:\nno data\n"),
        "os.kill(os.getpid(), signal.SIGSEGV)": (139, "paceline: rank 1 failed first, killed by SIGSEGV\n"),
        "raise KeyboardInterrupt": (130, "KeyboardInterrupt\n"),
    }
    launches = {}
    for n, source in enumerate(endings):
        script = ready_script(tmp_path / str(n), f"if rank == 1:\n    {source}\ntime.sleep(60)")
        launches[source] = start([*PACELINE, "run", "-n", "2", script])
    for source, (status, last) in endings.items():
        _, err = launches[source].communicate(timeout=60)
        assert (source, launches[source].returncode) == (source, status)
        assert err.endswith(last)
        assert err.count("no data") == source.count("no data")
        assert "paceline: rank 0 stopped by the launcher (collateral)\n" in err


def test_a_killed_rank_comes_before_the_exceptions_that_it_caused(tmp_path):
    script = ready_script(
        tmp_path,
        """
        import socket
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                (here / "port").write_text(str(server.getsockname()[1]))
                ready()
                peer = server.accept()[0]
            peer.recv(1)
            raise ConnectionError("the peer went away")
        wait_for(0)
        connection = socket.create_connection(("127.0.0.1", int((here / "port").read_text())))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    ran = paceline_run("-n", "2", script)
    assert ran.returncode == 137
    collateral, first = in_the_end(ran.stderr).splitlines()
    assert collateral == "paceline: rank 0 failed too (collateral), exit code 1: ConnectionError: the peer went away"
    assert first.startswith("paceline: rank 1 failed first, killed by SIGKILL")


def test_syntax_errors_and_chosen_hooks_look_as_in_python(tmp_path):
    broken = write_script(tmp_path, "def f(:\n")
    ran = paceline_run(broken)
    assert ran.returncode == 1
    assert ran.stderr.endswith("exit code 1:\n" + run_command([sys.executable, broken]).stderr)
    hooked = write_script(
        tmp_path,
        """
        import sys, traceback
        sys.excepthook = lambda kind, error, frames: print("hook:", kind.__name__, len(traceback.extract_tb(frames)))
        raise KeyError("x")
        """,
    )
    ran = paceline_run(hooked)
    assert (ran.returncode, ran.stdout) == (1, "hook: KeyError 1\n")
    assert ran.stderr.endswith("KeyError: 'x'\n")


def test_a_failure_that_cannot_be_reported_is_printed_by_the_rank(tmp_path):
    script = write_script(tmp_path, "import os\nos.closerange(3, 100)\nraise ValueError('boom')")
    ran = paceline_run(script)
    assert ran.returncode == 1
    expected = run_command([sys.executable, script]).stderr
    assert in_the_end(ran.stderr) == expected + "paceline: rank 0 failed first, exit code 1\n"


def test_a_forked_child_does_not_speak_for_its_rank(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        if pid := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 1)
        raise ValueError("in the child")
        """,
    )
    ran = paceline_run(script)
    assert ran.returncode == 0
    assert ran.stderr.endswith("ValueError: in the child\n")
    assert "paceline:" not in ran.stderr


STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    time.sleep(60)
"""


def test_ranks_that_ignore_sigterm_are_killed_after_the_grace(tmp_path):
    script = ready_script(tmp_path, "if rank == 1:\n    wait_for(0)\n    sys.exit(3)\n" + STUBBORN.replace("    ", ""))
    ran = paceline_run("-n", "2", "--grace", "0.3", script, timeout_s=30)
    assert ran.returncode == 3
    assert gone(tmp_path)


def test_ctrl_c_interrupts_every_rank_without_tracebacks(tmp_path):
    script = ready_script(
        tmp_path,
        """
        ready()
        try:
            time.sleep(60)
        finally:
            print("cleaned up", rank, flush=True)
        """,
    )
    process = start([*PACELINE, "run", "-n", "2", script])
    wait_ready(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert sorted(line[-12:] for line in out.splitlines()) == ["cleaned up 0", "cleaned up 1"]
    *places, last = in_the_end(err).splitlines()
    assert [re.sub(r"\d+, in", "N, in", place) for place in places] == [
        f"paceline: rank {rank} was at script.py:N, in <module>" for rank in range(2)
    ]
    assert last == "paceline: interrupted by SIGINT, all ranks have ended"
    assert gone(tmp_path)


def test_a_second_ctrl_c_kills_at_once(tmp_path):
    script = ready_script(
        tmp_path,
        """
        signal.signal(signal.SIGINT, lambda *_: (here / "interrupted").touch())
        ready()
        while True:
            time.sleep(60)
        """,
    )
    process = start([*PACELINE, "run", "--grace", "60", script])
    wait_ready(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "interrupted").exists)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert gone(tmp_path)


@pytest.mark.parametrize("hosts", [["-n", "2"], ["--hosts", "localhost:2"]])
def test_ctrl_c_while_others_are_waited_for_still_tells_what_failed(tmp_path, hosts):
    script = ready_script(
        tmp_path,
        """
        if rank == 0:
            wait_for(1)
            raise ValueError("the reason")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        while True:
            time.sleep(60)
        """,
    )
    process = start([*PACELINE, "run", *hosts, "--grace", "inf", script])
    while "waiting for rank 1 to end" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    *told, failure, last = err.splitlines()
    assert any("rank 0" in line and "failed first, exit code 1" in line for line in told)
    assert (failure, last) == ("ValueError: the reason", "paceline: interrupted by SIGINT, all ranks have ended")
    assert gone(tmp_path)


def test_ctrl_c_before_the_ranks_start_ends_the_launch(tmp_path):
    process = start([*PACELINE, "run", "-n", "2", ready_script(tmp_path, "ready(); time.sleep(60)")])
    wait_until(lambda: len(processes_with(str(tmp_path))) == 2)  # the launcher and its server, which imports torch
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, in_the_end(err)) == (130, "paceline: interrupted by SIGINT, all ranks have ended\n")
    assert gone(tmp_path)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_sigterm_and_sighup_let_the_ranks_save(tmp_path, signum, status):
    script = ready_script(
        tmp_path,
        """
        def save(*_):
            print("saved", flush=True)
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        ready()
        time.sleep(60)
        """,
    )
    process = start([*PACELINE, "run", script])
    wait_ready(tmp_path, 1)
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (status, "saved\n")
    assert in_the_end(err) == f"paceline: interrupted by {signum.name}, all ranks have ended\n"


def test_a_rank_that_has_slept_through_sigterm_is_woken(tmp_path):
    """Another thread takes the signal, which is as if it had come in the moment before the main one slept."""
    script = ready_script(
        tmp_path,
        """
        import threading
        def save(*_):
            print("saved", flush=True)
            sys.exit()
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        signal.signal(signal.SIGTERM, save)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ready()
        time.sleep(600)
        """,
    )
    process = start([*PACELINE, "run", "--grace", "600", script])
    wait_ready(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "saved\n")


def test_sigusr1_and_sigusr2_are_passed_on_and_the_launcher_lives(tmp_path):
    script = ready_script(
        tmp_path,
        """
        signals = [signal.SIGUSR1, signal.SIGUSR2]
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        ready()
        for signum in signals:
            signal.sigwait([signum])
            (here / f"{signum.name}-{rank}").touch()
        signal.sigwait([signal.SIGUSR1])
        """,
    )
    said = tmp_path / "stderr"
    with open(said, "w") as err:
        process = start([*PACELINE, "run", "-n", "2", script], stderr=err)
    wait_ready(tmp_path, 2)
    for name in ("SIGUSR1", "SIGUSR2"):
        process.send_signal(signal.Signals[name])
        wait_until(lambda name=name: len(list(tmp_path.glob(f"{name}-*"))) == 2)
    wait_until(lambda: "in no collective" in said.read_text())  # what SIGUSR2 is for, too
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")


def test_ctrl_z_stops_the_ranks_too(tmp_path):
    process = start([*PACELINE, "run", ready_script(tmp_path, "ready(); time.sleep(60)")])
    wait_ready(tmp_path, 1)

    def states() -> list[str]:
        pids = processes_with(str(tmp_path))
        return [pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]

    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: states().count("T") == 2)  # the launcher and the rank
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: states().count("T") == 0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143


WITH_CHILDREN = """
    import multiprocessing
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(here)])
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
    ready()
    time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["launcher", "server"])
def test_nothing_survives_the_launcher_or_its_server(tmp_path, victim):
    process = start([*PACELINE, "run", "-n", "2", ready_script(tmp_path, WITH_CHILDREN)])
    wait_ready(tmp_path, 2)
    pids = processes_with(str(tmp_path))
    assert len(pids) == 9  # launcher, server, store host, and three a rank
    server = children(process.pid)[0]
    os.kill(process.pid if victim == "launcher" else server, signal.SIGKILL)
    wait_until(lambda: gone(tmp_path), timeout_s=10)
    _, err = process.communicate(timeout=30)
    if victim == "server":
        assert process.returncode == 2
        assert err.startswith("paceline: the fork server was killed by SIGKILL")
        assert err.endswith("; its ranks were stopped\n")


def test_the_death_of_the_stores_host_ends_the_launch(tmp_path):
    process = start([*PACELINE, "run", "-n", "2", ready_script(tmp_path, "ready(); time.sleep(600)")])
    wait_ready(tmp_path, 2)
    server = children(process.pid)[0]
    os.kill(children(server)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (2, "paceline: the process that hosts the ranks' store died\n")
    assert gone(tmp_path)


def children(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_trace_of_torchs_own_hook_does_not_bury_the_first(tmp_path):
    script = write_script(
        tmp_path,
        """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(1))
        """,
    )
    ran = paceline_run("-n", "2", script)
    assert ran.returncode == 1
    assert ran.stdout == ""
    collateral, _, traceback = in_the_end(ran.stderr).partition("paceline: rank 1 failed first, exit code 1:\n")
    # Whether rank 0 has noticed before it is stopped depends on how soon rank 1's connections close.
    noticed = r"failed too \(collateral\), exit code 1: .*|stopped by the launcher \(collateral\)"
    assert re.fullmatch(rf"paceline: rank 0 ({noticed})\n", collateral)
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith("\nValueError: bad batch\n")


def test_what_a_script_leaves_in_its_group_ends_with_the_launch(tmp_path):
    source = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', str(here)])"
    ran = paceline_run("-n", "2", ready_script(tmp_path, source), timeout_s=30)
    assert ran.returncode == 0
    assert gone(tmp_path)


def test_a_busy_port_is_an_error_before_anything_starts(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        ran = paceline_run("--master_port", port, write_script(tmp_path, "print('ran')"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"paceline: port {port} is taken by pid {os.getpid()} (")
    assert ran.stderr.count("\n") == 1


def test_a_fixed_port_is_the_one_that_the_ranks_get(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    ran = paceline_run("--master-port", port, write_script(tmp_path, "import os; print(os.environ['MASTER_PORT'])"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{port}\n", "")


def test_a_torch_that_cannot_be_imported_is_an_error_of_the_launch(tmp_path):
    write_script(tmp_path, "raise RuntimeError('half installed')", "broken/torch.py")
    ran = paceline_run(write_script(tmp_path, "pass"), env={"PYTHONPATH": str(tmp_path / "broken")})
    assert ran.returncode == 2
    assert "RuntimeError: half installed\n" in ran.stderr
    assert ran.stderr.splitlines()[-1] == (
        "paceline: the fork server ended with exit code 1; no rank was started; what it said stands above"
    )


@pytest.fixture
def open_folder():
    """One that all users may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield pathlib.Path(folder)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, and setpriv")
def test_a_rank_that_becomes_another_users_is_named_and_not_waited_for(open_folder):
    """As ``--no-python sudo ...`` does it: a copy of the interpreter takes root's rights, and the launcher has none."""
    interpreter = shutil.copy(sys._base_executable, open_folder / "interpreter")
    os.chmod(interpreter, 0o4755)
    script = write_script(
        open_folder,
        """
        import os, pathlib, time
        if os.geteuid() == 0:
            os.setresuid(0, 0, 0)
        (pathlib.Path(__file__).parent / f"user{os.getuid()}").touch()
        time.sleep(600)
        """,
    )
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # to find all that a test is made of
    unprivileged = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *rights]
    arguments = ["--grace", "0.1", "--no-python", interpreter, "-E", script]
    process = start([*unprivileged, *PACELINE, "run", *arguments], cwd="/")
    try:
        wait_until(lambda: list(open_folder.glob("user*")) or process.poll())
        if not (open_folder / "user0").exists():
            pytest.skip("programs do not change their user here")
        (rank,) = [pid for pid in processes_with(script) if os.stat(f"/proc/{pid}").st_uid == 0 and pid != process.pid]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert in_the_end(err) == (
            f"paceline: interrupted by SIGINT; rank 0 (pid {rank}) has become another user's process, which this "
            "launcher may not end: it goes on\n"
        )
        assert processes_with(script) == [rank]
    finally:
        process.kill()
        for pid in processes_with(script):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
        wait_until(lambda: gone(open_folder))
