"""What torch.distributed asks of a group besides the collectives: errors, timeouts, futures, other devices, names."""

import datetime
import signal
import threading
import time
import warnings

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
    op, reduce = dist.ReduceOp, dist.all_reduce
    yield lambda: reduce(ones, op.BAND), r"BAND is not defined for torch.float32. Convert .* to torch.int64 perhaps"
    yield lambda: reduce(ones.bool(), op.AVG), r"AVG is not defined for torch.bool. Convert .* to torch.float32 perhaps"
    greatest = dist.AllreduceOptions()
    greatest.reduceOp = op.MAX
    yield lambda: group.allreduce([ones.cfloat()], greatest), "MAX is not defined for torch.complex64. .* torch.float32"
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        for name in ("AVG", "MIN", "MAX"):
            yield (
                lambda dtype=dtype, name=name: reduce(torch.ones(4, dtype=dtype), getattr(op, name)),
                f"{name} is not defined for {dtype}. Convert the tensor first, to torch.int64 perhaps",
            )
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):  # torch multiplies them, if there are four or more
        yield (
            lambda name=name: reduce(ones.to(torch.float8_e4m3fn), getattr(op, name)),
            f"{name} is not defined for torch.float8_e4m3fn. Convert the tensor first, to torch.float32 perhaps",
        )
    yield lambda: dist.reduce(ones.bool(), 0, op.AVG), "AVG is not defined for torch.bool"
    yield lambda: dist.reduce_scatter(ones.bool(), [ones.bool()] * 2, op.AVG), "AVG is not defined for torch.bool"
    mixed = [ones[:2], ones[:2].to(torch.uint32)], [ones, ones.to(torch.uint32)]
    max_opts = dist.ReduceScatterOptions()
    max_opts.reduceOp = op.MAX
    yield lambda: group.reduce_scatter_tensor_coalesced(*mixed, max_opts), "MAX is not defined for torch.uint32"
    yield (
        lambda: group.allreduce_coalesced([torch.tensor([2**40 + 1]), ones]),
        "all_reduce: tensors of torch.float32 and torch.int64 in one call; use one dtype",
    )
    premul = dist._make_nccl_premul_sum
    yield lambda: reduce(ones.int(), premul(0.5)), r"PREMUL_SUM: torch.int32 times 0.5 is not torch.int32. Convert the"
    yield (
        lambda: reduce(ones.int(), premul(torch.tensor([0.5]))),
        "PREMUL_SUM: torch.int32 times 0.5 is not torch.int32",
    )
    yield lambda: reduce(ones.bool(), premul(2.0)), "PREMUL_SUM is not defined for torch.bool"
    yield (
        lambda: reduce(ones, premul(torch.tensor([1j]))),
        "torch.float32 cannot be multiplied by 1j. Use a real factor",
    )
    expanded = torch.ones(1).expand(4)
    shared = r"a tensor of shape \(4,\) and strides \(0,\), as expand\(\) makes them, has elements that share memory"
    yield lambda: reduce(expanded), shared
    yield lambda: dist.reduce(expanded, group.rank()), shared
    yield lambda: dist.broadcast(expanded, 1 - group.rank()), shared
    yield lambda: dist.all_gather([ones.clone(), expanded], ones), shared
    yield lambda: dist.gather(ones, [ones.clone(), expanded], group.rank()), shared
    yield lambda: dist.scatter(expanded, [ones, ones], group.rank()), shared
    yield lambda: dist.reduce_scatter(expanded, [ones, ones]), shared
    yield lambda: dist.all_to_all([ones.clone(), expanded], [ones, ones]), shared
    yield lambda: dist.recv(expanded, 1 - group.rank()), shared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these are new, and those old
        csr, quantized = torch.eye(2).to_sparse_csr(), torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)
    yield lambda: reduce(csr), "all_reduce of a tensor of the layout torch.sparse_csr with SUM: of sparse tensors, only"
    yield lambda: reduce(csr.to_sparse_coo(), op.MAX), "layout torch.sparse_coo with MAX: of sparse tensors, only those"
    yield lambda: dist.broadcast(csr, 0), r"of the layout torch.sparse_csr cannot be sent. Use to_dense\(\); of sparse"
    yield lambda: group.allreduce_coalesced([ones, csr]), "of the layout torch.sparse_csr cannot be sent"
    yield lambda: dist.broadcast(quantized, 0), "a tensor of torch.qint8 cannot be sent: .* Send it in another dtype"
    many = "all_gather_coalesced: "
    yield lambda: group.allgather_coalesced([[ones]], [ones]), many + "outputs of 1 ranks, but the group has 2"
    yield (
        lambda: group.allgather_coalesced([[ones.int()]] * 2, [ones]),
        many + "each rank's outputs must have the sizes",
    )
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


def is_refused_alone(world):
    """Only rank 1's calls are wrong; rank 0 has called the next sum long before."""
    if world.rank == 1:
        time.sleep(0.1)
        for call, message in wrong_calls():
            with pytest.raises(ValueError, match=message):
                call()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_call_that_is_wrong_by_itself_does_not_reach_the_other_ranks():
    assert run_ranks(2, is_refused_alone, backend="shm") == [2.0, 2.0]


def gives_what_is_expanded(world):
    """[r+1, r+1, r+1, r+1], expanded, as what a root gives to all, and as what others give to a root."""
    expanded = torch.tensor([world.rank + 1.0]).expand(4)
    if world.rank == 0:
        dist.broadcast(expanded, 0)
        dist.reduce(total := torch.ones(4), 0)
        return total.tolist()
    dist.broadcast(got := torch.zeros(4), 0)
    dist.reduce(expanded, 0)
    return got.tolist()


def test_what_is_not_filled_may_be_expanded():
    assert run_ranks(2, gives_what_is_expanded, backend="shm") == [[3.0] * 4, [1.0] * 4]


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


def asks_again_in_a_callback(world):
    """A callback of a work's future asks that work for another future, and a callback of that one for a third.

    Rank 1 comes when rank 0 has asked for the first.
    """
    if world.rank == 1:
        world.barrier()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    seen = []

    def ask(future):
        seen.append(future.value()[0].tolist())
        if len(seen) < 3:
            work.get_future().then(ask)

    asked = work.get_future().then(ask)
    if world.rank == 0:
        world.barrier()
    asked.wait()
    others = [work.get_future() for _ in range(3)]
    results = [future.wait()[0].tolist() for future in others]
    return soon(lambda: len(seen) == 3), seen, results, soon(work.is_over)


def soon(is_so):
    deadline = time.monotonic() + 5
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def test_a_callback_of_a_future_may_ask_the_same_work_for_another_one():
    expected = True, [[2.0, 2.0]] * 3, [[2.0, 2.0]] * 3, True
    assert run_ranks(2, asks_again_in_a_callback, backend="shm") == [expected] * 2


def asks_while_told(world):
    """Whether rank 0's work counts as over while its future is told; rank 1 comes when that has been asked for."""
    seen = []
    if world.rank == 1:
        world.barrier()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    future = work.get_future().then(lambda _: seen.append(work.is_over()))
    if world.rank == 0:
        world.barrier()
    future.wait()
    return seen, soon(work.is_over)


def test_a_work_is_over_when_all_have_been_told():
    assert run_ranks(2, asks_while_told, backend="shm")[0] == ([False], True)


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
