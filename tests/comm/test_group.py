"""What torch.distributed asks of a group besides the collectives: errors, timeouts, futures, other devices, names."""

import datetime
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import paceline
from support.ranks import expect_errors, run_ranks


def default_group():
    return dist.distributed_c10d._get_default_group()


# -- calls that are wrong by themselves -----------------------------------------------------------------------------


def wrong_calls():
    """(what is called, the error)"""
    ones, group = torch.ones(4), default_group()
    yield lambda: dist.all_reduce(ones, op=dist.ReduceOp.BAND), "BAND needs integers or booleans, not torch.float32"
    yield lambda: group.allgather([[ones]], [ones]), "all_gather: a list of 1 tensors, but the group has 2 ranks"
    yield lambda: group.allgather([[ones, ones]], [torch.ones(3)]), "this rank's output has 4 elements; expected 3"
    yield lambda: group.all_gather_single(torch.ones(7), ones), "the output has 7 elements; expected 8"
    yield lambda: group.reduce_scatter_single(ones, torch.ones(7)), "the input has 7 elements; expected 8"
    yield lambda: group.all_to_all_single(ones, torch.ones(5)), "the input has 5 rows, which cannot be split equally"
    yield (
        lambda: group.all_to_all_single(ones, ones, [1, 1], []),
        r"output_split_sizes \[1, 1\] must have 2",
    )
    yield lambda: group.send([ones], 5, 0), "send: rank 5 of the group is not one of its"
    yield lambda: group.send([ones], group.rank(), 0), "is this rank itself"
    yield lambda: group.all_to_all_single(ones, torch.ones(4).double()), "tensors of torch.float32 and torch.float64"


def calls_wrongly(world):
    for call, message in wrong_calls():
        with pytest.raises(ValueError, match=message):
            call()
    total = torch.ones(1)
    dist.all_reduce(total)  # and none of that has touched the other ranks
    return total.item()


def test_a_call_that_is_wrong_by_itself_is_refused_and_costs_nothing():
    assert run_ranks(2, calls_wrongly, backend="shm") == [2.0, 2.0]


# -- waiting ---------------------------------------------------------------------------------------------------------


def polls(world):
    """Rank 1 computes for a while before it comes; rank 0 sees its work not yet done, and then done."""
    if world.rank == 1:
        time.sleep(0.3)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    seen = [work.is_completed()]
    while not seen[-1]:
        time.sleep(0.01)
        seen.append(work.is_completed())
    return seen[0], work.is_success(), work.exception()


def test_a_work_can_be_polled():
    assert run_ranks(2, polls, backend="shm")[0] == (False, True, None)


def gives_up_early(world):
    if world.rank == 1:
        time.sleep(0.5)
    work = dist.all_reduce(total := torch.ones(1), async_op=True)
    if world.rank == 0:
        with pytest.raises(paceline.errors.CollectiveTimeoutError, match=r"rank 1 has not come to it, the others have"):
            work.wait(datetime.timedelta(seconds=0.1))
    work.wait()
    return total.item()


def test_a_wait_that_was_cut_short_may_be_taken_up_again():
    assert run_ranks(2, gives_up_early, backend="shm") == [2.0, 2.0]


def never_waits(world):
    """Rank 0 starts a large sum and never looks at it again; rank 1 gets its result all the same."""
    total = torch.ones(3_000_000)
    work = dist.all_reduce(total, async_op=True)
    if world.rank == 1:
        work.wait()
    world.barrier()  # through the store: nobody drives collectives meanwhile
    return float(total[-1]) if world.rank == 1 else None


def test_what_nobody_waits_for_goes_on_in_the_background():
    assert run_ranks(2, never_waits, backend="shm") == [None, 2.0]


def waits_in_threads(world):
    """Each of four threads sends a number to the other rank and receives one, all at once."""
    results = {}

    def exchange(tag):
        try:
            theirs = torch.empty(100_000)
            sent = dist.isend(torch.full((100_000,), float(world.rank * 10 + tag)), 1 - world.rank, tag=tag)
            dist.recv(theirs, 1 - world.rank, tag=tag)
            sent.wait()
            results[tag] = float(theirs.mean())
        except Exception as error:
            results[tag] = repr(error)

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_several_threads_may_wait_at_once():
    first, second = run_ranks(2, waits_in_threads, backend="shm")
    assert first == {tag: 10.0 + tag for tag in range(4)}
    assert second == {tag: float(tag) for tag in range(4)}


def chains_futures(world):
    """A callback that starts another collective and waits for its future."""
    outer = dist.all_reduce(torch.ones(2), async_op=True).get_future()

    def then(future):
        inner = dist.all_reduce(future.value()[0], async_op=True).get_future()
        return inner.then(lambda done: done.value()[0] + 1).wait()

    return outer.then(then).wait().tolist()


def test_a_callback_of_a_future_may_wait_for_another_one():
    assert run_ranks(2, chains_futures, backend="shm") == [[5.0, 5.0]] * 2


def asks_for_a_future_and_dies(world):
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future() if world.rank == 0 else None
    if world.rank == 1:
        raise ArithmeticError("the loss is no number")
    with pytest.raises(RuntimeError, match=r"(?s)PeerError: rank 0: rank 1 .*the loss is no number"):
        future.wait()
    with pytest.raises(paceline.errors.CommunicationError, match="this process group has failed before"):
        dist.all_reduce(torch.ones(2))


def test_a_future_fails_with_the_reason_of_the_rank_that_failed():
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, asks_for_a_future_and_dies, backend="shm")
    assert "--- rank 1: " in str(caught.value)
    assert "--- rank 0: " not in str(caught.value)


def trains_with_torchs_wrapper(world):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(10):
        if world.rank == 1 and step == 5:
            raise ArithmeticError("the loss is no number")
        model(torch.ones(2, 4)).sum().backward()


def test_torchs_own_wrapper_raises_when_a_rank_fails():
    with pytest.raises(AssertionError, match=r"(?s)--- rank 0: .*PeerError: rank 0: rank 1 .*the loss is no number"):
        run_ranks(2, trains_with_torchs_wrapper, backend="shm")


# -- names, sub-groups, other devices --------------------------------------------------------------------------------


def tells_its_names(world):
    group = default_group()
    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("dp",))
    return (
        dist.get_backend(),
        group.name(),
        group._device_types,
        bool(group.group_name),
        group._get_backend(torch.device("cpu")) is group,
        group.options._timeout,
        mesh.get_group("dp").size(),
        repr(mesh).startswith("DeviceMesh("),
    )


def test_the_group_answers_to_what_torch_asks():
    expected = ("shm", "shm", [torch.device("cpu")], True, True, datetime.timedelta(seconds=20), 2, True)
    assert run_ranks(2, tells_its_names, backend="shm") == [expected] * 2


def errs_in_a_subgroup(world):
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return
    dist.all_reduce(torch.ones(world.rank), group=group)


def test_errors_in_a_subgroup_speak_of_global_ranks():
    with pytest.raises(
        AssertionError, match=r"rank 1 called all_reduce\(sum, of 1 elements, float32\) at .*test_group.py"
    ):
        run_ranks(3, errs_in_a_subgroup, backend="shm")


@pytest.mark.parametrize("backend", ["cpu:shm,cuda:gloo", "cuda:gloo,cpu:shm"])
def test_a_group_may_have_other_backends_for_other_devices(backend):
    assert run_ranks(2, has_two_backends, backend=backend) == [(2.0, "gloo")] * 2


def has_two_backends(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), default_group()._get_backend(torch.device("cuda")).name()


def meets_another_device(world):
    default_group().allreduce([torch.ones(1, device="meta")])


def test_a_device_for_which_the_group_has_no_backend_is_refused_by_name():
    for error in expect_errors(2, meets_another_device):
        assert error.startswith("CommunicationError: the backend 'shm' moves CPU tensors only")
        assert "backend='cpu:shm,cuda:nccl'" in error


@pytest.mark.cuda
def test_tensors_on_gpus_go_over_nccl():
    assert run_ranks(1, sums_on_both, backend="cpu:shm,cuda:nccl", device="auto") == [(1.0, 1.0)]


def sums_on_both(world):
    here, there = torch.ones(1), torch.ones(1, device=world.device)
    dist.all_reduce(here)
    dist.all_reduce(there)
    return here.item(), there.item()


def is_interrupted(world):
    """Rank 0 is interrupted, as by Ctrl-C, while it waits for rank 1, which waits for rank 0's next call."""
    if world.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: signal.default_int_handler(signal.SIGINT, None))
        with pytest.raises(KeyboardInterrupt):
            dist.recv(torch.ones(1), 1)
        with pytest.raises(paceline.errors.CommunicationError, match="was interrupted by KeyboardInterrupt"):
            dist.all_reduce(torch.ones(1))
        time.sleep(1)
    else:
        with pytest.raises(paceline.errors.PeerError, match=r"rank 0 \(pid \d+\) failed, .*\n.*was interrupted"):
            dist.all_reduce(torch.ones(1))


def test_a_wait_that_is_interrupted_ends_the_group_for_all():
    run_ranks(2, is_interrupted, backend="shm")
