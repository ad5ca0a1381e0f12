"""Stopping early: all ranks at one step, whoever has heard of it, and signals as they were before and after."""

import dataclasses
import itertools
import os
import pathlib
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import paceline
from paceline.world import stopping
from paceline.world.stopping import Stopping
from support.ranks import RankError, expect_errors, run_ranks

HEEDED = (signal.SIGUSR1, signal.SIGTERM)


def steps_until_stop(world, at_step=lambda step: None, limit=2000):
    """The number of the call that said to stop."""
    for step in range(1, limit):
        at_step(step)
        if world.should_stop():
            return step
    raise AssertionError(f"not told to stop within {limit} steps")


# -- one step for all ---------------------------------------------------------------------------------------------


class OfOneTrial(dist.PrefixStore):
    """Keys of one trial; all trials share the second connection, since torch may ask name servers for each new one."""

    def __init__(self, trial, store, second):
        super().__init__(f"trial {trial}", store)
        self.clone = lambda: dist.PrefixStore(f"trial {trial}", second)


def trials(world, num_trials):
    """Ranks at paces of their own, which nothing keeps together; some are told, each in some way, at some step."""
    stopped_at = []
    store = world._meeting.store
    second = store.clone()
    for trial in range(num_trials):
        alike, own = random.Random(trial), random.Random(f"{trial} {world.rank}")
        is_told = world.rank in alike.sample(range(world.world_size), alike.randint(1, world.world_size))
        told_at, way = own.randint(2, 10), own.choice([*HEEDED, None])
        pace_s = own.choice([0.0001, 0.0002, 0.0004])
        meeting = dataclasses.replace(world._meeting, store=OfOneTrial(trial, store, second))
        part = Stopping()
        for step in itertools.count(1):
            if step < 12 or step % 16 == 0:  # then in a hurry, to where the fastest is
                time.sleep(own.uniform(0.0, 2 * pace_s))
            if is_told and step == told_at:
                os.kill(os.getpid(), way) if way else part.request(meeting)
            if part.at_next_step(meeting, 20.0):
                break
        part.end(meeting)
        stopped_at.append(step)
    return stopped_at


def test_ranks_never_stop_at_different_steps():
    stopped_at = run_ranks(3, trials, 200, timeout_s=60)
    assert stopped_at[0] == stopped_at[1] == stopped_at[2]
    assert len(set(stopped_at[0])) > 20  # the trials differ


def train(world, told, signum):
    """Steps with a collective in each, while a loader's workers fetch the data."""
    assert not world.should_stop()
    loader = DataLoader(torch.arange(4000.0), batch_size=2, num_workers=1)
    for step, batch in enumerate(loader):
        dist.all_reduce(batch)
        if step == 5 + world.rank and world.rank in told:
            # As Slurm does: to all processes of the step.
            os.killpg(os.getpgid(0), signum)
        if world.should_stop():
            assert world.should_stop()  # from then on
            return step
    raise AssertionError("not told to stop")


@pytest.mark.parametrize("told", [{1}, {0, 1}], ids=["one rank", "all ranks"])
def test_a_signal_to_a_rank_and_its_loaders_workers_stops_all_ranks_at_one_step(told):
    first, second = run_ranks(2, train, told, signal.SIGUSR1)
    assert first == second
    assert 5 <= first < 1000


def request(world):
    if world.rank == 1:
        asking = threading.Thread(target=world.request_stop)  # as from a thread that watches a cloud's notices
        asking.start()
        asking.join()
        world.request_stop()
    return steps_until_stop(world, lambda step: world.barrier())


def test_a_rank_may_ask_for_it_by_a_call_before_the_first_step_and_from_any_thread():
    first, second, third = run_ranks(3, request)
    assert first == second == third


def alone(way):
    with paceline.init(device="cpu") as world:

        def at_step(step):
            if step == 3:
                world.request_stop() if way is None else signal.raise_signal(way)

        return steps_until_stop(world, at_step)


@pytest.mark.parametrize("way", [None, *HEEDED])
def test_a_world_of_one_stops_at_the_very_step(way):
    assert run_ranks(1, lambda rank, world_size, directory: alone(way), join=False) == [3]


def leave_early(world):
    num_steps = 3 if world.rank == 1 else 50
    for step in range(1, num_steps + 1):
        if world.rank == 0 and step == 10:
            world.request_stop()
        if world.should_stop():
            return step
    paceline.shutdown()
    return "all steps done"


def test_a_rank_that_is_done_and_has_left_is_not_waited_for():
    stopped_at, done = run_ranks(2, leave_early)
    assert (stopped_at, done) == (10, "all steps done")


# -- what can go wrong --------------------------------------------------------------------------------------------


def ask_alone(world):
    if world.rank == 1:
        time.sleep(1.0)
        return
    world.request_stop()
    world_of_patience = dataclasses.replace(world, _timeout_s=0.3)
    steps_until_stop(world_of_patience)


def test_a_rank_that_never_calls_it_is_named():
    messages = run_ranks(2, lambda world: caught(ask_alone, world))
    assert messages == [
        "BarrierTimeoutError: rank 0: the ranks were asked to stop, but rank 1 of 2 did not say within 0.3 s which "
        "step comes next. All ranks must call should_stop() once a step.",
        None,
    ]


def caught(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def call_after_the_end(world):
    paceline.shutdown()
    world.should_stop()


def test_after_shutdown_it_is_refused():
    assert expect_errors(1, call_after_the_end) == [
        "WorldError: rank 0: should_stop() was called after shutdown(). Ask the world of init()."
    ]


def call_in_a_thread(world):
    messages = []
    thread = threading.Thread(target=lambda: messages.append(caught(world.should_stop)), name="trainer")
    thread.start()
    thread.join()
    assert not world.should_stop()
    thread = threading.Thread(target=lambda: messages.append(world.should_stop()))
    thread.start()
    thread.join()
    return messages


def test_the_first_call_must_be_in_the_main_thread():
    assert run_ranks(1, call_in_a_thread) == [
        [
            "WorldError: rank 0: should_stop() was first called in thread 'trainer', where Python cannot install "
            "signal handlers. Call it in the main thread first; after that, any thread may.",
            False,
        ]
    ]


def call_in_a_child(world):
    world.should_stop()
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        answers = [caught(world.should_stop), caught(world.request_stop), str(signal.getsignal(signal.SIGTERM))]
        os.write(writer, "\n".join(map(str, answers)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return os.read(reader, 4096).decode().splitlines()


def test_a_forked_child_is_no_rank_and_has_its_own_sigterm_back():
    stop, request_, handler = run_ranks(1, call_in_a_child)[0]
    assert stop == (
        "WorldError: this process was forked from rank 0 and is no rank itself. Call should_stop in the rank, or "
        "init() here for a world of its own."
    )
    assert request_.startswith("WorldError: this process was forked from rank 0 and is no rank itself. Call request_st")
    assert handler == str(signal.SIG_DFL)


# -- signals ------------------------------------------------------------------------------------------------------


def handlers():
    return [signal.getsignal(signum) for signum in HEEDED]


def watch_handlers(rank, world_size, directory):
    came = []

    def own(signum, frame):
        came.append(signum)

    signal.signal(signal.SIGUSR1, own)
    seen = [handlers()]
    with paceline.init(device="cpu") as world:
        seen.append(handlers())
        world.should_stop()
        assert own not in handlers()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert world.should_stop()
    seen.append(handlers())
    assert came == [signal.SIGUSR1] * 2
    assert seen == [[own, signal.SIG_DFL]] * 3
    assert "paceline stopping" not in {thread.name for thread in threading.enumerate()}


def test_handlers_are_installed_by_the_first_call_chained_and_given_back():
    run_ranks(1, watch_handlers, join=False)


def leave_before_the_own_signal_comes(rank, world_size, directory):
    rendezvous = pathlib.Path(directory, "rendezvous").as_uri()
    with paceline.init("auto", rendezvous, rank=rank, world_size=world_size, device="cpu") as world:
        assert not world.should_stop()
        if rank == 0:
            signal.raise_signal(signal.SIGUSR1)
        steps_until_stop(world, lambda step: world.barrier())
    if rank == 1:
        signal.raise_signal(signal.SIGUSR1)
    return handlers()


def test_a_signal_that_comes_when_others_have_stopped_this_rank_already_does_not_kill_it():
    assert run_ranks(2, leave_before_the_own_signal_comes, join=False) == [
        [signal.SIG_IGN, signal.SIG_DFL],  # nor does one that comes twice, from Slurm and from a launcher
        [signal.SIG_IGN, signal.SIG_DFL],
    ]


def told_while_it_gives_back(rank, world_size, directory):
    """The handler is still in force, since another thread gives back, and the signal comes after that."""
    world = paceline.init(device="cpu")
    world.should_stop()
    world.request_stop()
    signals = world._stopping._signals
    thread = threading.Thread(target=signals.give_back, kwargs={"more_to_come": True})
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    paceline.shutdown()


def test_a_signal_that_is_expected_does_not_kill_a_rank_that_is_just_giving_back():
    run_ranks(1, told_while_it_gives_back, join=False)


def handler_of_its_own_afterwards(rank, world_size, directory):
    came = []
    with paceline.init(device="cpu") as world:
        world.should_stop()
        ours = signal.getsignal(signal.SIGUSR1)

        def own(signum, frame):
            came.append(signum)
            ours(signum, frame)

        signal.signal(signal.SIGUSR1, own)
        signal.raise_signal(signal.SIGUSR1)
        assert world.should_stop()
    assert signal.getsignal(signal.SIGUSR1) is own
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert came == [signal.SIGUSR1]


def test_a_handler_that_was_installed_later_stays():
    run_ranks(1, handler_of_its_own_afterwards, join=False)


def shut_down_in_a_thread(rank, world_size, directory):
    came = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: came.append(signum))
    world = paceline.init(device="cpu")
    world.should_stop()
    thread = threading.Thread(target=paceline.shutdown)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert came == [signal.SIGUSR1]
    signal.raise_signal(signal.SIGTERM)


def test_after_a_shutdown_in_another_thread_signals_are_only_handed_on():
    with pytest.raises(RankError, match=r"^--- rank 0: died with exit code -15$"):
        run_ranks(1, shut_down_in_a_thread, join=False)


def be_told_twice(rank, world_size, directory):
    with paceline.init(device="cpu") as world:
        world.should_stop()
        signal.raise_signal(signal.SIGTERM)
        assert world.should_stop()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)


def test_a_second_sigterm_does_what_it_would_have_done():
    with pytest.raises(RankError, match=r"^--- rank 0: died with exit code -15$"):
        run_ranks(1, be_told_twice, join=False)


def leave_c_handlers_alone(rank, world_size, directory):
    # What Python cannot name, it cannot give back. None stands for it.
    known = signal.getsignal
    signal.getsignal = lambda signum: None if signum == signal.SIGUSR1 else known(signum)
    with paceline.init(device="cpu") as world:
        world.should_stop()
        assert known(signal.SIGUSR1) == signal.SIG_DFL
        assert known(signal.SIGTERM) != signal.SIG_DFL


def test_a_handler_that_python_cannot_give_back_is_left_alone():
    run_ranks(1, leave_c_handlers_alone, join=False)


# -- cost ---------------------------------------------------------------------------------------------------------


def time_steps(world):
    start = time.perf_counter()
    for _ in range(20_000):
        world.should_stop()
    return (time.perf_counter() - start) / 20_000


def test_a_step_costs_next_to_nothing():
    assert min(run_ranks(2, time_steps)) < 20e-6  # a round trip to the store takes more; measured: 0.6e-6


def test_c10d_can_wait_as_long_as_we_let_it():
    assert stopping._LONG.total_seconds() * 1000 < 2**31
