"""Restarts, and what a rank finds in each life: the real command, on small scripts."""

import json
import re
import signal
import socket

import pytest

from support.commands import PACELINE, in_the_end, paceline_run, processes_with, start, wait_until, write_script


def test_ranks_start_again_until_they_succeed_or_no_restart_is_left(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys
        life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
        print(f"life {life} rank {rank}", flush=True)
        if rank == "1" and life < int(sys.argv[1]):
            sys.exit(7)
        """,
    )
    ran = paceline_run("-n", "2", "--max-restarts", "2", script, "2")
    assert ran.returncode == 0
    assert re.findall(r"life \d rank 1", ran.stdout) == ["life 0 rank 1", "life 1 rank 1", "life 2 rank 1"]
    assert [line for line in in_the_end(ran.stderr).splitlines() if "collateral" not in line] == [
        "paceline: rank 1 failed first, exit code 7",
        "paceline: all ranks start again (restart 1 of 2)",
        "paceline: rank 1 failed first, exit code 7",
        "paceline: all ranks start again (restart 2 of 2)",
    ]
    assert ran.returncode == 0
    ran = paceline_run("-n", "2", "--max-restarts", "1", script, "9")
    assert ran.returncode == 7
    assert ran.stderr.endswith("paceline: rank 1 failed first, exit code 7\n")


LIVES = """
import os, pathlib, signal, subprocess, sys, time
import torch, torch.distributed as dist
import paceline

life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with paceline.init(sys.argv[1], device="cpu") as world:
    x = torch.ones(1000)
    for step in range(4):
        dist.all_reduce(x)
        if step == 1 and world.rank == life % 2 and life < int(sys.argv[2]):
            subprocess.Popen(["sleep", "600"])  # which the next life must not find
            print("killed", time.time(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 2:
            print("stepped", life, time.time(), os.environ["MASTER_PORT"], flush=True)
"""


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_killed_rank_comes_back_each_time_at_a_store_of_its_own(tmp_path, backend):
    script = write_script(tmp_path, LIVES)
    ran = paceline_run("-n", "2", "--max-restarts", "4", script, backend, "4", timeout_s=60)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall(r"stepped 4", ran.stdout)) == 2
    assert ran.stderr.count("failed first, killed by SIGKILL") == 4
    assert not processes_with(str(tmp_path))


def test_a_single_rank_meets_itself_in_each_life(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, sys, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)  # its store is not closed
        print(dist.get_world_size())
        """,
    )
    ran = paceline_run("--max-restarts", "1", script)
    assert (ran.returncode, ran.stdout) == (0, "1\n"), ran.stderr


def test_ranks_that_make_room_are_waited_for_and_not_started_again(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, sys, time
        first = pathlib.Path(__file__).parent / "first"
        if os.environ["RANK"] == "1":
            first.touch()
            sys.exit(75)
        while not first.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # more than what failures of one cause may be apart
        print("saved")
        os._exit(75)
        """,
    )
    ran = paceline_run("-n", "2", "--max-restarts", "3", "--report", str(tmp_path / "report.json"), script)
    assert (ran.returncode, ran.stdout) == (75, "saved\n")
    assert in_the_end(ran.stderr) == "paceline: ranks 0-1 stopped early (exit code 75), to go on another time\n"
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["exit_status"], told["root_cause"], told["num_restarts"]) == (75, None, 0)


def test_a_rank_that_fails_while_another_makes_room_is_a_failure(tmp_path):
    script = write_script(tmp_path, "import os, sys; sys.exit(75 if os.environ['RANK'] == '0' else 3)")
    ran = paceline_run("-n", "2", script)
    assert (ran.returncode, in_the_end(ran.stderr)) == (3, "paceline: rank 1 failed first, exit code 3\n")


def test_a_port_of_the_users_serves_all_lives(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        assert dist.get_world_size() == 2
        dist.destroy_process_group()
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        print(os.environ["MASTER_PORT"])
        """,
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ran = paceline_run("-n", "2", "--max-restarts", "1", "--master-port", port, script)
    assert (ran.returncode, ran.stdout.count(port)) == (0, 2), ran.stderr


def test_an_interrupt_between_lives_ends_the_launch(tmp_path):
    script = write_script(tmp_path, "import pathlib, sys; pathlib.Path(__file__ + '.ran').touch(); sys.exit(1)")
    process = start([*PACELINE, "run", "-n", "1", "--max-restarts", "100000", script])
    wait_until((tmp_path / "script.py.ran").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    process.communicate()
    assert not processes_with(str(tmp_path))


def test_the_verdict_as_json(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        time.sleep(60)
        """,
    )
    report = tmp_path / "report.json"
    ran = paceline_run("-n", "2", "--max-restarts", "1", "--report", str(report), script)
    told = json.loads(report.read_text())
    assert (ran.returncode, told["exit_status"], told["root_cause"], told["num_restarts"]) == (1, 1, 1, 1)
    stopped, failed = told["ranks"]
    assert (stopped["signal"], stopped["was_stopped"], stopped["is_root_cause"]) == ("SIGTERM", True, False)
    assert (failed["exit_code"], failed["error"], failed["is_root_cause"]) == (1, "ValueError: boom", True)
    assert failed["traceback"].endswith("ValueError: boom\n")


def test_an_error_that_all_ranks_share_is_told_once(tmp_path):
    # On a slow machine the last to fail has been asked to stop by then.
    script = write_script(
        tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); import nowhere_to_be_found"
    )
    ran = paceline_run("-n", "3", script)
    assert re.match(
        r"paceline: ranks \d, \d failed in the same way\n|paceline: ranks \d-\d failed in the same way\n",
        in_the_end(ran.stderr),
    )
    assert in_the_end(ran.stderr).count("ModuleNotFoundError") == 1


def test_who_is_waited_for_is_said(tmp_path):
    script = write_script(
        tmp_path,
        """
        import os, pathlib, signal, time
        if os.environ["RANK"] == "1":
            while not pathlib.Path(__file__ + ".deaf").exists():
                time.sleep(0.01)
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(__file__ + ".deaf").touch()
        time.sleep(60)
        """,
    )
    ran = paceline_run("-n", "2", "--grace", "2", script)
    assert ran.stderr.startswith("paceline: a rank failed, ValueError: boom\npaceline: waiting for rank 0 to end\n")
    assert ran.stderr.endswith("ValueError: boom\n")


def test_a_program_that_is_not_pythons(tmp_path):
    ran = paceline_run("-n", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE"; exit $RANK')
    assert "0 of 2\n" in ran.stdout
    assert "[1]: 1 of 2\n" in ran.stdout
    assert (ran.returncode, in_the_end(ran.stderr)) == (1, "paceline: rank 1 failed first, exit code 1\n")
    ran = paceline_run("--no-python", "no-such-program")
    assert (ran.returncode, ran.stderr) == (2, "paceline: no such program: 'no-such-program' (looked along PATH)\n")


def test_flags_of_tutorials_and_torchruns_environment(tmp_path):
    script = write_script(tmp_path, 'import os; print(os.environ["WORLD_SIZE"], os.environ["ROLE_NAME"])')
    ran = paceline_run("-n", "1", "-g", "3", "-nr", "0", "--role", "trainer", script)
    assert ran.stdout.count("3 trainer") == 3
    ran = paceline_run(script, env={"PET_NPROC_PER_NODE": "2", "PET_ROLE": "other"})
    assert ran.stdout.count("2 other") == 2
    ran = paceline_run("--standalone", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv_endpoint=localhost:0", script)
    assert ran.stdout == "1 default\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "two", "x"], "expected --nnodes N or LEAST:MOST, but got 'two'"),
        (["--nnodes", "3:2", "x"], "expected --nnodes N, or LEAST:MOST with 1 <= LEAST <= MOST, but got 3:2"),
        (["--nnodes", "2", "--node-rank", "2", "x"], "expected --node-rank from 0 to 1, but got 2"),
        (["--nnodes", "1:2", "x"], "--nnodes 1:2 lets hosts come and go, which a static rendezvous cannot; add"),
        (["--max-restarts", "-1", "-m", "x"], "expected 0 restarts or more, but got -1"),
        (["--signals-to-handle", "SIGKILL", "-m", "x"], "'SIGKILL' in --signals-to-handle is no signal that can be"),
        (["--logs-specs", "mine", "-m", "x"], "--logs-specs mine: plugins of torchrun's do not run here; leave it out"),
        (["--redirects", "4", "-m", "x"], "expected --redirects 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one"),
        (["--local-ranks-filter", "a", "-m", "x"], "expected local ranks for --local-ranks-filter, as in 0,2,3, but"),
    ],
)
def test_values_that_cannot_be_are_one_line_and_exit_code_2(arguments, message):
    ran = paceline_run(*arguments)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert ran.stderr.startswith(f"paceline: {message}")


def test_further_signals_are_passed_on(tmp_path):
    script = write_script(
        tmp_path,
        """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGWINCH, signal.SIG_IGN)
        signal.signal(signal.SIGURG, lambda *_: sys.exit(9))
        pathlib.Path(__file__ + ".ready").touch()
        time.sleep(60)
        """,
    )
    process = start([*PACELINE, "run", "--signals-to-handle", "SIGTERM,SIGURG", script])
    wait_until((tmp_path / "script.py.ready").exists)
    process.send_signal(signal.SIGURG)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 9, err
