"""``paceline.spawn``: torch's call and torch's exceptions; ranks that find each other, and that nothing outlives."""

import contextlib
import functools
import gc
import inspect
import json
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import sys
import threading
import time
import types

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

import paceline
from paceline.errors import LaunchError
from paceline.processes import started_at
from support.commands import start, wait_until, write_script

FORK = multiprocessing.get_context("fork")


def spawn(fn, *args, nprocs=2, **options):
    """Forked, since it takes no time; what the other methods do otherwise has tests of its own."""
    return paceline.spawn(fn, args, nprocs, start_method="fork", **options)


def say(folder, index, value):
    draft = folder / f"draft{index}"
    draft.write_text(json.dumps(value))
    draft.rename(folder / f"said{index}")


def said(folder, nprocs=2):
    """What each rank has said, once all have."""
    paths = [folder / f"said{index}" for index in range(nprocs)]
    wait_until(lambda: all(path.exists() for path in paths))
    return [json.loads(path.read_text()) for path in paths]


def all_gone(pids):
    return all(started_at(pid) is None for pid in pids)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


# What ranks find


def tell_arguments(index, folder, word):
    say(folder, index, [index, word])


def test_each_rank_gets_its_index_and_the_arguments(tmp_path):
    assert spawn(tell_arguments, tmp_path, "x", nprocs=3) is None
    assert said(tmp_path, 3) == [[0, "x"], [1, "x"], [2, "x"]]


def add_up(index, folder):
    with paceline.init("gloo") as world:
        total = torch.tensor(world.rank + 1.0)
        dist.all_reduce(total)
        first = [world.rank, world.local_rank, world.world_size, world.local_world_size, world.num_nodes]
    dist.init_process_group("gloo")  # env://, at the same port
    dist.all_reduce(total)
    dist.destroy_process_group()
    say(folder, index, [first, total.item()])


def test_ranks_join_a_world_without_arguments_and_torchs_at_the_same_port(tmp_path):
    spawn(add_up, tmp_path)
    assert said(tmp_path) == [[[0, 0, 2, 2, 1], 6.0], [[1, 1, 2, 2, 1], 6.0]]


def set_up_like_the_tutorial(rank, world_size, port, folder):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    say(folder, rank, dist.get_world_size())
    dist.destroy_process_group()


def main_worker(gpu, ngpus, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=ngpus, rank=gpu)
    total = torch.ones(1)
    dist.all_reduce(total)
    say(folder, gpu, total.item())
    dist.destroy_process_group()


@pytest.mark.parametrize("worker", [set_up_like_the_tutorial, main_worker])
def test_scripts_that_choose_their_own_meeting_point_meet_there(worker, tmp_path):
    spawn(worker, 2, free_port(), tmp_path)
    assert said(tmp_path) == [2, 2]


def tell_variables(index, folder):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    say(folder, index, [os.environ.get(name) for name in names])


def test_what_the_parents_environment_says_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "12355")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = dict(os.environ)
    spawn(tell_variables, tmp_path)
    assert said(tmp_path) == [["0", "2", "0", "2", "localhost", "12355"], ["1", "2", "1", "2", "localhost", "12355"]]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("theirs", "place"),
    [
        ({"WORLD_SIZE": "8"}, [None, "8", None, None]),  # of processes on several hosts: fn knows which are here
        ({"RANK": "1"}, ["1", None, None, None]),  # of this host
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, [None, None, None, None]),
    ],
)
def test_ranks_are_not_numbered_where_the_parent_speaks_of_a_larger_job(theirs, place, tmp_path, monkeypatch):
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    spawn(tell_variables, tmp_path)
    assert [told[:4] for told in said(tmp_path)] == [place, place]


def spawn_within(index, folder):
    if index == 1:
        (folder / "within").mkdir()
        spawn(tell_variables, folder / "within")
    tell_variables(index, folder)


def test_ranks_that_a_rank_spawns_are_a_world_of_their_own(tmp_path):
    spawn(spawn_within, tmp_path, nprocs=3)
    inner, outer = said(tmp_path / "within"), said(tmp_path, 3)
    assert [told[:2] for told in inner] == [["0", "2"], ["1", "2"]]
    assert [told[:2] for told in outer] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert inner[0][5] != outer[0][5]


def take_port(index, folder):
    port = int(os.environ["MASTER_PORT"])
    if index == 0:
        with pytest.raises(OSError, match="in use"), socket.socket() as stranger:
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            say(folder, index, port)
    say(folder, index, port)


def test_the_port_is_the_ranks_own_and_free_again_afterwards(tmp_path):
    spawn(take_port, tmp_path)
    port = said(tmp_path)[0]
    assert said(tmp_path)[1] == port
    with socket.socket() as anybody:
        anybody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        anybody.bind(("127.0.0.1", port))


def draw(index, folder):
    say(folder, index, [numpy.random.rand(), torch.get_num_threads()])


def test_forked_ranks_draw_differently_from_numpy_and_use_one_thread(tmp_path):
    spawn(draw, tmp_path)
    first, second = said(tmp_path)
    assert first[0] != second[0]
    assert (first[1], second[1]) == (1, 1)


# How they fail


def raise_chained(index):
    try:
        raise ValueError("inner \u00e9 \udc80")
    except ValueError as error:
        raise KeyError("outer") from error


def exit_with(index, code):
    sys.exit(code)


def exit_at_once(index):
    os._exit(7)


def kill_myself(index, signum):
    os.kill(os.getpid(), signum)
    time.sleep(60)


def only_on(fn, rank, index, *args):
    fn(index, *args) if index == rank else time.sleep(60)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (raise_chained, ()),
        (exit_with, (3,)),
        (exit_at_once, ()),
        (kill_myself, (signal.SIGUSR2,)),
        (kill_myself, (40,)),
    ],
)
def test_failures_are_told_as_torch_tells_them(fn, args):
    errors = []
    for spawned in (mp.start_processes, paceline.spawn):
        with pytest.raises(ProcessException) as caught:
            spawned(functools.partial(only_on, fn, 1), args, nprocs=3, start_method="fork")
        errors.append(caught.value)
    torchs, ours = errors
    assert type(ours) is type(torchs)
    ending = "exit_code", "signal_name"
    for name in ("error_index", *(ending if isinstance(torchs, mp.ProcessExitedException) else ())):
        assert getattr(ours, name) == getattr(torchs, name)
    assert ours.error_pid > 0
    # torch's traceback has its own frame on top, and ours here that of functools.partial's function too.
    machinery = re.compile(r'  File "[^"]+/multiprocessing/spawn.py", line \d+, in _wrap\n    fn\(.+\n', re.MULTILINE)
    assert str(ours) == machinery.sub("", str(torchs))


def test_a_rank_that_is_interrupted_alone_has_not_succeeded():
    with pytest.raises(mp.ProcessExitedException, match=r"^process 0 terminated with signal SIGINT$") as caught:
        spawn(kill_myself, signal.SIGINT, nprocs=1)
    assert (caught.value.exit_code, caught.value.signal_name) == (-2, "SIGINT")


def die_or_suffer(index, port):
    if index == 1:
        with socket.create_server(("127.0.0.1", port)) as server:
            peer = server.accept()[0]
            peer.recv(1)
            os.kill(os.getpid(), signal.SIGKILL)
    connection = socket.socket()
    wait_until(lambda: connection.connect_ex(("127.0.0.1", port)) == 0)
    connection.send(b"x")
    assert connection.recv(1), "the peer went away"


def test_a_killed_rank_comes_before_the_exceptions_that_it_caused():
    with pytest.raises(mp.ProcessExitedException, match=r"^process 1 terminated with signal SIGKILL$"):
        spawn(die_or_suffer, free_port())


def raise_much(index):
    raise ValueError("x" * 1_000_000)


def test_a_long_last_word_does_not_keep_a_rank_alive():
    ranks = spawn(raise_much, nprocs=1, join=False)
    wait_until(lambda: all_gone(ranks.pids()))
    with pytest.raises(mp.ProcessRaisedException, match=r"x{1000000}"):
        ranks.join()


def lose_report(index):
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "paceline report" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))
    raise ValueError("boom")


def test_a_failure_that_cannot_be_reported_is_printed(capfd):
    with pytest.raises(mp.ProcessExitedException, match=r"^process 0 terminated with exit code 1$"):
        spawn(lose_report, nprocs=1)
    assert capfd.readouterr().err.endswith("ValueError: boom\n")


def test_ranks_that_have_started_are_ended_if_another_cannot_be(tmp_path, monkeypatch):
    makes = iter([os.memfd_create])

    def make(name):
        return next(makes, refuse)(name)

    def refuse(name):
        pids.append(said(tmp_path, 1)[0])
        raise OSError("too many open files")

    pids = []
    monkeypatch.setattr(os, "memfd_create", make)
    with pytest.raises(OSError, match="too many open files"):
        spawn(stay, tmp_path)
    assert all_gone(pids)


# The context


def wait_for_file(index, path):
    wait_until(path.exists)


def test_the_context_is_torchs(tmp_path):
    go = tmp_path / "go"
    ranks = spawn(wait_for_file, go, join=False)
    assert isinstance(ranks, mp.ProcessContext)
    assert ranks.pids() == [process.pid for process in ranks.processes]
    assert not any(process.daemon for process in ranks.processes)
    assert ranks.join(timeout=0.05) is False
    go.touch()
    while not ranks.join(timeout=10):
        pass
    assert [process.exitcode for process in ranks.processes] == [0, 0]
    assert ranks.join() is True


def test_who_drops_the_context_ends_nothing(tmp_path):
    spawn(wait_for_file, tmp_path / "go", join=False)
    gc.collect()
    time.sleep(0.1)
    processes = multiprocessing.active_children()
    assert len(processes) == 2
    (tmp_path / "go").touch()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_daemons_are_daemons(tmp_path):
    (tmp_path / "go").touch()
    ranks = spawn(wait_for_file, tmp_path / "go", join=False, daemon=True)
    assert all(process.daemon for process in ranks.processes)
    while not ranks.join():
        pass


def resist(index, folder):
    if index == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(folder, 0, os.getpid())
        time.sleep(60)
    wait_until((folder / "said0").exists)
    raise ValueError("boom")


def test_who_resists_is_killed_after_two_graces_and_the_failure_stays(tmp_path):
    ranks = spawn(resist, tmp_path, join=False)
    for _ in range(2):
        with pytest.raises(mp.ProcessRaisedException, match="ValueError: boom") as caught:
            ranks.join(grace_period=0.1)
        assert caught.value.error_index == 1
    assert [process.exitcode for process in ranks.processes] == [-signal.SIGKILL, 1]


def test_a_thread_may_spawn_and_end_before_the_ranks_do(tmp_path):
    made = []
    thread = threading.Thread(target=lambda: made.append(spawn(wait_for_file, tmp_path / "go", join=False)))
    thread.start()
    thread.join()
    assert made[0].join(timeout=0.3) is False
    (tmp_path / "go").touch()
    while not made[0].join():
        pass


# How they end with their parent


def stay(index, folder):
    say(folder, index, os.getpid())
    time.sleep(60)


def stay_as_parent(folder):
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        spawn(stay, folder)
    except KeyboardInterrupt:
        say(folder, 2, "interrupted")


def keep_forks_as_parent(folder):
    """One that was forked before holds nothing, and one that is forked later must not either."""
    os.setpgid(0, 0)
    spawn(stay, folder, join=False)
    if not os.fork():
        say(folder, 2, os.getpid())
        time.sleep(60)
        os._exit(0)
    time.sleep(60)


def test_ranks_die_with_a_parent_that_is_killed(tmp_path):
    parent = FORK.Process(target=stay_as_parent, args=(tmp_path,))
    parent.start()
    pids = said(tmp_path)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: all_gone(pids), 2.0)
    parent.join()


def test_what_the_parent_has_forked_does_not_keep_its_ranks_alive(tmp_path):
    parent = FORK.Process(target=keep_forks_as_parent, args=(tmp_path,))
    parent.start()
    *pids, other = said(tmp_path, 3)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: all_gone(pids), 2.0)
    assert not all_gone([other])
    os.kill(other, signal.SIGKILL)
    parent.join()


@pytest.mark.parametrize("interrupt", [os.kill, os.killpg])
def test_ctrl_c_ends_the_ranks_and_is_the_parents(interrupt, tmp_path):
    parent = FORK.Process(target=stay_as_parent, args=(tmp_path,))
    parent.start()
    pids = said(tmp_path)
    interrupt(parent.pid, signal.SIGINT)
    assert said(tmp_path, 3)[2] == "interrupted"
    assert all_gone(pids)
    parent.join(10)
    assert parent.exitcode == 0


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ctrl_c_while_a_process_starts_waits_for_that_process_too(monkeypatch, tmp_path, method):
    """As if typed when the first one is born, and its parent has not come back from that."""
    start = multiprocessing.process.BaseProcess.start

    def interrupted(process):
        start(process)
        said(tmp_path, 1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        paceline.spawn(stay, (tmp_path,), 2, start_method=method)
    assert all_gone(said(tmp_path, 1))
    assert not multiprocessing.active_children()


BEING_IMPORTED = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent

def fn(index):
    pass

if __name__ == "__main__":
    import paceline
    ranks = paceline.spawn(fn, nprocs=2, join=False, start_method=sys.argv[1])
    (here / "started").touch()
    ranks.join()
else:
    (here / f"importing{os.getpid()}").touch()
    time.sleep(60)
"""


def test_ranks_die_with_their_parent_while_they_import_its_script_too(tmp_path):
    scripts = {method: write_script(tmp_path / method, BEING_IMPORTED) for method in ("spawn", "forkserver")}
    parents = {method: start([sys.executable, script, method]) for method, script in scripts.items()}
    for method, parent in parents.items():
        pids = wait_until(functools.partial(pids_of_importing, tmp_path / method))
        parent.kill()
        wait_until(functools.partial(all_gone, pids), 2.0)
        parent.communicate()  # to its end: the fork server, too, is gone


def pids_of_importing(folder):
    paths = list(folder.glob("importing*"))
    is_complete = len(paths) == 2 and (folder / "started").exists()
    return is_complete and [int(path.name.removeprefix("importing")) for path in paths]


# The other start methods

METHODS = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
import numpy, torch
import torch.distributed as dist

def add_up(index, shared):
    import paceline
    with paceline.init("gloo") as world:
        total = torch.ones(1)
        dist.all_reduce(total)
        shared[index] = total.item()
        shared[2 + index] = torch.get_num_threads()

def look(index):
    modules = [name in sys.modules for name in ("paceline.launch.spawning.warm", "paceline.parallel", "torch._dynamo")]
    text = json.dumps([modules, os.environ.get("SET"), os.environ.get("UNSET"), numpy.random.rand()])
    (here / f"saw{index}").write_text(text)

def fail(index):
    raise ValueError(f"rank {index} of optim")

if __name__ == "__main__":
    import paceline
    method = sys.argv[1]
    os.environ["UNSET"] = "1"
    shared = torch.zeros(4).share_memory_()
    paceline.spawn(add_up, (shared,), nprocs=2, start_method=method)
    print(shared.tolist())
    if method == "forkserver":
        del os.environ["UNSET"]
        os.environ["SET"] = "1"
        paceline.spawn(look, nprocs=2, start_method=method)
        class Local: pass
        Local.__qualname__ = "Nowhere"
        lost = Local()
        Nowhere = Local
        try:
            paceline.spawn(fail, (lost,), start_method=method)
        except Exception as error:
            print(type(error).__name__, str(error).strip().splitlines()[-1])
    ranks = paceline.spawn(fail, nprocs=1, join=False, start_method=method)
    from multiprocessing import active_children
    try:
        ranks.join()
    except Exception as error:
        print(type(error).__name__, error.error_pid == ranks.pids()[0], str(error).splitlines()[-1])
    print(active_children())
"""


def test_fresh_and_warm_processes_are_ranks_as_forks_are(tmp_path):
    scripts = {method: write_script(tmp_path / method, METHODS) for method in ("spawn", "forkserver")}
    env = {"OMP_NUM_THREADS": None}
    processes = {method: start([sys.executable, script, method], env=env) for method, script in scripts.items()}
    threads = float(max(1, len(os.sched_getaffinity(0)) // 2))  # the cores are shared out
    out = {}
    for method, process in processes.items():
        out[method], err = process.communicate(timeout=90)
        assert (process.returncode, err) == (0, "")
    last = "ProcessRaisedException True ValueError: rank 0 of optim\n[]\n"
    assert out["spawn"] == f"[2.0, 2.0, {threads}, {threads}]\n" + last
    assert out["forkserver"] == (
        f"[2.0, 2.0, {threads}, {threads}]\n"
        "ProcessRaisedException AttributeError: Can't get attribute 'Nowhere' on "
        f"<module '__mp_main__' from '{scripts['forkserver']}'>\n" + last
    )
    first, second = (json.loads((tmp_path / "forkserver" / f"saw{index}").read_text()) for index in range(2))
    assert first[:3] == second[:3] == [[True, True, True], "1", None]
    assert first[3] != second[3]


# Sessions

TYPED = """
import torch, paceline
product = torch.ones(600, 600) @ torch.ones(600, 600)  # from now on there is a pool of threads, which forks have not

def typed(i, kind):
    with paceline.init("gloo") as world:
        total = torch.ones(600, 600) @ torch.ones(600, 600)
        torch.distributed.all_reduce(total)
        world.print(kind.__name__, total[0, 0].item())

class Kind: pass

paceline.spawn(typed, (Kind,), nprocs=2)
"""


def test_what_is_typed_into_a_session_runs_in_forks(tmp_path):
    typed = pathlib.Path(write_script(tmp_path, TYPED, "typed.txt"))
    script = write_script(tmp_path, "import code, sys\nif len(sys.argv) > 1: code.interact('', local=globals())")
    commands = [["-"], ["-c", typed.read_text()], ["-i", script], [script, "console"]]
    processes = []
    for command in commands:
        with typed.open() as lines:
            environment = {"OMP_NUM_THREADS": "2", "PYTHONSTARTUP": None}
            processes.append(start([sys.executable, *command], stdin=lines, env=environment))
    for command, process in zip(commands, processes, strict=True):
        out, err = process.communicate(timeout=90)
        assert "Kind 1200.0\n" in out, f"{command}: {out} {err}"
        assert "Error" not in err


def session(monkeypatch, *, file=None):
    """Make this process look like an interactive one; a function that was typed into it."""
    main = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def typed(i, *args): pass", main.__dict__)
    return main.typed


def test_a_session_that_has_used_cuda_cannot_be_forked(monkeypatch):
    typed = session(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    message = (
        "typed exists in this session only, where a fresh process cannot find it, and this process cannot be forked "
        "any more since it has used CUDA. Put it into a .py file and import it from there, or restart the session and "
        "call spawn before anything touches CUDA."
    )
    for call in (lambda: paceline.spawn(typed), lambda: paceline.spawn(functools.partial(typed, 1))):
        with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
            call()
    with pytest.raises(LaunchError, match=r"^Typed exists in this session only"):
        paceline.spawn(exit_with, (type("Typed", (), {"__module__": "__main__"})(),))


def test_a_session_without_a_file_forks_even_what_could_be_imported(monkeypatch, tmp_path):
    session(monkeypatch, file="<stdin>")
    paceline.spawn(tell_arguments, (tmp_path, "x"))
    assert said(tmp_path, 1) == [[0, "x"]]


# What is refused at once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": None}, "expected a function to run, but got None; pass the function itself, without calling it"),
        (
            {"nprocs": 0},
            "nprocs=0: expected a number of at least 1; where it is torch.cuda.device_count(), there is no GPU here",
        ),
        (
            {"nprocs": "2"},
            "nprocs='2': expected a number of at least 1; where it is torch.cuda.device_count(), there is no GPU here",
        ),
        ({"start_method": "thread"}, "start_method='thread': expected one of spawn, forkserver, fork"),
        ({"args": 3}, "args=3: expected a tuple of arguments; for a single one write args=(3,)"),
        (
            {"fn": lambda i: None},
            "the function <lambda> cannot be sent to another process (REASON). Define it at the top level of a module; "
            "a lambda, or a function within a function, is not found by a fresh process.",
        ),
        (
            {"args": (1, threading.Lock())},
            "args[1], a lock, cannot be sent to another process (REASON). Pass what it is made from, and make it "
            "within exit_with.",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_starts(options, message):
    pattern = re.escape(message).replace("REASON", ".+")
    with pytest.raises(LaunchError, match=f"^{pattern}$"):
        paceline.spawn(**{"fn": exit_with, **options})
    assert multiprocessing.active_children() == []


def test_the_signature_is_torchs():
    ours, torchs = (inspect.signature(fn).parameters for fn in (paceline.spawn, mp.spawn))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in torchs.values()]
