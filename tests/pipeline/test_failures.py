"""A rank that fails, is missing, or does something else: the others learn which, and why, and nobody waits for it."""

import copy
import math
import os
import pickle

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import PeerError, PipelineError
from support.ranks import RankError, expect_errors, run_ranks


def mean_square(output):
    return output.square().mean()


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError("too much")


class Dies(nn.Module):
    def forward(self, x):
        os._exit(3)


def pipeline_of(*layers, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) if layer is None else layer for layer in layers))
    return paceline.Pipeline(model, **{"microbatches": 2, "loss": mean_square} | arguments)


def fail_in(world, lane, evaluates):
    """Fail, and do not leave before all others have heard of it."""
    layers = [None] * world.world_size
    layers[lane] = Fails()
    pipeline = pipeline_of(*layers, balance=[str(number) for number in range(1, world.world_size)])
    try:
        if evaluates:
            pipeline.eval()(torch.randn(4, 4))
        else:
            pipeline.forward_backward(torch.randn(4, 4))
    except (KeyError, PeerError) as error:
        world.barrier()
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("world_size", "lane", "evaluates", "backend"),
    [(2, 0, False, "shm"), (2, 1, False, "gloo"), (2, 1, True, "shm"), (3, 1, False, "shm")],
)
def test_all_others_hear_at_once_who_has_failed_where_and_why(world_size, lane, evaluates, backend):
    said = run_ranks(world_size, fail_in, lane, evaluates, backend=backend)
    failure = f"KeyError: \"stage {lane}, microbatch 0, forward: 'too much'\""
    for rank, words in enumerate(said):
        assert words == (failure if rank == lane else f"PeerError: rank {rank}: rank {lane} has failed: {failure}")


def die(world):
    pipeline_of(None, Dies(), balance=["1"]).forward_backward(torch.randn(4, 4))


def test_over_gloo_too_it_is_named_who_is_missing():
    with pytest.raises(RankError) as caught:
        run_ranks(2, die, backend="gloo")
    assert "PeerError: rank 0: rank 1, which runs lane 1 of the pipeline, cannot be reached. rank 1 (pid" in str(
        caught.value
    )


def draw(world):
    world.seed(0)
    pipeline = pipeline_of(None, None)
    return torch.rand(1).item(), [param.sum().item() for param in pipeline.parameters()]


def test_stages_on_different_ranks_drop_independently():
    first, second = run_ranks(2, draw)
    assert first[0] != second[0]
    assert run_ranks(2, draw) == [first, second]


class Overflows(nn.Module):
    """The gradient of what comes before is infinite; its own is not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda grad: grad * math.inf)
        return x * self.weight


def overflow_in_the_first(world):
    pipeline = pipeline_of(None, Overflows(), balance=["1"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    before = [param.clone() for param in pipeline.parameters()]
    pipeline.forward_backward(torch.randn(4, 4), scale=scaler.scale(torch.ones(())))
    scaler.step(optimizer)
    scaler.update()
    is_skipped = all(torch.equal(now, then) for now, then in zip(pipeline.parameters(), before, strict=True))
    return scaler.get_scale(), is_skipped


def test_what_overflows_on_one_rank_is_skipped_on_all():
    assert run_ranks(2, overflow_in_the_first) == [(2.0, True), (2.0, True)]


class Blocks(nn.Module):
    def __init__(self, kind=nn.ReLU):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), kind()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def cut_at_different_names(world):
    paceline.Pipeline(Blocks(), loss=mean_square, balance=[f"blocks.{world.rank + 1}"])


def build_of_different_layers(world):
    paceline.Pipeline(Blocks(nn.ReLU if world.rank == 0 else nn.GELU), loss=mean_square)


def evaluate_on_one(world):
    pipeline = pipeline_of(None, None)
    if world.rank == 0:
        pipeline(torch.randn(4, 4)) if pipeline.eval() else None
    else:
        pipeline.forward_backward(None)


def load_other_samples(world):
    """As a sampler over all ranks would deal them."""
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipeline = pipeline_of(None, None, loss=nn.MSELoss())
    pipeline.forward_backward(x, target=y)
    pipeline.forward_backward(x[world.rank :: 2] if world.rank == 0 else None, target=y[:4])
    pipeline.forward_backward(x[world.rank :: 2], target=y[world.rank :: 2])


class Returns(nn.Module):
    def forward(self, x):
        return x.square().mean()


def count_what_is_not_there(world):
    """A model that returns its loss, a mean over what is in its inputs."""
    pipeline = pipeline_of(None, Returns(), loss=None, count=lambda x: (x > 0).sum())
    pipeline.forward_backward(torch.ones(4, 4))
    pipeline.forward_backward(torch.ones(4, 4) if world.rank == 0 else None)


def give_no_inputs(world):
    pipeline_of(None, None).forward_backward(None)


def copy_it(world):
    pipeline = pipeline_of(None, None)
    with pytest.raises(PipelineError, match="can be neither copied nor pickled"):
        pickle.dumps(pipeline._runner)
    copy.deepcopy(pipeline)


@pytest.mark.parametrize(
    ("fn", "first", "second"),
    [
        (
            cut_at_different_names,
            *["PipelineError: rank 1 has ['(before)', 'blocks.2'] for what is never cut, but rank 0 has ['(bef"] * 2,
        ),
        (
            build_of_different_layers,
            *["PipelineError: rank 1 has GELU for the type of 'blocks.0.1', but rank 0 has ReLU. Build the same"] * 2,
        ),
        (
            evaluate_on_one,
            "PeerError: rank 0: rank 1 has failed: PipelineError: lane 1 has called model.forward_backward(...), but",
            "PipelineError: lane 1 has called model.forward_backward(...), but lane 0 model(...). All ranks must call",
        ),
        (
            load_other_samples,
            "PeerError: rank 0: rank 1 has failed: PipelineError: rank 1, which runs the last stage, has been given",
            "PipelineError: rank 1, which runs the last stage, has been given other inputs than the rank that runs the",
        ),
        (
            count_what_is_not_there,
            "PeerError: rank 0: rank 1 has failed: DataError: `count` takes what the model is called with",
            "DataError: `count` takes what the model is called with, which the last stage's rank has not been given.",
        ),
        (
            give_no_inputs,
            "DataError: rank 0, which runs the first stage: inputs: expected at least one tensor that holds a batch",
            "PeerError: rank 1: rank 0 has failed: DataError: rank 0, which runs the first stage: inputs: expected at",
        ),
        (
            copy_it,
            "PipelineError: rank 0: a pipeline over ranks holds process groups, so it can be neither copied nor",
            "PipelineError: rank 1: a pipeline over ranks holds process groups, so it can be neither copied nor",
        ),
    ],
    ids=lambda item: item.__name__ if callable(item) else "",
)
def test_ranks_that_differ_are_told_so(fn, first, second):
    said = expect_errors(2, fn)
    assert said[0].startswith(first)
    assert said[1].startswith(second)
