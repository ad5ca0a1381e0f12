"""The ranks of a job meet, wherever they were told to, as often as they like; or say who is missing, and why."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import WorldError
from paceline.ports import describe_port_holder
from paceline.rendezvous.meet import parse_method
from paceline.rendezvous.peers import Peer, name_ranks
from support.commands import wait_until
from support.ipv6 import needs_ipv6
from support.ranks import expect_errors, run_ranks


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place(kind, rank, world_size, directory, port):
    """What init needs to meet by ``env``, ``tcp`` or ``file``; the environment is this rank's own."""
    if kind == "env":
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return {}
    if kind == "query":
        return {"init_method": f"tcp://127.0.0.1:{port}?rank={rank}&world_size={world_size}"}
    method = f"tcp://localhost:{port}" if kind == "tcp" else pathlib.Path(directory, "a file").as_uri()
    return {"init_method": method, "rank": rank, "world_size": world_size}


def total(rank):
    tensor = torch.tensor([10.0**rank])
    dist.all_reduce(tensor)
    return tensor.item()


# -- meeting ------------------------------------------------------------------------------------------------------


def five_lives(rank, world_size, directory, kind, port, leave):
    totals = []
    for _ in range(5):
        world = paceline.init("gloo", timeout=20, **place(kind, rank, world_size, directory, port))
        totals.append(total(world.rank))
        paceline.shutdown() if leave == "shutdown" else dist.destroy_process_group()
        assert not dist.is_initialized()
    paceline.shutdown()
    return totals, os.listdir(directory), [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("leave", ["shutdown", "destroy_process_group"])
@pytest.mark.parametrize("kind", ["env", "tcp", "query", "file"])
def test_five_lives_in_a_row_at_one_place_leave_nothing_behind(kind, leave):
    lives = run_ranks(3, five_lives, kind, free_port(), leave, join=False)
    assert lives == [([111.0] * 5, [], ["MainThread"])] * 3


def late_by_a_rank(rank, world_size, directory, kind, port):
    time.sleep(0.3 * ((rank + 1) % 2))
    with paceline.init("gloo", timeout=20, **place(kind, rank, world_size, directory, port)):
        return total(rank)


@pytest.mark.parametrize("kind", ["env", "file"])
def test_ranks_may_come_before_rank_0(kind):
    assert run_ranks(2, late_by_a_rank, kind, free_port(), join=False) == [11.0, 11.0]


def by_ipv6(rank, world_size, directory, port):
    totals = []
    os.environ |= {"MASTER_ADDR": "::1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    for method in (None, f"tcp://[::1]:{port}"):
        with paceline.init("gloo", method, timeout=20):
            totals.append(total(rank))
    return totals


@needs_ipv6
def test_ranks_meet_at_an_address_of_ipv6():
    assert run_ranks(2, by_ipv6, free_port(), join=False) == [[11.0, 11.0]] * 2


def address_only(rank, world_size, directory, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with paceline.init("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=20)) as world:
        return world.rank, world.world_size, total(rank)


def test_rank_and_world_size_as_arguments_beside_an_address_in_the_environment():
    assert run_ranks(2, address_only, free_port(), join=False) == [(0, 2, 11.0), (1, 2, 11.0)]


def size_in_environment(rank, world_size, directory, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    with paceline.init("gloo", rank=rank, timeout=20):
        return total(rank)


def test_an_argument_completes_what_the_environment_says_half():
    assert run_ranks(2, size_in_environment, free_port(), join=False) == [11.0, 11.0]


def ranks_reversed(rank, world_size, directory, port):
    place("env", rank, world_size, directory, port)
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with paceline.init("gloo", rank=1 - rank, world_size=2, timeout=20) as world:
        return world.rank, world.local_rank, total(world.rank)


def test_arguments_overrule_the_environment():
    assert run_ranks(2, ranks_reversed, free_port(), join=False) == [(1, 1, 11.0), (0, 0, 11.0)]


def with_a_launchers_store(rank, world_size, directory, port, own_port):
    place("env", rank, world_size, directory, port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    method = None if own_port is None else f"tcp://127.0.0.1:{own_port}"
    with paceline.init("gloo", method, timeout=20):
        return total(rank)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["env://", "tcp:// elsewhere"])
def test_a_launchers_store_is_used_where_it_is_and_only_there(elsewhere):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    own_port = free_port() if elsewhere else None
    assert run_ranks(2, with_a_launchers_store, store.port, own_port, join=False) == [11.0, 11.0]


def restarted(rank, world_size, directory, port, attempt):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    return with_a_launchers_store(rank, world_size, directory, port, None)


def killed_while_gathering(rank, world_size, directory, port):
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with_a_launchers_store(0, 2, directory, port, None)
    time.sleep(0.6)


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_ranks_meet_on_a_launchers_store_after_rank_0_was_killed_before_all_had_come(attempt):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with pytest.raises(AssertionError, match="rank 0: died with exit code -9"):
        run_ranks(2, killed_while_gathering, store.port, join=False)
    assert run_ranks(3, restarted, store.port, attempt, join=False) == [111.0] * 3


# -- files that are in the way ------------------------------------------------------------------------------------


def meet_at_file(rank, world_size, directory, path, timeout=20.0):
    with paceline.init("gloo", path.as_uri(), rank=rank, world_size=world_size, timeout=timeout):
        return total(rank)


def crash_at_file(rank, world_size, directory, path, who):
    def crash_once_it_is_written():
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    if who == (0,):
        if rank == 1:
            return
        threading.Thread(target=crash_once_it_is_written).start()
    paceline.init("gloo", path.as_uri(), rank=rank, world_size=world_size, timeout=20)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("who", [(0,), (0, 1)], ids=["while gathering", "after all had met"])
def test_a_file_left_by_a_crashed_run_does_no_harm(tmp_path, who):
    path = tmp_path / "rendezvous"
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(2, crash_at_file, path, who, join=False)
    assert path.exists() == (who == (0,))
    assert run_ranks(2, meet_at_file, path, join=False) == [11.0, 11.0]
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_by_a_run_on_another_host_does_no_harm(tmp_path):
    path = tmp_path / "rendezvous"
    elsewhere = vars(Peer("another host", None, 1, 1, "another kernel"))
    path.write_text(json.dumps({"paceline": "0" * 16, "peer": elsewhere, "port": 9, "addresses": ["127.0.0.1"]}))
    assert run_ranks(2, meet_at_file, path, join=False) == [11.0, 11.0]
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_may_be_used(tmp_path):
    path = tmp_path / "made by mkstemp"
    path.touch()
    assert run_ranks(2, meet_at_file, path, join=False) == [11.0, 11.0]


def test_a_file_that_is_not_ours_is_refused_by_all_ranks_and_left_alone(tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("do not lose\n")
    expected = (
        f"WorldError: init_method: {path} exists and holds something else than an address. Name a file that does not "
        "exist; if an interrupted job of another library left this one, delete it."
    )
    assert expect_errors(2, meet_at_file, path, join=False) == [expected] * 2
    assert path.read_text() == "do not lose\n"


def test_a_missing_directory_is_named(tmp_path):
    path = tmp_path / "missing" / "rendezvous"
    expected = f"WorldError: init_method: {path.parent} is not a directory; create it, or name another file."
    assert expect_errors(2, meet_at_file, path, join=False) == [expected] * 2


def test_a_directory_in_the_files_place_is_named(tmp_path):
    with pytest.raises(WorldError) as caught:
        meet_at_file(0, 1, None, tmp_path)
    assert str(caught.value) == f"init_method: {tmp_path} cannot be read (Is a directory); name another file."


def test_a_directory_that_cannot_be_written_is_named():
    with pytest.raises(WorldError) as caught:
        meet_at_file(0, 1, None, pathlib.Path("/proc/rendezvous"))
    assert str(caught.value).startswith("init_method: /proc/rendezvous cannot be written (")


def two_rank_zeros(rank, world_size, directory, path):
    while rank == 1 and not path.exists():
        time.sleep(0.01)
    meet_at_file(0, 3, directory, path, timeout=3 - 2 * rank)


def test_of_two_processes_with_rank_0_one_learns_that_the_file_is_in_use(tmp_path):
    first, second = expect_errors(2, two_rank_zeros, tmp_path / "rendezvous", join=False)
    assert first.startswith("RendezvousError: rank 0: ranks 1 and 2 of 3 did not join before the deadline.")
    assert "rendezvous is in use by a job whose rank 0 is pid " in second
    assert second.endswith("Give each job its own file; were two processes given RANK=0?")
    assert list(tmp_path.iterdir()) == []


# -- ranks that don't come, or come twice -------------------------------------------------------------------------


def all_but_one(rank, world_size, directory, kind, port, absent):
    if rank in absent:
        raise LookupError("not here")
    started = time.monotonic()
    try:
        paceline.init("gloo", timeout=2.5, **place(kind, rank, world_size, directory, port))
    finally:
        assert time.monotonic() - started < 12


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_ranks_that_never_come_are_all_named_on_all_others(kind):
    messages = expect_errors(4, all_but_one, kind, free_port(), (1, 3), join=False)
    for rank in (0, 2):
        assert messages[rank].startswith(f"RendezvousError: rank {rank}: ")
        # The first whose time is up may be rank 0, which takes the store with it.
        assert "ranks 1 and 3 of 4 " in messages[rank]
        assert " not join" in messages[rank] or " had not joined" in messages[rank]
        assert messages[rank].endswith("Look at their output, and whether they were started at all.")


def test_a_rank_0_that_never_comes_is_named_with_its_port():
    port = free_port()
    message = expect_errors(2, all_but_one, "tcp", port, (0,), join=False)[1]
    assert message == (
        f"RendezvousError: rank 1: nobody answered at localhost:{port} before the deadline (Connection refused). Is "
        "rank 0 running, and is MASTER_ADDR an address of its host that this host reaches?"
    )


def test_a_rank_0_that_never_comes_is_named_with_its_file():
    message = expect_errors(2, all_but_one, "file", 0, (0,), join=False)[1]
    assert message.startswith("RendezvousError: rank 1: rank 0 did not write an address that answers to /")
    assert message.endswith("its job was complete already: were two processes given RANK=1?")


def test_a_rank_0_that_never_comes_to_a_launchers_store_is_named():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    message = expect_errors(2, without_rank_0, store.port, join=False)[1]
    assert message == (
        f"RendezvousError: rank 1: rank 0 did not come to 127.0.0.1:{store.port} before the deadline. If it did, its "
        "job was complete already: were two processes given RANK=1?"
    )


def without_rank_0(rank, world_size, directory, port):
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    all_but_one(rank, world_size, directory, "env", port, (0,))


def test_a_host_that_no_name_server_knows_is_named():
    with pytest.raises(TimeoutError) as caught:
        paceline.init("gloo", "tcp://no-such-host.invalid:29500", rank=1, world_size=2, timeout=0.5)
    assert "nobody answered at no-such-host.invalid:29500 before the deadline (" in str(caught.value)


def another_size(rank, world_size, directory, kind, port):
    paceline.init("gloo", timeout=10, **place(kind, rank, 3 - rank, directory, port))


@pytest.mark.parametrize("kind", ["env", "file"])
def test_different_world_sizes_are_refused_on_both_sides_long_before_the_deadline(kind):
    reason = (
        "rank 1 was told that the world has 2 processes, but rank 0 was told 3. Give all of them the same WORLD_SIZE."
    )
    started = time.monotonic()
    expected = [f"WorldError: rank 0 gives up: {reason}", f"WorldError: {reason}"]
    assert expect_errors(2, another_size, kind, free_port(), join=False) == expected
    assert time.monotonic() - started < 12


def doubled(rank, world_size, directory, kind, port):
    """Processes 1 and 2 are both given rank 1, in a world of two."""
    refused = pathlib.Path(directory, "refused")
    try:
        with paceline.init("gloo", timeout=3, **place(kind, min(rank, 1), 2, directory, port)):
            value = total(min(rank, 1))
            wait_until(refused.exists)  # whoever comes too late is to find the job still there
            return value
    except TimeoutError as error:
        refused.touch()
        return str(error)


@pytest.mark.parametrize("kind", ["env", "file"])
def test_of_two_processes_with_one_rank_one_is_refused_and_the_job_goes_on(kind):
    first, *others = run_ranks(3, doubled, kind, free_port(), join=False)
    refused = next(outcome for outcome in others if outcome != 11.0)
    assert first == 11.0
    assert 11.0 in others
    assert "rank 1" in refused
    assert "were two processes given RANK=1?" in refused or "Two processes were given the same RANK" in refused


def doubled_while_gathering(rank, world_size, directory, port):
    time.sleep(0.1 * rank)
    paceline.init("gloo", f"tcp://127.0.0.1:{port}", rank=min(rank, 1), world_size=3, timeout=3 - 0.5 * rank)


def test_two_processes_with_one_rank_are_named_while_the_job_is_incomplete():
    *_, second = expect_errors(3, doubled_while_gathering, free_port(), join=False)
    assert second == (
        "RendezvousError: rank 1 has joined this job already. Two processes were given the same RANK, or another job "
        "meets at this address: give each process its own RANK and each job its own MASTER_PORT."
    )


def dies_while_gathering(rank, world_size, directory, victim):
    """Rank 2 does not come; the victim, a child of its rank's process, comes and ends with code 0."""
    if rank == 2:
        time.sleep(2.5)
        return None
    is_victim = rank == victim
    if is_victim and (pid := os.fork()):
        os.waitpid(pid, 0)
        return None
    if is_victim:
        threading.Timer(2.0, os._exit, (0,)).start()
    started = time.monotonic()
    try:
        paceline.init("gloo", pathlib.Path(directory, "f").as_uri(), rank=rank, world_size=3, timeout=20)
    except (paceline.errors.PeerError, paceline.errors.RendezvousError) as error:
        assert time.monotonic() - started < 12
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_before_all_have_come_is_missed_long_before_the_deadline(victim):
    survivor = 1 - victim
    message = run_ranks(3, dies_while_gathering, victim, join=False)[survivor]
    # Rank 0 takes the store with it, which may be noticed before its death is.
    assert message.startswith((f"PeerError: rank {survivor}: rank {victim} (pid ", "RendezvousError: rank 1: rank 0 g"))
    assert "rank 2" in message


# -- ports that are taken -----------------------------------------------------------------------------------------


def test_a_busy_port_names_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert describe_port_holder(port).startswith(f"pid {os.getpid()} (")
        with pytest.raises(WorldError) as caught:
            paceline.init("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=2, timeout=5)
    assert str(caught.value).startswith(f"rank 0: port {port} is in use by pid {os.getpid()} (")
    assert str(caught.value).endswith("or choose another MASTER_PORT; `paceline run` takes a free one by itself.")


def test_a_port_that_nobody_listens_on_has_no_holder_to_name():
    assert describe_port_holder(free_port()) == "a process that this user may not see"


def rank_0_at_port_1(rank, world_size, directory):
    if os.getuid() == 0:
        os.setuid(65534)
    paceline.init("gloo", "tcp://0.0.0.0:1", rank=0, world_size=2, timeout=5)


def test_a_port_that_is_not_allowed_is_named():
    if int(pathlib.Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 1:
        pytest.skip("this kernel lets everybody listen on port 1")
    (message,) = expect_errors(1, rank_0_at_port_1, join=False)
    assert message.startswith("WorldError: rank 0: cannot listen at ")
    assert message.endswith(":1 (Permission denied). Choose another MASTER_PORT.")


# -- init_method --------------------------------------------------------------------------------------------------


def test_methods_are_understood():
    assert parse_method(None).is_env
    assert parse_method("env://").is_env
    assert parse_method("env://?rank=1&world_size=2").given == {"rank": 1, "world_size": 2}
    assert parse_method("tcp://h:5?rank=1").address == ("h", 5)
    assert parse_method("tcp://[::1]:5").address == ("::1", 5)
    assert parse_method("file:///a/b%20c?world_size=2").path == pathlib.Path("/a/b c")
    assert parse_method("file:///a/b%20c?world_size=2").given == {"world_size": 2}


TCP = "expected tcp://HOST:PORT, such as tcp://127.0.0.1:29500."
FILE = "expected file:///absolute/path, with three slashes."


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("tcp://host", TCP),
        ("tcp://:29500", TCP),
        ("tcp://host:0", TCP),
        ("tcp://host:99999", TCP),
        ("tcp://host:port", TCP),
        ("file://relative/path", FILE),
        ("file:relative", FILE),
        ("file:///", FILE),
        ("file:///directory/", FILE),
        ("127.0.0.1:29500", "expected env://, tcp://HOST:PORT or file:///PATH."),
        ("http://host:80", "expected env://, tcp://HOST:PORT or file:///PATH."),
        ("tcp://host:1?rank=a&world_size=2", "rank and world_size must be integers."),
    ],
)
def test_malformed_methods_are_refused(method, expected):
    with pytest.raises(WorldError) as caught:
        paceline.init("gloo", method, rank=0, world_size=1)
    assert str(caught.value) == f"init_method={method!r}: {expected}"


# -- peers --------------------------------------------------------------------------------------------------------


def test_a_process_is_alive_until_it_ends_even_unreaped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = run_ranks(1, describe, join=False)[0]
    started = int(pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    child_as_peer = Peer(peer.node, None, child.pid, started, peer.pid_namespace)
    assert child_as_peer.is_alive()
    assert not Peer(peer.node, None, child.pid, started + 1, peer.pid_namespace).is_alive()  # the pid was reused
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not child_as_peer.is_alive()
    child.wait()
    assert not child_as_peer.is_alive()
    assert not peer.is_alive()
    assert Peer(peer.node, None, 1, 1, "another pid namespace").is_alive()


def describe(rank, world_size, directory):
    from paceline.environment import Placement

    me = Peer.myself(Placement())
    assert me.is_alive()
    assert Peer.from_json(me.to_json()) == me
    return me


def test_ranks_are_named_in_words():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 2]) == "ranks 1 and 2"
    assert name_ranks([1, 2, 5]) == "ranks 1, 2 and 5"
