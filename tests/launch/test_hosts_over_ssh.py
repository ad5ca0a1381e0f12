"""One terminal for several hosts: a real sshd in each of three network namespaces, and the user's own ssh."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from support.commands import processes_with, wait_until, write_script
from support.hosts import INTERFACE
from support.sshd import ssh_hosts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Hosts a, b and c; the command is typed on a."""
    with ssh_hosts(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(scope="module")
def cluster_of_ipv6(tmp_path_factory):
    with ssh_hosts(2, tmp_path_factory.mktemp("ssh6"), ipv6=True) as made:
        yield made


TRAINS = """
import os
import torch, torch.distributed as dist
import paceline

with paceline.init(device="cpu") as world:
    x = torch.tensor([float(world.rank)])
    dist.all_reduce(x)
    y = torch.tensor([1.0])
    dist.all_reduce(y, group=dist.new_group(backend="gloo"))
    place = f"local {world.local_rank} node {world.node_rank} of {world.num_nodes}"
    told = os.environ.get("EXTRA"), os.environ["GLOO_SOCKET_IFNAME"]
    print(f"{world.backend} {place} sums {x.item()} {y.item()}", *told)
"""


def test_ranks_of_three_hosts_are_one_world(cluster, tmp_path):
    (tmp_path / "hostfile").write_text("a slots=2\nb:1\nc  # one\n")
    script = write_script(tmp_path, TRAINS)
    ran = cluster.run("--hostfile", str(tmp_path / "hostfile"), "--export", "EXTRA", script, env={"EXTRA": "given"})
    assert ran.returncode == 0, ran.stderr
    told = sorted(line.removeprefix("[a 0]: ") for line in ran.stdout.splitlines())
    assert told == [
        "[a 1]: hier local 1 node 0 of 3 sums 6.0 4.0 given eth0",
        "[b 2]: hier local 0 node 1 of 3 sums 6.0 4.0 given eth0",
        "[c 3]: hier local 0 node 2 of 3 sums 6.0 4.0 given eth0",
        "hier local 0 node 0 of 3 sums 6.0 4.0 given eth0",
    ]
    first, *hosts = ran.stderr.splitlines()
    assert first.startswith("paceline: 4 ranks on 3 hosts, which meet at 10.77.0.1 port ")
    assert hosts == [
        f"paceline:   node 0 is a (10.77.0.1, {INTERFACE}): 2 ranks",
        f"paceline:   node 1 is b (10.77.0.2, {INTERFACE}): 1 rank",
        f"paceline:   node 2 is c (10.77.0.3, {INTERFACE}): 1 rank",
    ]
    assert not processes_with(str(tmp_path))


def test_hosts_that_have_ipv6_alone_are_one_world(cluster_of_ipv6, tmp_path):
    ran = cluster_of_ipv6.run("--hosts", "a:1,b:1", write_script(tmp_path, TRAINS))
    assert ran.returncode == 0, ran.stderr
    assert "[b 1]: hier local 0 node 1 of 2 sums 1.0 2.0 None eth0\n" in ran.stdout
    assert f"paceline:   node 1 is b (fd77::2, {INTERFACE}): 1 rank\n" in ran.stderr


def test_a_rank_that_fails_on_one_host_is_told_once_and_all_start_again(cluster, tmp_path):
    """Rank 1, on c, raises in the first life and exits with 7 in the second."""
    script = write_script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError("boom")
            sys.exit(7)
        time.sleep(600)
        """,
    )
    report = tmp_path / "report.json"
    ran = cluster.run("--hosts", "a:1,c:1", "--max-restarts", "1", "--report", str(report), script)
    assert (ran.returncode, ran.stdout) == (7, "")
    assert "paceline: rank 1 on c failed first, exit code 1:\nTraceback" in ran.stderr
    assert ran.stderr.count("ValueError: boom") == 1
    assert ran.stderr.count("paceline: all ranks start again (restart 1 of 1)\n") == 1
    assert ran.stderr.count("paceline:   node 0 is a ") == 1
    assert ran.stderr.endswith(
        "paceline: rank 0 stopped by the launcher (collateral)\npaceline: rank 1 on c failed first, exit code 7\n"
    )
    verdict = json.loads(report.read_text())
    assert (verdict["exit_status"], verdict["root_cause"], verdict["num_restarts"]) == (7, 1, 1)
    assert [(each["host"], each["was_stopped"]) for each in verdict["ranks"]] == [
        ("a", True),
        ("c", False),
    ]
    assert not processes_with(str(tmp_path))


def test_hosts_that_cannot_take_part_are_told_all_at_once_and_nothing_starts(cluster, tmp_path):
    """Nobody listens at "closed", and the interpreter that is asked for has no paceline."""
    lacking = tmp_path / "python"
    lacking.write_text(f'#!/bin/sh\nexec {sys._base_executable} -I "$@"\n')
    lacking.chmod(0o755)
    script = write_script(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')")
    ran = cluster.run("--hosts", "a,closed,b", "--python", str(lacking), script)
    assert (ran.returncode, ran.stdout) == (2, "")
    first, *lines = ran.stderr.splitlines()
    assert first == "paceline: 3 of 3 hosts cannot take part, so nothing was started:"
    assert lines[0].startswith(
        f"  a, b: {lacking} could not start paceline (exit code 1: ModuleNotFoundError: No module"
    )
    assert lines[1].startswith("  closed: ssh: connect to host 10.77.0.1 port 1: Connection refused; see whether `ssh ")
    assert not (tmp_path / "started").exists()


def test_hosts_that_do_not_reach_each_other_are_told_and_nothing_starts(cluster, tmp_path):
    """Between b and c nothing passes."""
    script = write_script(tmp_path, f"open({str(tmp_path / 'started')!r}, 'w')")
    _, b, c = cluster.hosts
    routes = [(b.namespace, c.address), (c.namespace, b.address)]
    for namespace, address in routes:
        subprocess.run(["ip", "-n", namespace, "route", "add", "unreachable", address], check=True)
    try:
        ran = cluster.run("--hosts", "a,b,c", script)
    finally:
        for namespace, address in routes:
            subprocess.run(["ip", "-n", namespace, "route", "delete", "unreachable", address], check=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"  a: 10.77.0.1 ({INTERFACE}) is reached from all others\n" in ran.stderr
    assert f"  c: 10.77.0.3 ({INTERFACE}) is not reached from b\n" in ran.stderr
    assert not (tmp_path / "started").exists()


def waiting(cluster, tmp_path, hosts, *program):
    """A running launch of a rank on each of ``hosts``, once all wait."""
    script = write_script(
        tmp_path,
        """
        import os, pathlib, time

        def wait():
            (pathlib.Path(__file__).parent / f"ready{os.environ['RANK']}").touch()
            time.sleep(600)

        wait()
        """,
    )
    process = cluster.start("--hosts", hosts, *program, script)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == len(hosts.split(",")), 60)
    return process


NO_TORCH = "--no-python", sys.executable  # programs of any kind start sooner


def test_an_interrupt_here_ends_the_ranks_of_all_hosts(cluster, tmp_path):
    process = waiting(cluster, tmp_path, "a,c")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(re.findall(r"^paceline: rank (\d) was at script.py:\d, in wait$", err, re.MULTILINE)) == ["0", "1"]
    assert err.endswith("paceline: interrupted by SIGINT, all ranks have ended\n")
    assert not processes_with(str(tmp_path))


def test_a_connection_that_is_lost_ends_the_ranks_of_all_hosts(cluster, tmp_path):
    process = waiting(cluster, tmp_path, "a,b,c", *NO_TORCH)
    (client,) = [pid for pid in processes_with(str(tmp_path)) if command_of(pid)[0] == "ssh" and "b" in command_of(pid)]
    os.kill(client, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.endswith("paceline: host b: the connection was lost; the ranks of the other hosts were stopped\n")
    wait_until(lambda: not processes_with(str(tmp_path)))  # b's ranks end by themselves


def test_a_command_that_is_killed_leaves_nothing_on_any_host(cluster, tmp_path):
    process = waiting(cluster, tmp_path, "a,b,c", *NO_TORCH)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not processes_with(str(tmp_path)))


def command_of(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\0")
