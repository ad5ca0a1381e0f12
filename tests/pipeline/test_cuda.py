"""Pipelines on GPUs: on one GPU twice, and on several."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from support.gpt import Gpt

pytestmark = pytest.mark.cuda


def places():
    """One GPU twice, and two GPUs where there are."""
    return [["cuda:0", "cuda:0"]] + ([["cuda:0", "cuda:1"]] if torch.cuda.device_count() > 1 else [])


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_steps_on_a_side_stream_equal_the_bare_modules(schedule):
    for devices in places():
        torch.manual_seed(0)
        bare = Gpt().eval().double().cuda()
        model = paceline.Pipeline(copy.deepcopy(bare), devices, microbatches=3, schedule=schedule, loss=token_loss)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (bare, model)]
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                tokens = torch.randint(11, (7, 9))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                expected = token_loss(bare(tokens.cuda()), tokens.cuda())
                expected.backward()
                loss = model.forward_backward(tokens, target=tokens)
                assert loss.device == torch.device(devices[-1])
                torch.testing.assert_close(loss.cpu(), expected.detach().cpu())
                for optimizer in optimizers:
                    optimizer.step()
        torch.cuda.synchronize()
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.cpu())
        output = model(tokens)
        assert output.device == torch.device(devices[-1])
        torch.testing.assert_close(output.cpu(), bare(tokens.cuda()).cpu())


def test_autocast_holds_in_all_lanes():
    for devices in places():
        stages = [nn.Linear(4, 4), nn.Linear(4, 4)]
        model = paceline.Pipeline(stages, devices, microbatches=2, loss=lambda output: output.square().mean())
        with torch.autocast("cuda", torch.bfloat16):
            assert model(torch.randn(4, 4)).dtype == torch.bfloat16
            model.forward_backward(torch.randn(4, 4))
        assert all(param.grad.dtype == torch.float32 for param in model.parameters())
