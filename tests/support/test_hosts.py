import os
import pathlib
import secrets
import signal
import sys

import pytest

from support.hosts import hosts, start_ranks, why_no_hosts

# Takes one connection to port 5000 of any address, says how many bytes came and how many seconds they took, and ends.
RECEIVE = """
import socket, time
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    start, num_bytes = time.perf_counter(), 0
    while received := len(connection.recv(2**20)):
        num_bytes += received
    print(num_bytes, time.perf_counter() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def python(source, *arguments):
    return [sys.executable, "-c", source, *map(str, arguments)]


def transfer(sender, receiver, num_bytes):
    """Bytes that came, and the seconds they took."""
    receiving = receiver.start(python(RECEIVE))
    assert receiving.stdout.readline() == "ready\n"
    sent = sender.run(python(SEND, receiver.address, num_bytes), timeout_s=30)
    assert sent.returncode == 0, sent.stderr
    out, _ = receiving.communicate(timeout=30)
    received, seconds = out.split()
    return int(received), float(seconds)


def namespaces():
    return {path.name for path in pathlib.Path("/run/netns").glob("paceline-*")}


def test_each_host_reaches_each_other_one():
    with hosts(3) as (first, second, third):
        for sender, receiver in ((first, second), (second, first), (first, third), (third, second)):
            assert transfer(sender, receiver, 1000)[0] == 1000


def test_a_host_has_ports_and_a_loopback_of_its_own():
    with hosts(2) as (first, second):
        elsewhere = second.start(python(RECEIVE))
        assert elsewhere.stdout.readline() == "ready\n"
        here = first.start(python(RECEIVE))  # the same port
        assert here.stdout.readline() == "ready\n"
        assert first.run(python(SEND, "127.0.0.1", 10)).returncode == 0
        assert here.communicate(timeout=30)[0].startswith("10 ")
        assert elsewhere.poll() is None
        os.killpg(elsewhere.pid, signal.SIGKILL)
        elsewhere.communicate()


def test_a_cable_is_no_faster_than_its_rate():
    with hosts(2, rate="1gbit") as (first, second):
        num_bytes, seconds = transfer(first, second, 25_000_000)
    assert num_bytes == 25_000_000
    assert seconds >= 0.150  # 200 ms, less what a burst may send at once


def test_both_directions_of_a_cable_are_limited():
    with hosts(3, rate="200mbit") as (first, second, _):
        assert min(transfer(first, second, 5_000_000)[1], transfer(second, first, 5_000_000)[1]) >= 0.150


def test_afterwards_processes_and_namespaces_are_gone():
    with hosts(2) as both:
        sleeper = both[0].start(["sleep", "600"])
        names = {host.namespace for host in both}
        assert names < namespaces()
    assert sleeper.wait(timeout=10) == -signal.SIGKILL
    sleeper.communicate()
    token = both[0].namespace.removesuffix("-0")
    assert not any(token in name for name in namespaces())


def test_after_an_error_they_are_gone_too():
    with pytest.raises(KeyError), hosts(1) as (host,):
        raise KeyError
    assert host.namespace not in namespaces()


def test_a_command_that_fails_is_named_and_what_was_made_is_removed(monkeypatch):
    if reason := why_no_hosts():
        pytest.skip(reason)
    token = f"{os.getpid():08x}"
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: token)
    with pytest.raises(RuntimeError) as caught, hosts(2, rate="brisk"):
        pass
    command = f"tc -n paceline-{token}-0 qdisc add dev eth0 root tbf rate brisk burst 512kb latency 100ms"
    assert str(caught.value).startswith(f"`{command}` failed with 1: ")
    assert not any(token in name for name in namespaces())


def test_a_command_that_takes_too_long_is_killed_with_its_children():
    source = "import subprocess; print('begun', flush=True); subprocess.run(['sleep', '600'])"
    with hosts(1) as (host,), pytest.raises(AssertionError) as caught:
        host.run(python(source), timeout_s=2)
    assert str(caught.value) == "not done after 2 s; it said 'begun\\n' and ''"


def test_ranks_are_told_what_a_launcher_would_tell_them():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"]
    with hosts(2) as both:
        ranks = start_ranks(both, 2, python(f"import os; print(*map(os.environ.get, {names}))"))
        told = [rank.communicate(timeout=30)[0].strip() for rank in ranks]
    assert told == ["0 4 0 2 0 2 10.77.0.1", "1 4 1 2 0 2 10.77.0.1", "2 4 0 2 1 2 10.77.0.1", "3 4 1 2 1 2 10.77.0.1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the lack of root is named first")
def test_without_iproute2_a_test_is_skipped_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"^ip and tc not found: install iproute2$"), hosts(1):
        pass


def test_without_root_a_test_is_skipped_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match=r"^only root may make network namespaces$"), hosts(1):
        pass


def test_hosts_of_two_blocks_do_not_meet():
    with hosts(2) as (first, _), hosts(2) as (_, elsewhere):
        receiving = first.start(python(RECEIVE))
        assert receiving.stdout.readline() == "ready\n"
        sent = elsewhere.run(python(SEND, first.address, 10))  # the address of the first in its own block too
        assert "ConnectionRefusedError" in sent.stderr
        os.killpg(receiving.pid, signal.SIGKILL)
        receiving.communicate()
