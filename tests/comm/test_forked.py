"""What a forked child may do with its parent's group: nothing; it is told so, and the parent goes on."""

import gc
import multiprocessing
import os
import pathlib
import select
import signal
import time

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import PacelineError
from support.ranks import run_ranks

BACKEND = "shm"
HANG_S = 5.0  # what takes longer hangs
_FORK = multiprocessing.get_context("fork")


def in_a_child(fn):
    """What ``fn`` raises in a forked child, as text; "no error"; or "hangs"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fn()
            text = "no error"
        except PacelineError as error:
            text = f"PacelineError: {error}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    try:
        is_heard, _, _ = select.select([reader], [], [], HANG_S)
        return os.read(reader, 10_000).decode() if is_heard else "hangs"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


FORKED = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
    "async": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
    "barrier": dist.barrier,
    "send": lambda: dist.send(torch.ones(3), 1 - dist.get_rank()),
    "recv": lambda: dist.recv(torch.ones(3), 1 - dist.get_rank()),
}


def fork_and_use(world, way):
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3), async_op=True).wait()  # there may be threads now, which a child has not
    text = in_a_child(FORKED[way])
    t = torch.full((100_000,), world.rank + 1.0)
    dist.all_reduce(t)
    return text, t.unique().tolist()


@pytest.mark.parametrize("way", FORKED)
def test_the_group_in_a_forked_child_is_an_error_and_the_parent_goes_on(way):
    for rank, (text, sums) in enumerate(run_ranks(2, fork_and_use, way, backend=BACKEND)):
        assert text.startswith("PacelineError: "), text
        assert f"forked from rank {rank}" in text
        assert sums == [3.0]


USES = {
    "wait": lambda work: work.wait(),
    "is_completed": lambda work: [work.is_completed() for _ in range(1000)],
    "get_future": lambda work: work.get_future().wait(),
}


def fork_under_way(world, use):
    """A child is forked while a work is under way, and uses it; the parent then waits for it."""
    t = torch.full((1000,), world.rank + 1.0)
    if world.rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(t, async_op=True)
    text = in_a_child(lambda: USES[use](work)) if world.rank == 0 else ""
    work.wait()
    return text, t.unique().tolist()


@pytest.mark.parametrize("use", USES)
def test_a_work_under_way_is_an_error_in_a_forked_child_and_the_parent_goes_on(use):
    (text, first), (_, second) = run_ranks(2, fork_under_way, use, backend=BACKEND)
    assert text.startswith("PacelineError: "), text
    assert "forked from rank 0" in text
    assert first == second == [3.0]


def fork_and_drop(world, way):
    """A child destroys the group, or ends as data loaders' workers do; the parent's group lives on."""
    dist.all_reduce(torch.ones(3))
    if way == "destroys":
        texts = [in_a_child(dist.destroy_process_group) for _ in range(3)]
    else:
        workers = [_FORK.Process(target=gc.collect) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(HANG_S)
        texts = ["no error" if worker.exitcode == 0 else f"exit code {worker.exitcode}" for worker in workers]
    t = torch.full((100_000,), world.rank + 1.0)
    for _ in range(3):
        dist.all_reduce(t)
    return texts, t.unique().tolist()


@pytest.mark.parametrize("way", ["destroys", "ends"])
def test_a_child_that_drops_the_group_leaves_it_to_its_parent(way):
    for texts, sums in run_ranks(2, fork_and_drop, way, backend=BACKEND):
        assert texts == ["no error"] * 3
        assert sums == [12.0]


def start_anew_in_child(world, directory):
    def init():
        paceline.shutdown()
        uri = pathlib.Path(directory, f"child-{world.rank}").as_uri()
        with paceline.init(BACKEND, uri, rank=0, world_size=1, timeout=10):
            t = torch.ones(3)
            dist.all_reduce(t)
            assert t.tolist() == [1.0] * 3

    dist.barrier()
    text = in_a_child(init)
    t = torch.ones(3)
    dist.all_reduce(t)
    return text, t.tolist()


def test_a_forked_child_may_start_a_world_of_its_own(tmp_path):
    assert run_ranks(2, start_anew_in_child, str(tmp_path), backend=BACKEND) == [("no error", [2.0] * 3)] * 2


def trains_in_child(world):
    """A child runs one backward of its parent's wrapper; the gradient of w * x is x, r+1 on rank r."""
    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = paceline.DistributedDataParallel(model)

    def step():
        model.weight.grad = None
        wrapped(torch.full((1, 1), world.rank + 1.0)).sum().backward()

    step()
    text = in_a_child(step)
    for _ in range(3):
        step()
    return text, model.weight.grad.item()


def test_a_backward_in_a_forked_child_is_an_error_and_the_parent_goes_on():
    for rank, (text, gradient) in enumerate(run_ranks(2, trains_in_child, backend=BACKEND)):
        assert text.startswith("PacelineError: "), text
        assert f"forked from rank {rank}" in text
        assert gradient == 1.5


def averages_in_child(world, way):
    averages = dist.distributed_c10d._get_default_group().averages()
    shared = averages.allocate(1000, torch.float32)
    shared.tensor.fill_(world.rank + 1.0)
    dist.barrier()
    uses = {"launches": lambda: averages.launch(shared), "allocates": lambda: averages.allocate(10, torch.float32)}
    text = in_a_child(uses[way])
    dist.barrier()
    averages.wait(averages.launch(shared))
    return text, shared.tensor.unique().tolist()


@pytest.mark.parametrize("way", ["launches", "allocates"])
def test_averages_in_a_forked_child_are_an_error_and_the_parents_are_right(way):
    for rank, (text, values) in enumerate(run_ranks(2, averages_in_child, way, backend=BACKEND)):
        assert text.startswith("PacelineError: "), text
        assert f"forked from rank {rank}" in text
        assert values == [1.5]
