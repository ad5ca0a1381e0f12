"""Communication hooks: torch's own, the user's, and what cannot be one."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from paceline import DistributedDataParallel
from support.ranks import expect_errors, run_ranks

BACKENDS = ["gloo", "shm"]


def linear(value=0.0):
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def gradient_with(world, register, inputs=((1.0, 2.0), (3.0, 4.0))):
    model = DistributedDataParallel(linear())
    register(model)
    model(torch.tensor([inputs[world.rank]])).sum().backward()
    return model.module.weight.grad.tolist()


def shipped(world, name):
    state, hook = {
        "allreduce": lambda: (None, default_hooks.allreduce_hook),
        "allreduce over a group": lambda: (dist.group.WORLD, default_hooks.allreduce_hook),
        "fp16": lambda: (None, default_hooks.fp16_compress_hook),
        "bf16": lambda: (None, default_hooks.bf16_compress_hook),
        "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "bf16 wrapper": lambda: (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "post-localSGD": lambda: (
            post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=10),
            post_localSGD_hook.post_localSGD_hook,
        ),
        "PowerSGD": lambda: (
            powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    }[name]()
    return gradient_with(world, lambda model: model.register_comm_hook(state, hook))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "allreduce",
        "allreduce over a group",
        "fp16",
        "bf16",
        "fp16 wrapper",
        "bf16 wrapper",
        "post-localSGD",
        "PowerSGD",
    ],
)
def test_the_hooks_that_torch_ships_average(name, backend):
    assert run_ranks(2, shipped, name, backend=backend) == [[[2.0, 3.0]]] * 2


def quantised(world):
    hook = quantization_hooks.quantization_pertensor_hook
    return gradient_with(world, lambda model: model.register_comm_hook(dist.group.WORLD, hook))


def test_torchs_hook_that_quantises_runs():
    """Over shared memory; torch's own DistributedDataParallel over Gloo fails with it."""
    for (grad,) in run_ranks(2, quantised, backend="shm"):
        assert grad == pytest.approx([2.0, 3.0], abs=0.02)


def builtin(world, kind):
    return gradient_with(world, lambda model: model._register_builtin_comm_hook(kind))


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_torchs_builtin_hooks_have_their_names(name):
    assert run_ranks(2, builtin, getattr(dist.BuiltinCommHookType, name)) == [[[2.0, 3.0]]] * 2


def powered(world):
    """Low rank is exact where gradients are of rank one; several steps, with the rebuilt plan."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, warm_start=True)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    x = torch.arange(64.0)[None] * (world.rank + 1)
    for _ in range(6):
        model.zero_grad()
        model(x).sum().backward()
    before, after = state.total_numel_before_compression, state.total_numel_after_compression
    return model.module.weight.grad[0, :3].tolist(), before, after


def test_powersgd_compresses_after_its_first_iterations():
    for grad, before, after in run_ranks(2, powered):
        assert grad == pytest.approx([0.0, 1.5, 3.0], abs=1e-4)
        assert (before, after) == (4 * 64 * 64, 4 * (64 + 64))  # in four of six


def spied(world):
    """Three buckets of one parameter each."""
    seen = []

    def hook(state, bucket):
        seen.append(
            (
                state,
                bucket.index(),
                bucket.is_last(),
                [tuple(param.shape) for param in bucket.parameters()],
                [tuple(grad.shape) for grad in bucket.gradients()],
                bucket.buffer().tolist(),
            )
        )
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 10.0 + bucket.index()))
        return future

    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    for param in model.parameters():
        nn.init.constant_(param, 1.0)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0)
    wrapped.register_comm_hook("state", hook)
    wrapped(torch.tensor([[1.0, 2.0]])).sum().backward()
    return seen, [param.grad.tolist() for param in model.parameters()]


def test_a_hook_sees_raw_gradients_and_what_it_returns_becomes_them():
    for seen, grads in run_ranks(2, spied):
        assert seen == [
            ("state", 0, False, [(1, 1)], [(1, 1)], [3.0]),
            ("state", 1, True, [(1, 2)], [(1, 2)], [1.0, 2.0]),
        ]
        assert grads == [[[11.0, 11.0]], [[10.0]]]


def set_buffer(world):
    def hook(_, bucket):
        bucket.set_buffer(torch.full_like(bucket.buffer(), 5.0))
        future = torch.futures.Future()
        future.set_result([bucket.buffer() + torch.cat([grad.view(-1) for grad in bucket.gradients()])])
        return future

    return gradient_with(world, lambda model: model.register_comm_hook(None, hook))


def test_a_hook_may_put_another_buffer_in_and_return_a_list():
    assert run_ranks(2, set_buffer) == [[[10.0, 10.0]]] * 2


def under_no_sync(world):
    model = DistributedDataParallel(linear())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with model.no_sync():
        model(torch.tensor([[1.0, world.rank]])).sum().backward()
    local = model.module.weight.grad.tolist()
    model(torch.tensor([[1.0, 0.0]])).sum().backward()
    return local, model.module.weight.grad.tolist()


def test_a_hook_is_not_called_under_no_sync():
    results = run_ranks(2, under_no_sync)
    assert [local for local, _ in results] == [[[1.0, 0.0]], [[1.0, 1.0]]]
    assert [grad for _, grad in results] == [[[2.0, 0.5]]] * 2


def alone(world):
    def hook(_, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    return gradient_with(world, lambda model: model.register_comm_hook(None, hook))


def test_a_hook_is_called_in_a_world_of_one_too():
    assert run_ranks(1, alone) == [[[3.0, 6.0]]]


def hooked_on_one_rank(world):
    model = DistributedDataParallel(linear())
    if world.is_main:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model(torch.ones(1, 2)).sum().backward()


def test_a_hook_on_one_rank_alone_is_an_error_on_every_rank():
    assert expect_errors(2, hooked_on_one_rank) == [
        f"ReplicaMismatchError: some ranks have a communication hook, and others none: rank {rank} has {mine}. Call "
        "register_comm_hook alike on every rank, and start anew: gradients are under way that will not arrive."
        for rank, mine in enumerate(["fp16_compress_hook", "none"])
    ]


def hooked_otherwise(world):
    def first(_, bucket):
        return default_hooks.allreduce_hook(None, bucket)

    def second(_, bucket):
        return default_hooks.allreduce_hook(None, bucket)

    model = DistributedDataParallel(linear())
    model.register_comm_hook(None, [first, second][world.rank])
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_hook_on_one_rank_is_an_error_on_every_rank(backend):
    expected = (
        "ReplicaMismatchError: the ranks' communication hooks differ: rank 0 has hooked_otherwise.<locals>.first and "
        "rank 1 has hooked_otherwise.<locals>.second. Call register_comm_hook alike on every rank."
    )
    assert expect_errors(2, hooked_otherwise, backend=backend) == [expected] * 2


def fused(world):
    from torch.optim import SGD

    model = DistributedDataParallel(linear())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its own functional optimizers deprecated
        model._register_fused_optim(SGD, 0.5)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([[1.0, 2.0]]) * (world.rank + 1)).sum().backward()
    return model.module.weight.tolist()


def test_a_fused_optimizer_steps_within_backward():
    # The average gradient is (1.5, 3); two steps of 0.5.
    assert run_ranks(2, fused) == [[[-1.5, -3.0]]] * 2


def refused(world, kind):
    def wrong_annotation(state, bucket: int): ...

    def wrong_return(state, bucket) -> int: ...

    def no_future(state, bucket):
        return bucket.buffer()

    def wrong_size(state, bucket):
        future = torch.futures.Future()
        future.set_result(torch.zeros(7))
        return future

    def no_tensor(state, bucket):
        future = torch.futures.Future()
        future.set_result(None)
        return future

    hooks = {
        "not callable": {},
        "annotation": wrong_annotation,
        "return": wrong_return,
        "parameters": lambda: None,
        "no future": no_future,
        "size": wrong_size,
        "no tensor": no_tensor,
    }
    if kind == "twice":

        def twice(model):
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            model.register_comm_hook(None, default_hooks.allreduce_hook)

        return gradient_with(world, twice)
    return gradient_with(world, lambda model: model.register_comm_hook(None, hooks[kind]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not callable", "TypeError: Communication hook must be callable."),
        ("annotation", "ValueError: Communication hook: bucket annotation should be dist.GradBucket."),
        ("return", "return annotation should be torch.futures.Future[torch.Tensor]."),
        ("parameters", "expected two parameters, (state, bucket)."),
        ("no future", "expected a torch.futures.Future of the averaged tensor, but it returned Tensor."),
        ("size", "gave one of shape (7,) for bucket 0; expected a tensor of 2 elements, as bucket.buffer() is."),
        ("no tensor", "gave NoneType for bucket 0; expected a tensor of 2 elements, as bucket.buffer() is."),
        ("twice", "RuntimeError: register_comm_hook or register_builtin_comm_hook can only be called once."),
    ],
)
def test_what_cannot_be_a_hook_is_an_error(kind, message):
    for error in expect_errors(2, refused, kind):
        assert message in error
