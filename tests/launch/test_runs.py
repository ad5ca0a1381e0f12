"""Finding what runs and what was left behind, and ending the latter: on snapshots, and on a real run."""

import os
import signal
import subprocess
import sys

import pytest

from paceline.errors import LaunchError
from paceline.launch.ports import claim_port
from paceline.launch.runs.look import Process, Run, look, read_process, sort_out
from paceline.launch.runs.sweep import Swept, describe_survivor, sweep
from paceline.launch.runs.usage import Usage, measure, parse_devices
from paceline.processes import Launcher, started_at
from support.commands import PACELINE, processes_with, start, wait_until, write_script

# A rank of this has what real ones have: a worker in its group, and a program that it has started. Here the latter
# has a session of its own, so it outlives even a launcher that is killed. So does what rank 0 makes a daemon.
ESCAPING = """
import os, pathlib, signal, socket, subprocess, sys, time
here, rank = pathlib.Path(__file__).parent, os.environ["RANK"]
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", str(here)], start_new_session=True)
if rank == "0":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            listener = socket.create_server(("127.0.0.1", 0))
            (here / "port.part").write_text(str(listener.getsockname()[1]))
            (here / "port.part").rename(here / "port")
            time.sleep(60)
        os._exit(0)
    os.wait()
    while not (here / "port").exists():
        time.sleep(0.01)
(here / f"ready{rank}").touch()
time.sleep(60)
"""


@pytest.fixture
def escaping(tmp_path):
    """A launcher whose two ranks have started everything; what is left of them ends with the test."""
    launcher = start([*PACELINE, "run", "-n", "2", write_script(tmp_path, ESCAPING)])
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        yield launcher
    finally:
        launcher.kill()
        for pid in processes_with(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()
        wait_until(lambda: not processes_with(str(tmp_path)))


def orphans_of(launcher):
    return [orphan for orphan in look().orphans if orphan.launcher.pid == launcher]


def test_a_run_is_found_while_its_launcher_lives_and_what_escaped_it_when_that_is_killed(tmp_path, escaping):
    run = next(run for run in look().runs if run.launcher.pid == escaping.pid)
    script = str(tmp_path / "script.py")
    assert run.launcher.command == f"{sys.executable} -m paceline run -n 2 {script}"
    assert len(run.ranks) == 2
    # The launcher, the server, the store's host; the ranks, a worker and a program of each; the daemon.
    assert {process.pid for process in run.processes} == set(processes_with(str(tmp_path)))
    assert orphans_of(escaping.pid) == []
    port = int((tmp_path / "port").read_text())
    with pytest.raises(LaunchError) as caught:
        claim_port(port, backlog=4)
    assert "orphan" not in str(caught.value)

    escaping.kill()
    escaping.communicate()
    left = wait_until(lambda: len(found := orphans_of(escaping.pid)) == 3 and found)
    daemon = next(orphan for orphan in left if "time.sleep" not in orphan.command)
    assert (daemon.command.split()[0], daemon.command.split()[-1]) == (sys.executable, script)
    assert "-c" not in daemon.command
    with pytest.raises(LaunchError) as caught:
        claim_port(port, backlog=4)
    message = str(caught.value)
    assert message.startswith(f"port {port} is taken by pid {daemon.pid} ('{sys.executable[:30]}")
    assert f"{script[-30:]}', started 2" in message
    assert "; an orphan of a launcher that has died: `paceline clean` ends it); end that process" in message

    swept = sweep(left, grace_s=0.5)
    assert [orphan.pid for orphan in swept.ended] == [orphan.pid for orphan in left]
    assert (swept.surviving, orphans_of(escaping.pid), processes_with(str(tmp_path))) == ((), [], [])


def process(pid, *, started=0, parent=1, group=None, launcher=None, state="S"):
    return Process(pid, started or pid, parent, group or pid, state, ("python", f"{pid}.py"), launcher)


def test_processes_are_sorted_by_the_launcher_that_they_descend_from():
    living, dead, reused = Launcher(10, 10), Launcher(20, 20), Launcher(30, 1)
    launcher = process(10)
    server = process(11, parent=10, launcher=living)
    store = process(12, parent=11, group=11, launcher=living)
    ranks = (process(13, parent=11, launcher=living), process(14, parent=11, launcher=living))
    helper = process(15, parent=13, launcher=living)  # in a session of its own, but no rank
    lost, spared, impostor = process(21, launcher=dead), process(22, launcher=dead), process(30)
    of_impostor = process(31, launcher=reused)
    processes = [of_impostor, impostor, spared, lost, helper, *ranks, store, server, launcher]
    findings = sort_out(processes, living={living}, spared={22})
    assert findings.runs == (Run(launcher, (server, store, *ranks, helper)),)
    assert findings.runs[0].ranks == ranks
    assert findings.orphans == (lost, of_impostor)


def test_a_launcher_that_a_rank_of_a_dead_one_had_started_is_a_run():
    outer, inner = Launcher(10, 10), Launcher(21, 21)
    head, server = process(21, launcher=outer), process(22, parent=21, launcher=inner)
    findings = sort_out([head, server, process(20, launcher=outer)], living={inner}, spared=())
    assert findings.runs == (Run(head, (server,)),)
    assert findings.orphans == (process(20, launcher=outer),)


def test_what_a_command_for_several_hosts_has_launched_here_is_its_run():
    command, agent = Launcher(10, 10), Launcher(12, 12)
    conductor, ssh, head = (
        process(10),
        process(11, parent=10, launcher=command),
        process(12, parent=10, launcher=command),
    )
    server, rank = process(13, parent=12, launcher=agent), process(14, parent=13, launcher=agent)
    findings = sort_out([conductor, ssh, head, server, rank], living={command, agent}, spared=())
    assert findings.runs == (Run(conductor, (ssh, head, server, rank)),)
    assert findings.runs[0].ranks == (rank,)
    findings = sort_out([ssh, head, server, rank], living={agent}, spared=())  # an agent ends itself, with its ranks
    assert findings.runs == (Run(head, (server, rank)),)
    assert findings.orphans == (ssh,)


def sleeping_orphan(*command):
    mark = f"{os.getpid()}:1"  # this test's pid, but not its start
    return start(command or ["sleep", "60"], env={"PACELINE_LAUNCHER": mark})


def test_a_launcher_whose_pid_was_taken_over_is_dead_and_the_impostor_is_not_touched():
    with sleeping_orphan() as sleeper:
        (orphan,) = orphans_of(os.getpid())
        assert (orphan.pid, orphan.launcher, orphan.argv) == (sleeper.pid, Launcher(os.getpid(), 1), ("sleep", "60"))
        assert 0 <= orphan.age_s < 60
        assert sweep([orphan]) == Swept((orphan,), ())
        assert sleeper.wait() == -signal.SIGTERM
    assert orphans_of(os.getpid()) == []


def test_whoever_is_no_more_that_orphan_gets_no_signal():
    seen = [
        {"started": 1},  # the pid was taken over since
        {"launcher": Launcher(os.getpid(), 2)},  # it has become part of another launch
    ]
    mine = f"{os.getpid()}:{started_at(os.getpid())}"
    with sleeping_orphan() as sleeper, start(["sleep", "60"], env={"PACELINE_LAUNCHER": mine}) as living:
        (orphan,) = orphans_of(os.getpid())
        fakes = [Process(**{**vars(orphan), **change}) for change in seen]
        assert sweep([*fakes, read_process(living.pid)]) == Swept((), ())
        assert (sleeper.poll(), living.poll()) == (None, None)
        sleeper.kill()
        living.kill()
        sleeper.wait()
        assert sweep([orphan]) == Swept((), ())  # it ended by itself


def test_who_does_not_end_in_time_survives_and_is_described():
    with sleeping_orphan() as sleeper:
        (orphan,) = orphans_of(os.getpid())
        (survivor,) = sweep([orphan], grace_s=0).surviving
        assert survivor.pid == sleeper.pid
    assert describe_survivor(process(7, state="D")) == (
        "pid 7 (python 7.py) could not be ended: it waits in the kernel (state D), and ends as soon as that returns"
    )
    assert describe_survivor(process(7)) == (
        "pid 7 (python 7.py) could not be ended: it is in state S; look at it with `ps -p 7`"
    )


def test_memory_is_shared_out_and_devices_are_asked_by_pid():
    pid = os.getpid()
    usage = measure([pid, 999_999_999])
    assert usage[999_999_999] == Usage(None, None)
    assert 1 << 20 < usage[pid].pss_bytes < 1 << 36
    assert Usage(3, None) + Usage(None, None) + Usage(4, 5) == Usage(7, 5)
    answer = "12, 512\n12, 256\n13, [N/A]\nNo running processes found\n14, 1\n"
    assert parse_devices(answer) == {12: 768 << 20, 14: 1 << 20}


def test_a_driver_that_is_there_is_asked(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = --query-compute-apps=pid,used_memory ] && echo 1, 512\n')
    program.chmod(0o755)
    code = "from paceline.launch.runs.usage import measure; print(measure([1])[1].device_bytes)"
    for path, told in ((tmp_path, 512 << 20), (tmp_path / "none", None)):
        ran = subprocess.run([sys.executable, "-c", code], env={"PATH": f"{path}"}, capture_output=True, text=True)
        assert (ran.stdout, ran.stderr) == (f"{told}\n", "")
