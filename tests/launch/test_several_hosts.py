"""Several launchers that meet, as on several hosts: here all on one, which torch's rendezvous cannot tell."""

import contextlib
import re
import signal
import socket
import sys

import psutil
import pytest

from support.commands import PACELINE, in_the_end, processes_with, run_command, start, wait_until, write_script
from support.ipv6 import needs_ipv6

TRAINS = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
import paceline

life, here = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), pathlib.Path(__file__).parent
with paceline.init("gloo", device="cpu") as world:
    x = torch.tensor([float(world.rank)])
    dist.all_reduce(x)
    here_i_am = f"rank {world.rank} of {world.world_size} local {world.local_rank} node {world.node_rank}"
    print(f"life {life} {here_i_am} sum {x.item()}", flush=True)
    exec(sys.argv[1] if len(sys.argv) > 1 else "")
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launchers(flags_of, num_hosts, script, *args):
    """Running launchers, one for each host."""
    env = {"OMP_NUM_THREADS": "1"}
    return [start([*PACELINE, "run", *flags_of(node), script, *args], env=env) for node in range(num_hosts)]


def finish(processes):
    """Exit code, stdout and stderr of each."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        ended.append((process.returncode, out, err))
    return ended


def static(port, *others):
    return lambda node: [
        *("--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
        *(f"--nproc-per-node={node + 1}", *others),
    ]


def c10d(port, *others):
    return lambda _: [
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}", "-n", "1"),
        *others,
    ]


def test_hosts_with_unequal_numbers_of_ranks_make_one_world(tmp_path):
    first, second = finish(launchers(static(free_port()), 2, write_script(tmp_path, TRAINS)))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "life 0 rank 0 of 3 local 0 node 0 sum 3.0" in first[1]
    assert "life 0 rank 1 of 3 local 0 node 1 sum 3.0" in second[1]
    assert "life 0 rank 2 of 3 local 1 node 1 sum 3.0" in second[1]
    for node, (_, _, err) in enumerate((first, second)):
        heads = [line.split(" port ")[0] for line in err.splitlines()]
        assert heads[0] == "paceline: 3 ranks on 2 hosts, which meet at 127.0.0.1"
        assert (
            [line[10:18] for line in heads[1:]] == ["* node 0", "  node 1"] if node == 0 else ["  node 0", "* node 1"]
        )


def an_address_that_the_hosts_name_does_not_lead_to() -> str:
    with contextlib.suppress(OSError):
        named = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)}
        for entries in psutil.net_if_addrs().values():
            for entry in entries:
                is_other = entry.address not in {*named, "::1"} and "%" not in entry.address
                if entry.family == socket.AF_INET6 and is_other:
                    return entry.address
    pytest.skip("this host has no IPv6 address that its name does not lead to")


@pytest.mark.slow
@needs_ipv6
def test_hosts_meet_by_ipv6(tmp_path):
    address, port = an_address_that_the_hosts_name_does_not_lead_to(), free_port()
    flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=[{address}]:{port}", f"--local-addr={address}"]
    both = launchers(lambda _: flags, 2, write_script(tmp_path, TRAINS.replace('"gloo"', '"hier"')))
    port = free_port()
    flags = ["--nnodes=2", "--master-addr=::1", f"--master-port={port}"]
    both += launchers(lambda node: [*flags, f"--node-rank={node}"], 2, write_script(tmp_path, TRAINS, "second.py"))
    said = finish(both)
    for code, out, err in said:
        assert code == 0, err
        assert re.search(r"rank [01] of 2 local 0 node [01] sum 1\.0", out)
    for (_, _, err), where in zip(said, [address, address, "::1", "::1"], strict=True):
        assert f"paceline: 2 ranks on 2 hosts, which meet at {where} port " in err


@pytest.mark.parametrize("flags_of", [static, c10d])
def test_all_hosts_start_again_and_all_say_who_failed_first(tmp_path, flags_of):
    dies = "if life == 0 and world.rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()"
    ended = finish(launchers(flags_of(free_port(), "--max-restarts=1"), 2, write_script(tmp_path, TRAINS), dies))
    for code, out, err in ended:
        assert code == 0, err
        assert "life 1" in out
        assert "rank 1 failed first, killed by SIGKILL" in err
        assert "all ranks start again (restart 1 of 1)" in err
    assert not processes_with(str(tmp_path))


def test_without_restarts_every_launcher_exits_with_the_first_failing_ranks_code(tmp_path):
    exits = "sys.exit(7) if world.rank == 2 else time.sleep(60)"
    ended = finish(launchers(static(free_port()), 2, write_script(tmp_path, TRAINS), exits))
    assert [code for code, _, _ in ended] == [7, 7]
    assert f"paceline: on {socket.gethostname()}:\npaceline: rank 2 failed first, exit code 7\n" in ended[0][2]
    assert ended[1][2].endswith("paceline: rank 2 failed first, exit code 7\n")
    assert not processes_with(str(tmp_path))


def test_an_interrupt_on_one_host_ends_all(tmp_path):
    waits = "(here / f'ready{world.rank}').touch(); time.sleep(60)"
    processes = launchers(c10d(free_port()), 2, write_script(tmp_path, TRAINS), waits)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    processes[1].send_signal(signal.SIGINT)
    ended = finish(processes)
    assert [code for code, _, _ in ended] == [130, 130]
    assert "paceline: the launcher was interrupted by SIGINT" in ended[0][2]
    assert not processes_with(str(tmp_path))


@pytest.mark.slow
def test_a_host_that_comes_makes_the_job_larger_and_one_that_is_lost_smaller(tmp_path):
    waits = """
while not (here / f"enough {world.world_size} {life}").exists():
    dist.barrier()
    (here / f"running {world.world_size} {life}").touch()
    time.sleep(0.05)
    dist.barrier()
"""
    elastic = lambda _: [  # noqa: E731
        *("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint=127.0.0.1:{port}", "-n", "1"),
        *("--rdzv-conf=last_call_timeout=1,keep_alive_interval=1", "--max-restarts=3"),
    ]
    port, script = free_port(), write_script(tmp_path, TRAINS)
    (first,) = launchers(elastic, 1, script, waits)
    wait_until((tmp_path / "running 1 0").exists)
    (second,) = launchers(elastic, 1, script, waits)
    wait_until(lambda: list(tmp_path.glob("running 2 *")))
    second.kill()
    second.communicate()
    life = wait_until(lambda: [path.name[-1] for path in tmp_path.glob("running 1 *") if path.name[-1] != "0"])[0]
    (tmp_path / f"enough 1 {life}").touch()
    ((code, out, err),) = finish([first])
    assert code == 0, err
    assert re.findall(r"rank \d of \d", out)[0] == "rank 0 of 1"
    assert any(line in out for line in ("rank 0 of 2", "rank 1 of 2"))
    assert "paceline: hosts have come or gone; all ranks start again" in err


def test_a_launcher_that_nobody_joins_can_be_interrupted(tmp_path):
    (process,) = launchers(static(port := free_port()), 1, write_script(tmp_path, TRAINS))
    told = f"paceline: waiting for all of 2 hosts to come to 127.0.0.1:{port}; each wants a launcher of its own\n"
    assert told in iter(process.stderr.readline, "")
    process.send_signal(signal.SIGINT)
    ((code, out, err),) = finish([process])
    assert (code, out) == (130, "")
    assert in_the_end(err) == "paceline: interrupted by SIGINT, all ranks have ended\n"
    assert not processes_with(str(tmp_path))


def test_a_launcher_that_is_alone_waits_for_no_other_host(tmp_path):
    impatient = "from paceline.cli import main; from paceline.launch.supervisor import supervisor as launcher\n"
    impatient += "launcher._PATIENCE_S = 0.0\nmain()"
    script = write_script(tmp_path, "import time; time.sleep(0.3)")
    done = run_command([sys.executable, "-c", impatient, "run", "-n", "1", script])
    assert (done.returncode, done.stderr) == (0, "")
