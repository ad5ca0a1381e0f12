"""When a backward fails or a rank is lost, nothing is averaged wrongly, and the error says who, what and why."""

import contextlib
import os
import re
import signal
import time

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel
from paceline.errors import ReductionError, ReplicaMismatchError
from support.models import TwoLayers, inputs
from support.ranks import RankError, expect_errors, run_ranks
from support.steps import grads, step


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("boom")


def fails_before_anything_was_sent(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    with contextlib.suppress(ValueError):
        Boom.apply(wrapped(inputs(world))).backward()
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


def test_a_backward_that_fails_before_the_model_leaves_the_next_one_right():
    assert run_ranks(2, fails_before_anything_was_sent) == [[[1.5, 1.5]] * 2] * 2


class Fails(torch.autograd.Function):
    """Its backward raises where it is told to."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("boom")
        return grad, None


def fails_before_anything_is_sent(world, failing_ranks):
    """Gradients (1, 1) and (2, 2), of which the first backward gets as far as the second layer's."""
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    with contextlib.suppress(ValueError):
        model.second(Fails.apply(model.first(inputs(world)), world.rank in failing_ranks)).sum().backward()
    after_failure = grads(model)
    wrapped(inputs(world)).backward()
    return after_failure, grads(model)


@pytest.mark.usefixtures("both_ways")
def test_a_backward_that_fails_before_anything_was_sent_leaves_what_it_had():
    found = run_ranks(2, fails_before_anything_is_sent, (0, 1))
    assert [after_failure for after_failure, _ in found] == [[None, 1.0], [None, 2.0]]
    assert [after_next for _, after_next in found] == [[1.5, 3.0]] * 2


def skips_a_step_on_one_rank(world):
    model = TwoLayers()
    wrapped = DistributedDataParallel(model)
    for number in range(3):
        wrapped.zero_grad()
        with contextlib.suppress(ValueError):
            model.second(Fails.apply(model.first(inputs(world)), (world.rank, number) == (1, 1))).sum().backward()


def test_a_backward_that_fails_on_one_rank_only_is_an_error_on_all_at_the_next():
    for rank, message in enumerate(expect_errors(2, skips_a_step_on_one_rank)):
        assert message.startswith(
            f"ReductionError: rank {rank}: a backward raised an error on rank 1, where it was caught, and not on the "
            "others. So the ranks average gradients of different steps. Skip a step on all ranks or on none;"
        )


def fails_in_the_middle(world):
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    with contextlib.suppress(ValueError):
        model[2](model[1](Boom.apply(model[0](inputs(world))))).backward()
    wrapped(inputs(world)).backward()


@pytest.mark.usefixtures("both_ways")
def test_a_backward_that_failed_half_way_is_not_silently_continued():
    for rank, message in enumerate(expect_errors(2, fails_in_the_middle)):
        assert message.startswith(
            f"ReductionError: rank {rank}: the backward before this one raised an error after part of its gradients "
            "had been sent. The ranks no longer agree on what comes next: end them all and start from a checkpoint."
        )


def dies_before_backward(world, how):
    wrapped = DistributedDataParallel(TwoLayers())
    wrapped(inputs(world)).backward()
    if world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("rank 1 gives up")
    since = time.monotonic()
    try:
        wrapped(inputs(world)).backward()
    except ReductionError as error:
        assert time.monotonic() - since < 5.0  # a second, on a machine that has time
        raise error


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("how", ["failed", "killed"])
def test_when_a_rank_is_lost_the_others_say_which_and_why(how):
    with pytest.raises(RankError) as caught:
        run_ranks(2, dies_before_backward, how)
    told = r"failed[^\n]*:\n(.*\n)*ValueError: rank 1 gives up" if how == "failed" else r"(was killed|ended)"
    assert re.search(
        r"paceline\.errors\.ReductionError: rank 0: gradients could not be averaged over 2 ranks: rank 1 \(pid \d+\) "
        + told,
        str(caught.value),
    )


def is_silent(rank, world_size, directory):
    address = f"file://{directory}/rendezvous"
    with paceline.init(run_ranks.__kwdefaults__["backend"], address, rank=rank, world_size=world_size, timeout=1):
        wrapped = DistributedDataParallel(TwoLayers())
        if rank == 1:
            time.sleep(3)
        wrapped(torch.ones(1, 1)).backward()


def test_a_rank_that_is_silent_is_named_at_the_deadline():
    message, _ = expect_errors(2, is_silent, join=False)
    assert re.match(
        r"ReductionError: rank 0: gradients could not be averaged over 2 ranks: all_reduce\(.*\) at "
        r".*/test_failures.py:\d+, call number 1 of this group, was not done after 1 s, the timeout that it was given: "
        r"rank 1 has not come",
        message,
    )


def test_gloo_knows_no_names_so_the_error_says_where_to_look(monkeypatch):
    monkeypatch.setitem(run_ranks.__kwdefaults__, "backend", "gloo")
    message, _ = expect_errors(2, is_silent, join=False)
    assert message.startswith(
        "ReductionError: rank 0: gradients could not be averaged over 2 ranks: most often another rank has ended or is "
        "stuck; its output says why.\nThe backend reports: "
    )


def fails_at_the_very_end(world):
    wrapped = DistributedDataParallel(TwoLayers())
    send, held = wrapped._reducer.send_rest, []

    def fail():
        wrapped._reducer.send_rest = send
        raise KeyboardInterrupt

    wrapped._reducer.send_rest = fail
    try:
        wrapped(inputs(world)).backward()
    except KeyboardInterrupt as error:
        held.append(error)  # as a notebook holds the last one
    wrapped(inputs(world)).backward()


def test_an_interrupt_at_the_end_of_backward_does_not_switch_averaging_off_in_silence():
    for rank, message in enumerate(expect_errors(2, fails_at_the_very_end)):
        assert message.startswith(
            f"ReductionError: rank {rank}: the backward before this one raised an error after part"
        )


def unfreeze_while_much_is_under_way(world):
    """As above, with 16 MB beside it: how many elements of its gradient, 1/2 on average, are wrong."""
    model = nn.ParameterDict({"large": torch.zeros(4 << 20), "small": torch.zeros(8)})
    wrapped = DistributedDataParallel(model)
    num_wrong = 0
    for _ in range(3):
        model["small"].requires_grad_(world.is_main)
        with contextlib.suppress(ReplicaMismatchError):
            (model["large"].sum() * 1000 * (world.rank + 1) + model["small"].sum()).backward()
        model["small"].requires_grad_(True)
        wrapped.zero_grad()
        (model["large"].sum() * world.rank + model["small"].sum()).backward()
        num_wrong += int((model["large"].grad != 0.5).sum())
    return num_wrong


@pytest.mark.usefixtures("both_ways")
def test_what_was_under_way_has_ended_when_ranks_are_found_to_differ():
    assert run_ranks(2, unfreeze_while_much_is_under_way) == [0, 0]


def wrapped_again_after_failure(world):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    for layer in model:
        nn.init.ones_(layer.weight)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    x = inputs(world).requires_grad_()
    broken = Boom.apply(model[0](x)) if world.is_main else model[0](Boom.apply(x))  # after one bucket, after two
    with pytest.raises(ValueError, match="boom"):
        model[2](model[1](broken)).backward()
    model.zero_grad()
    wrapped = None
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    return step(wrapped, lambda: wrapped(inputs(world)), times=2)


@pytest.mark.usefixtures("both_ways")
def test_a_wrapper_made_after_a_failed_one_does_not_hear_what_that_one_sent():
    assert run_ranks(2, wrapped_again_after_failure) == [[[1.5] * 3] * 2] * 2


def deleted_before_backward(world):
    DistributedDataParallel(TwoLayers())(inputs(world)).backward()


def test_a_backward_after_the_wrapper_is_gone_is_an_error():
    for rank, message in enumerate(expect_errors(2, deleted_before_backward)):
        assert message == (
            f"ReductionError: rank {rank}: backward through an output of a DistributedDataParallel that has been "
            "deleted; its gradients would not be averaged. Keep the wrapper until backward has run."
        )
