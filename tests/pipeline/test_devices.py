"""Stages on devices of one process compute what the undivided model computes."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.errors import DataError, PipelineError, PlanError
from support.gpt import Gpt

CPUS = ["cpu", "cpu"]


def mlp(num_layers=4, width=6):
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def data(num_samples=10, width=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, width, generator=generator), torch.randint(3, (num_samples,), generator=generator)


def grads_of(model):
    return {name: param.grad for name, param in model.named_parameters()}


def assert_same_grads(pipeline, model, tolerance=1e-6):
    theirs = grads_of(model)
    assert grads_of(pipeline).keys() == theirs.keys()
    for name, grad in grads_of(pipeline).items():
        if theirs[name] is None:
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, theirs[name], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("num_samples", [12, 10, 3, 1])
def test_loss_and_gradients_are_those_of_the_undivided_model(schedule, num_samples):
    model, (x, y) = mlp(), data(num_samples)
    pipeline = paceline.Pipeline(
        copy.deepcopy(model), CPUS, microbatches=4, schedule=schedule, loss=nn.CrossEntropyLoss()
    )
    expected = functional.cross_entropy(model(x), y)
    expected.backward()
    loss = pipeline.forward_backward(x, target=y)
    torch.testing.assert_close(loss, expected.detach())
    assert not loss.requires_grad
    assert_same_grads(pipeline, model)


def test_training_is_that_of_the_undivided_model_and_gradients_add_up():
    model, criterion = mlp(), nn.CrossEntropyLoss()
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=3, loss=criterion)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipeline, model))
    for step in range(4):
        x, y = data(7 + step)
        criterion(model(x), y).backward()
        pipeline.forward_backward(x, target=y)
        if step % 2:
            assert_same_grads(pipeline, model)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    for name, value in pipeline.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-6, rtol=1e-6)


def test_tokens_that_are_padding_do_not_count():
    model, (x, y) = mlp(), data(9)
    y[:5] = -100  # all of the first microbatch, whose mean is 0 / 0
    criterion = nn.CrossEntropyLoss()
    expected = criterion(model(x), y)
    expected.backward()
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=3, loss=criterion)
    torch.testing.assert_close(pipeline.forward_backward(x, target=y), expected.detach())
    assert_same_grads(pipeline, model)


def test_a_sum_is_the_sum_of_the_microbatches_and_a_scale_is_of_the_gradients_only():
    model, (x, y) = mlp(), data(7)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    (criterion(model(x), y) * 0.5).backward()
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=3, loss=criterion)
    loss = pipeline.forward_backward(x, target=y, scale=0.5)
    torch.testing.assert_close(loss, criterion(model(x), y).detach())
    assert_same_grads(pipeline, model)


def test_forward_is_differentiable_and_evaluates():
    model, (x, y) = mlp(), data(7)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=3)
    functional.cross_entropy(pipeline(x), y).backward()
    functional.cross_entropy(model(x), y).backward()
    assert_same_grads(pipeline, model)
    pipeline.eval()
    with torch.no_grad():
        output = pipeline(x)
    torch.testing.assert_close(output, model(x).detach())
    assert not output.requires_grad


def gpt():
    torch.manual_seed(0)
    return Gpt()


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("num_stages", [2, 3, 6])
def test_a_model_with_a_list_of_blocks_is_cut_and_skip_connections_cross(num_stages):
    model, tokens = gpt().eval(), torch.randint(11, (5, 7))
    pipeline = paceline.Pipeline(copy.deepcopy(model), ["cpu"] * num_stages, microbatches=2, loss=token_loss)
    pipeline.eval()
    assert [len(units) for units in pipeline.units].count(0) == 0
    token_loss(model(tokens), tokens).backward()
    pipeline.forward_backward(tokens, target=tokens)
    assert_same_grads(pipeline, model)
    with torch.no_grad():
        torch.testing.assert_close(pipeline(tokens), model(tokens))


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Gpt()

    def forward(self, tokens):
        return self.body(tokens)


@pytest.mark.parametrize("kind", [Gpt, Outer])
def test_what_forward_does_in_training_only_is_done_in_training_only(kind):
    pipeline, tokens = paceline.Pipeline(kind(), CPUS, microbatches=1), torch.randint(11, (2, 7))
    assert all(part.training for part in pipeline.module.modules())
    with torch.no_grad():
        assert not torch.equal(pipeline(tokens), pipeline(tokens))  # dropout
        pipeline.eval()
        assert torch.equal(pipeline(tokens), pipeline(tokens))


def test_a_model_that_returns_its_loss_needs_none():
    model, tokens = gpt().eval(), torch.randint(11, (4, 7))
    model(tokens, tokens).backward()
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=2, example=(tokens, tokens))
    pipeline.eval()
    pipeline.forward_backward(tokens, tokens)
    assert_same_grads(pipeline, model)


def test_assertions_of_forward_are_kept():
    pipeline = paceline.Pipeline(gpt(), CPUS, microbatches=1)
    with pytest.raises(AssertionError, match=r"^stage 0, microbatch 0, forward: the assertion at .*gpt\.py:"):
        pipeline(torch.randint(11, (1, 17)))


def test_a_model_is_cut_at_names():
    pipeline = paceline.Pipeline(gpt(), ["cpu"] * 3, balance=["blocks.1", "norm"])
    assert pipeline.units == [["(before)"], ["blocks.1"], ["norm"]]
    rows = paceline.Pipeline(mlp(), CPUS, balance=["6"])
    assert rows.units == [["0", "1", "2", "3", "4", "5"], ["6", "7", "8"]]


class Skips(nn.Module):
    """Passes on a dict, whose parts later stages use."""

    def __init__(self, width, part):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.part = part

    def forward(self, given):
        if self.part == "down":
            return {"skip": given, "x": self.layer(given), "factor": 2.0}
        if self.part == "middle":
            return {**given, "x": self.layer(given["x"]).relu()}
        return self.layer(given["x"]) + given["factor"] * given["skip"]


def test_a_list_of_stages_passes_on_containers():
    torch.manual_seed(0)
    stages = [nn.Linear(6, 6), Skips(6, "down"), Skips(6, "middle"), Skips(6, "up")]
    model, (x, _) = nn.Sequential(*copy.deepcopy(stages)), data(7)
    model(x).square().mean().backward()
    pipeline = paceline.Pipeline(stages, ["cpu"] * 4, microbatches=3, loss=lambda output: output.square().mean())
    pipeline.forward_backward(x)
    assert_same_grads(pipeline, model)


def test_batch_norm_sees_microbatches_as_when_gradients_are_accumulated():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=2, loss=nn.CrossEntropyLoss())
    x, y = data(10)
    pipeline.forward_backward(x, target=y)
    for part, wanted in zip(x.split(5), y.split(5), strict=True):
        (functional.cross_entropy(model(part), wanted) / 2).backward()
    assert_same_grads(pipeline, model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(pipeline.state_dict()[name], value)
    pipeline.eval(), model.eval()
    with torch.no_grad():
        torch.testing.assert_close(pipeline(x), model(x))


def test_checkpoints_are_the_undivided_models():
    model, pipeline = mlp(), paceline.Pipeline(mlp(), CPUS)
    assert list(pipeline.state_dict()) == list(model.state_dict())
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in model.named_parameters()]
    nn.init.ones_(model[0].weight)
    pipeline.load_state_dict(model.state_dict())
    model.load_state_dict(pipeline.full_state_dict())
    assert torch.equal(pipeline.module[0].weight, torch.ones(6, 6))


def test_frozen_parameters_and_stages_keep_no_gradient():
    model, (x, y) = mlp(), data()
    for layer in model[:5]:
        layer.requires_grad_(False)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, loss=nn.CrossEntropyLoss())
    functional.cross_entropy(model(x), y).backward()
    pipeline.forward_backward(x, target=y)
    assert_same_grads(pipeline, model)


def test_the_norm_of_all_gradients_is_clipped():
    model, (x, y) = mlp(), data()
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, loss=nn.CrossEntropyLoss())
    functional.cross_entropy(model(x), y).backward()
    pipeline.forward_backward(x, target=y)
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(pipeline.clip_grad_norm_(0.1), expected)
    assert_same_grads(pipeline, model)


class Fails(nn.Module):
    def forward(self, x):
        if x.sum() > 100:
            raise KeyError("too much")
        return x


def test_a_failure_names_stage_and_microbatch_and_the_next_step_works():
    torch.manual_seed(0)
    model = [nn.Linear(6, 6), nn.Sequential(Fails(), nn.Linear(6, 3)), nn.Linear(3, 3)]
    pipeline = paceline.Pipeline(model, ["cpu"] * 3, microbatches=4, loss=nn.CrossEntropyLoss())
    x, y = data(8)
    nn.init.eye_(model[0].weight)
    bad = x.clone()
    bad[4] = 1000
    with pytest.raises(KeyError, match="stage 1, microbatch 2, forward: 'too much'") as caught:
        pipeline.forward_backward(bad, target=y)
    assert isinstance(caught.value.__cause__, KeyError)
    assert threading.active_count() == 1
    pipeline.zero_grad()
    whole = nn.Sequential(*copy.deepcopy(model))
    functional.cross_entropy(whole(x), y).backward()
    pipeline.forward_backward(x, target=y)
    assert_same_grads(pipeline, whole)


def test_the_last_step_is_measured_and_drawn():
    x, y = data(8)
    pipeline = paceline.Pipeline(mlp(), CPUS, microbatches=4, schedule="gpipe", loss=nn.CrossEntropyLoss())
    pipeline.forward_backward(x, target=y)
    assert 0 <= pipeline.measured_bubble() < 1
    assert pipeline.draw_last_step().count("<title>") == 16
    assert str(pipeline.schedule(2)).splitlines()[0] == "lane 0  F0 F1  .  . B0 B1"
    assert "stage 1:" in repr(pipeline)


def test_activations_are_those_of_the_microbatches_in_flight():
    """Each stage keeps of a microbatch its input and what tanh returned: 2 x 4 kB; weights and the batch apart."""
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100)) for _ in range(3)]
        pipeline = paceline.Pipeline(
            stages, ["cpu"] * 3, microbatches=6, schedule=schedule, loss=lambda output: output.sum()
        )
        with pipeline.measure_bytes() as peaks:
            pipeline.forward_backward(torch.randn(60, 100))
        kept[schedule] = peaks
    microbatch_bytes = 10 * 100 * 4
    batch_bytes = 6 * microbatch_bytes  # the inputs of the first stage are views of it
    assert kept["gpipe"] == {
        0: batch_bytes + 6 * microbatch_bytes,
        1: 6 * 2 * microbatch_bytes,
        2: 6 * 2 * microbatch_bytes,
    }
    assert kept["1f1b"] == {
        0: batch_bytes + 3 * microbatch_bytes,
        1: 2 * 2 * microbatch_bytes,
        2: 1 * 2 * microbatch_bytes,
    }


@pytest.mark.parametrize("balance", ["time", "memory"])
def test_measured_balance_leaves_the_model_as_it_is(balance):
    model, (x, _) = mlp(), data(4)
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pipeline = paceline.Pipeline(model, CPUS, balance=balance, example=x)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert sum(len(units) for units in pipeline.units) == 9
    for name, value in pipeline.state_dict().items():
        assert torch.equal(value, state[name])
    assert all(param.grad is None for param in pipeline.parameters())


def test_memory_is_balanced_by_what_is_kept():
    """In 1f1b the first of two stages keeps two microbatches, the second one, so the first gets fewer units."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(6)))
    pipeline = paceline.Pipeline(
        model, CPUS, microbatches=4, balance="memory", example=torch.randn(4, 1000, requires_grad=True)
    )
    assert [len(units) for units in pipeline.units] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"devices": CPUS, "ranks": [0, 1]}, PipelineError, "devices and ranks are both given"),
        ({"ranks": [0, 1]}, PipelineError, r"there is no process group\. Call paceline\.init\(\) first"),
        ({"devices": []}, PipelineError, r"there is no accelerator here, and no devices are given"),
        ({"devices": CPUS, "balance": "luck"}, PlanError, "balance='luck': expected 'parameters', 'time', 'memory'"),
        ({"devices": CPUS, "balance": "time"}, PlanError, "balance='time' needs an `example`"),
        ({"devices": CPUS, "balance": ["1", "2"]}, PlanError, "balance names 2 units, but 2 stages have 1 borders"),
        ({"devices": CPUS, "balance": ["99"]}, PlanError, "balance names '99', but the units are 0, 1, 2"),
        ({"devices": CPUS, "balance": ["0"]}, PlanError, "which are not in the order of the model, or begin it"),
        ({"devices": ["cpu"] * 10}, PlanError, "9 units cannot make 10 stages"),
        ({"devices": CPUS, "schedule": "dream"}, PlanError, "schedule='dream'"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        paceline.Pipeline(mlp(), **arguments)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        return self.blocks[0](x) if x.sum() > 0 else self.blocks[1](x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x):
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))


class Backwards(Twice):
    def forward(self, x):
        return self.blocks[0](self.blocks[1](x))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branches(), r"^Branches\.forward cannot be followed, so the model cannot be cut: .*Give a list of stages"),
        (Twice(), r"^'blocks\.0' is called 2 times in forward"),
        (Backwards(), r"^'blocks\.1' is called out of the order 'blocks\.0', 'blocks\.1'"),
        (Fails(), r"^Fails has no ModuleList or Sequential of blocks"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(model, message):
    with pytest.raises(PlanError, match=message):
        paceline.Pipeline(model, CPUS)


@pytest.fixture
def two_devices(monkeypatch):
    """torch tells ``cpu:0`` from ``cpu``, and copies between them, as between devices."""
    monkeypatch.setattr("paceline.pipeline.layout.as_device", torch.device)
    return ["cpu", "cpu:0"]


def test_tied_weights_on_two_devices_are_one_parameter(two_devices):
    model, tokens = gpt().eval(), torch.randint(11, (5, 7))
    pipeline = paceline.Pipeline(copy.deepcopy(model), two_devices, microbatches=2, loss=token_loss)
    pipeline.eval()
    assert len(list(pipeline.parameters())) == len(list(model.parameters()))
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipeline, model))
    for _ in range(3):
        token_loss(model(tokens), tokens).backward()
        pipeline.forward_backward(tokens, target=tokens)
        assert_same_grads(pipeline, model)
        ours.step(), theirs.step()
    pipeline.zero_grad(), model.zero_grad()
    token_loss(model(tokens), tokens).backward()
    token_loss(pipeline(tokens), tokens).backward()
    assert_same_grads(pipeline, model)


def test_a_module_on_two_devices_is_refused(two_devices):
    shared = nn.Linear(6, 6)
    message = r"^'0', a Linear, is in stage 0 on cpu and in stage 1 on cpu:0\. Give each stage a module of its own"
    with pytest.raises(PipelineError, match=message):
        paceline.Pipeline(nn.Sequential(shared, shared), two_devices)


def test_a_module_in_two_stages_of_one_device_is_as_in_the_undivided_model():
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    model, (x, _) = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh()), data(5)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, balance=["2"], loss=lambda output: output.square().mean())
    model(x).square().mean().backward()
    pipeline.forward_backward(x)
    assert pipeline.units == [["0", "1"], ["2", "3"]]
    assert_same_grads(pipeline, model)


def test_autocast_holds_in_all_lanes():
    model, (x, y) = mlp(), data()
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=1, loss=nn.CrossEntropyLoss())
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.cross_entropy(model(x), y)
        loss = pipeline.forward_backward(x, target=y)
    assert loss == expected
    assert torch.equal(pipeline(x), model(x))


def test_inputs_get_their_gradients():
    model, (x, y) = mlp(), data()
    own, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    paceline.Pipeline(copy.deepcopy(model), CPUS, loss=nn.CrossEntropyLoss()).forward_backward(own, target=y)
    functional.cross_entropy(model(theirs), y).backward()
    torch.testing.assert_close(own.grad, theirs.grad, atol=1e-6, rtol=1e-6)


def test_what_cannot_be_run_is_refused():
    x, y = data()
    pipeline = paceline.Pipeline(mlp(), CPUS, loss=nn.CrossEntropyLoss())
    with pytest.raises(PipelineError, match=r"^forward_backward computes gradients, which no_grad"), torch.no_grad():
        pipeline.forward_backward(x, target=y)
    with pytest.raises(DataError, match=r"^target has size 9 along dimension 0, but the inputs have 10"):
        pipeline.forward_backward(x, target=y[:9])
    with pytest.raises(DataError, match=r"^inputs: expected at least one tensor that holds a batch"):
        pipeline.forward_backward(target=y)
    with pytest.raises(DataError, match=r"inputs\[0\]\[0\] has 10 and inputs\[1\]\['mask'\] has 5"):
        pipeline.forward_backward(x, mask=x[:5], target=y)
    columns = paceline.Pipeline(mlp(), CPUS, dim=2)
    with pytest.raises(DataError, match=r"inputs\[0\]\[0\] has shape \(10, 6\), but the batch is dimension 2"):
        columns(x)
    with pytest.raises(PipelineError, match=r"^assign=True would replace parameters that stages hold"):
        pipeline.load_state_dict(pipeline.state_dict(), assign=True)
    whole = paceline.Pipeline(mlp(), CPUS)
    with pytest.raises(PipelineError, match=r"expected the loss to be a floating-point scalar, got shape \(2, 3\)"):
        whole.forward_backward(x)
    frozen = paceline.Pipeline(mlp().requires_grad_(False), CPUS, loss=nn.CrossEntropyLoss())
    with pytest.raises(PipelineError, match="the loss depends on no parameter that is trained"):
        frozen.forward_backward(x, target=y)
