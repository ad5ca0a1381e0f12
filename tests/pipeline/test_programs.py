"""Models as people write them: cut, they compute what they compute whole, or are refused."""

import copy
import gc
import io
import os
import random
import signal
import threading

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.errors import DataError, PipelineError, PlanError
from support.gpt import Gpt

CPUS = ["cpu", "cpu"]


def mean_square(output):
    return output.square().mean()


def assert_same_grads(pipeline, model, tolerance=1e-6):
    theirs = dict(model.named_parameters())
    assert [name for name, _ in pipeline.named_parameters()] == list(theirs)
    for name, param in pipeline.named_parameters():
        if theirs[name].grad is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad, theirs[name].grad, atol=tolerance, rtol=tolerance)


def assert_trains_as_one(model, *inputs, **arguments):
    """Loss and gradients of one step are those of the undivided model."""
    whole = nn.Sequential(*copy.deepcopy(model)) if isinstance(model, list) else copy.deepcopy(model)
    lanes = arguments.pop("devices", CPUS)
    pipeline = paceline.Pipeline(model, lanes, **{"microbatches": 3, "loss": mean_square} | arguments)
    expected = mean_square(whole(*inputs))
    expected.backward()
    torch.testing.assert_close(pipeline.forward_backward(*inputs), expected.detach())
    assert_same_grads(pipeline, whole)


def linears(count=3, width=4):
    torch.manual_seed(0)
    return [nn.Linear(width, width) for _ in range(count)]


class Doubles(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x) + x


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3 if depth == 0 else 4, 4, 3, padding=1) for depth in range(3)])
        self.up = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1) for _ in range(3)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = layer(x).relu_()
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        for layer in self.up:
            x = functional.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, skips.pop()], 1)).relu()
        return self.head(x)


class Attends(nn.Module):
    """A transformer with tied embeddings, whose forward branches on what it is called with."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, mask=None, factor=1.0, sizes=(1, 2), doubles=False):
        x = self.tokens(tokens) * factor
        if doubles:
            x = x * sizes[1]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if mask is None else mask.bool())
        return self.head(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(lambda given: self.layer(given).tanh(), x, use_reentrant=self.reentrant)


class Twice(nn.Module):
    """Passes one tensor on in two places."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        return {"x": hidden, "skip": hidden}


class WritesInto(nn.Module):
    def forward(self, given):
        given["x"].mul_(2)
        return given["x"] + given["skip"]


class Halves(nn.Module):
    """Passes on halves, whole numbers, truth values, complex ones, nothing and an empty tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.layer(x)
        half = hidden.bfloat16()
        return half, [hidden.argmax(1), hidden > 0], hidden.to(torch.complex64), None, torch.empty(0), x.shape[0]


class TakesHalves(nn.Module):
    def forward(self, given):
        half, (best, positive), wide, nothing, empty, count = given
        assert nothing is None
        assert len(empty) == 0
        return half.float() * positive + wide.real * best[:, None] * min(count, 1)


def test_a_sequential_with_a_forward_of_its_own_is_followed():
    assert_trains_as_one(Doubles(*linears()), torch.randn(7, 4))


@pytest.mark.parametrize(("schedule", "num_lanes"), [("1f1b", 2), ("gpipe", 3), ("interleaved", 2)])
def test_skip_connections_of_a_unet_cross_stages(schedule, num_lanes):
    torch.manual_seed(0)
    assert_trains_as_one(Unet(), torch.randn(4, 3, 16, 16), schedule=schedule, devices=["cpu"] * num_lanes)


def test_a_unet_is_cut_in_its_descent_too():
    torch.manual_seed(0)
    names = ["down.1", "down.2", "up.1"]
    assert_trains_as_one(Unet(), torch.randn(2, 3, 16, 16), devices=["cpu"] * 4, balance=names)


def test_arguments_are_those_of_the_example():
    torch.manual_seed(0)
    tokens, mask = torch.randint(20, (5, 6)), torch.arange(6).expand(5, 6) > 4
    for inputs in ((tokens,), (tokens, None, 2.0), (tokens, mask, 2.0), (tokens, mask, 0.5, (1, 2), True)):
        assert_trains_as_one(Attends(), *inputs, example=inputs)


@pytest.mark.parametrize(
    ("example", "given", "message"),
    [
        (
            None,
            {"mask": torch.zeros(2, 6)},
            r"^Attends\.forward is called with mask=Tensor, but was followed with mask=",
        ),
        (
            None,
            {"factor": 2.0},
            r"is called with factor=2\.0, but was followed with factor=1\.0 when the model was cut",
        ),
        ({"doubles": True}, {"doubles": False}, r"with doubles=False, but was followed with doubles=True .* `example`"),
        ({"mask": None}, {"mask": torch.zeros(2, 6)}, r"with mask=Tensor, but was followed with mask=None"),
    ],
)
def test_arguments_on_which_forward_may_branch_must_be_the_examples(example, given, message):
    tokens = torch.randint(20, (2, 6))
    example = None if example is None else {"tokens": tokens, **example}
    pipeline = paceline.Pipeline(Attends(), CPUS, loss=mean_square, example=example)
    with pytest.raises(DataError, match=message):
        pipeline.forward_backward(tokens, **given)


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(
        PlanError, match=r"^example does not fit Attends\.forward: missing a required argument: 'tokens'"
    ):
        paceline.Pipeline(Attends(), CPUS, example={"words": 1})


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_are_checkpointed_within_stages(reentrant):
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(reentrant), Checkpointed(reentrant), nn.Linear(4, 4))
    assert_trains_as_one(model, torch.randn(7, 4))


def test_a_tensor_passed_on_twice_is_one_tensor():
    torch.manual_seed(0)
    assert_trains_as_one([Twice(), WritesInto()], torch.randn(7, 4))


def test_what_wants_no_gradient_is_passed_on_as_it_is():
    torch.manual_seed(0)
    assert_trains_as_one([Halves(), TakesHalves()], torch.randn(6, 4))


def test_stages_that_return_their_input_and_hooks_of_layers_are_as_ever():
    model = [nn.Identity(), *linears(2), nn.Identity()]
    model[2].register_full_backward_hook(lambda _layer, grads, _of_outputs: (3 * grads[0],))
    assert_trains_as_one(model, torch.randn(5, 4), devices=["cpu"] * 4)


def test_hooks_of_the_whole_are_refused():
    model = nn.Sequential(*linears())
    model.register_forward_hook(lambda _model, _inputs, output: 2 * output)
    with pytest.raises(PlanError, match=r"^Sequential has hooks of its own, which no stage would call\. Register them"):
        paceline.Pipeline(model, CPUS)


def test_a_replaced_forward_is_kept_or_refused():
    model, x = nn.Sequential(nn.Sequential(*linears()), *linears(1)), torch.randn(4, 4)
    inner = model[0]
    inner.forward = lambda given: 2 * nn.Sequential.forward(inner, given)
    torch.testing.assert_close(paceline.Pipeline(model, CPUS, loss=mean_square)(x), model(x))
    pipeline = paceline.Pipeline(nn.Sequential(*linears()), CPUS, loss=mean_square)
    for each in (model, pipeline):
        each.forward = each.forward
    with pytest.raises(
        PlanError, match=r"^the forward of this Sequential has been replaced, as amp\.initialize and torch"
    ):
        paceline.Pipeline(model, CPUS)
    with pytest.raises(PipelineError, match=r"^the pipeline's forward has been replaced, as amp\.initialize does, but"):
        pipeline.forward_backward(x)


class Hides(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x)


class Box:
    def __init__(self, content):
        self.content = content


@pytest.mark.parametrize("wrap", [Box, lambda x: {x}, lambda x: (x, [Box({"a": x})])], ids=["object", "set", "deep"])
def test_a_graph_within_an_object_is_refused(wrap):
    stages = [nn.Sequential(nn.Linear(4, 4), Hides(wrap)), nn.Identity()]
    pipeline = paceline.Pipeline(stages, CPUS, loss=mean_square)
    with pytest.raises(
        PipelineError, match=r"^stage 0, microbatch 0, forward: a stage passes on an object that holds a"
    ):
        pipeline.forward_backward(torch.randn(4, 4))


def test_a_model_in_evaluation_stays_in_evaluation():
    model, tokens = Gpt().eval(), torch.randint(11, (4, 7))
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=2)
    assert not pipeline.training
    with torch.no_grad():
        torch.testing.assert_close(pipeline(tokens), model(tokens))
    assert not paceline.Pipeline([layer.eval() for layer in linears(2)], CPUS).training


def test_the_output_of_a_model_that_returns_its_loss_is_its_loss():
    model, tokens = Gpt().eval(), torch.randint(11, (5, 7))
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=2, example=(tokens, tokens))
    loss = pipeline(tokens, tokens)
    torch.testing.assert_close(loss, model(tokens, tokens))
    loss.backward()
    model(tokens, tokens).backward()
    assert_same_grads(pipeline, model)


def masked_mean(output, target):
    labels, mask = target
    losses = functional.cross_entropy(output, labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def test_a_microbatch_of_padding_alone_counts_for_nothing():
    """Its loss is 0 / 0, and so would its gradient be."""
    model, x, labels, mask = nn.Sequential(*linears()), torch.randn(9, 4), torch.randint(4, (9,)), torch.ones(9)
    mask[:3] = 0
    pipeline = paceline.Pipeline(
        copy.deepcopy(model), CPUS, microbatches=3, loss=masked_mean, count=lambda target: target[1].sum()
    )
    expected = masked_mean(model(x), (labels, mask))
    expected.backward()
    torch.testing.assert_close(pipeline.forward_backward(x, target=(labels, mask)), expected.detach())
    assert_same_grads(pipeline, model)


class Offset(nn.Module):
    """Reads a buffer and a parameter of its own in the first stage and in the last."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.arange(4.0))
        self.factor = nn.Parameter(torch.ones(4))
        self.blocks = nn.ModuleList(linears(2))

    def forward(self, x):
        x = x * self.factor + self.offset
        for block in self.blocks:
            x = block(x)
        return x * self.factor + self.offset


def test_what_is_replaced_in_the_model_is_replaced_in_its_stages():
    model, x = Offset(), torch.randn(4, 4, dtype=torch.float64)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=2, loss=mean_square).double()
    model.double()
    for each in (pipeline, model):
        each.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    for module in (pipeline.module, model):
        module.factor = nn.Parameter(torch.full((4,), 3.0, dtype=torch.float64))
    mean_square(model(x)).backward()
    pipeline.forward_backward(x)
    assert_same_grads(pipeline, model)
    torch.testing.assert_close(pipeline(x), model(x))


class Task(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def test_as_part_of_another_module_it_is_saved_and_loaded_under_the_undivided_names():
    task, plain = Task(paceline.Pipeline(nn.Sequential(*linears()), CPUS)), Task(nn.Sequential(*linears()))
    assert list(task.state_dict()) == list(plain.state_dict())
    task.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    torch.testing.assert_close(task.net.module[2].weight, plain.net[2].weight + 1)
    with pytest.raises(PipelineError, match=r"^assign=True would replace parameters that stages hold"):
        task.load_state_dict(plain.state_dict(), assign=True)


@pytest.mark.parametrize("kind", ["pickle", "deepcopy"])
def test_a_copy_trains_its_own_parameters(kind):
    pipeline = paceline.Pipeline(Gpt().eval(), CPUS, microbatches=2, loss=nn.MSELoss())
    if kind == "deepcopy":
        twin = copy.deepcopy(pipeline)
    else:
        file = io.BytesIO()
        torch.save(pipeline, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    tokens, target = torch.randint(11, (4, 7)), torch.zeros(4, 7, 11)
    first = twin.forward_backward(tokens, target=target)
    assert all(param.grad is None for param in pipeline.parameters())
    with torch.no_grad():
        for param in twin.parameters():
            param -= 0.1 * param.grad
    assert twin.forward_backward(tokens, target=target) < first == pipeline.forward_backward(tokens, target=target)


def test_autocast_is_that_of_accumulated_microbatches():
    model, x = nn.Sequential(*linears()), torch.randn(8, 4)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=4, loss=mean_square)
    with torch.autocast("cpu", torch.bfloat16):
        (sum(mean_square(model(part)) for part in x.chunk(4)) / 4).backward()
        pipeline.forward_backward(x)
    assert_same_grads(pipeline, model, tolerance=1e-3)


def test_torch_compile_passes_over_it():
    model, x = nn.Sequential(*linears()), torch.randn(8, 4)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, loss=mean_square)
    compiled = torch.compile(pipeline, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    compiled.forward_backward(x)
    mean_square(model(x)).backward()
    assert_same_grads(pipeline, model)


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(linears(2))

    def forward(self, x, scale):
        for block in self.blocks:
            x = block(x) * scale
        return x


def test_an_argument_that_might_be_the_models_or_the_steps_is_refused():
    assert_trains_as_one(Scales(), torch.randn(4, 4), 2.0)
    pipeline = paceline.Pipeline(Scales(), CPUS, loss=mean_square)
    with pytest.raises(
        PipelineError, match=r"^the model's forward has an argument `scale`, and so has forward_backward"
    ):
        pipeline.forward_backward(torch.randn(4, 4), scale=2.0)


def test_what_has_not_run_has_no_times():
    pipeline = paceline.Pipeline(nn.Sequential(*linears()), CPUS, microbatches=2, loss=mean_square)
    with pytest.raises(PipelineError, match=r"^no step has been run yet, so none has been measured\.$"):
        pipeline.measured_bubble()
    pipeline.forward_backward(torch.randn(4, 4))
    times = pipeline.last_step()
    assert sorted(str(item.action) for item in times if item.lane == 1) == ["1B0", "1B1", "1F0", "1F1"]
    assert all(item.begin < item.end for item in times)


def test_an_empty_batch_is_that_of_the_undivided_model():
    pipeline = paceline.Pipeline(nn.Sequential(*linears()), CPUS, loss=lambda output: output.sum())
    assert pipeline.forward_backward(torch.randn(0, 4)) == 0
    assert pipeline.module[0].weight.grad.count_nonzero() == 0
    assert pipeline(torch.randn(0, 4)).shape == (0, 4)


class Does(nn.Module):
    """Does something with each block's output, outside of the blocks."""

    def __init__(self, does):
        super().__init__()
        self.blocks = nn.ModuleList(linears(2))
        self.does = does
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = self.does(self, block, x)
        return x


def adds_noise(_model, block, x):
    return block(x) + torch.randn(4)


def drops_layers(_model, block, x):
    return x if random.random() < 0.5 else block(x)


def jitters(_model, block, x):
    return block(x) * numpy.random.rand()


def freezes(_model, block, x):
    with torch.no_grad():
        return block(x)


def casts(_model, block, x):
    with torch.autocast("cpu", torch.bfloat16):
        return block(x)


def checkpoints(_model, block, x):
    return checkpoint(block, x, use_reentrant=False)


def counts(model, block, x):
    model.num_calls = getattr(model, "num_calls", 0) + 1
    return block(x)


def remembers(model, block, x):
    model.seen.append(x)
    return block(x)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (adds_noise, "it draws random numbers that depend on no argument"),
        (drops_layers, "it draws random numbers that depend on no argument"),
        (jitters, "it draws random numbers that depend on no argument"),
        (freezes, "it computes under no_grad, another autocast, or checkpoint"),
        (casts, "it computes under no_grad, another autocast, or checkpoint"),
        (checkpoints, "it computes under no_grad, another autocast, or checkpoint"),
        (counts, r"it sets self\.num_calls"),
        (remembers, r"it sets self\.seen"),
    ],
    ids=lambda item: item.__name__ if callable(item) else "",
)
def test_what_stages_would_not_repeat_is_refused_and_undone(does, message):
    model = Does(does)
    with pytest.raises(
        PlanError, match=rf"^Does\.forward cannot be followed, .*: {message}\. Have a block do so\. Give"
    ):
        paceline.Pipeline(model, CPUS)
    assert model.seen == []
    assert not hasattr(model, "num_calls")


class Tempered(Offset):
    """Computes with a buffer alone, writes into another, and uses a constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        factor = self.offset.sqrt()
        self.count.add_(1)
        return super().forward(x) * factor + torch.ones(4)


def test_what_is_computed_of_buffers_is_computed_in_each_step():
    model, x = Tempered(), torch.randn(2, 4)
    pipeline = paceline.Pipeline(copy.deepcopy(model), CPUS, microbatches=1)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    for each in (model, pipeline):
        each.load_state_dict(state)
    for _ in range(2):
        torch.testing.assert_close(pipeline(x), model(x))
    assert pipeline.module.count == model.count == 3


class Interrupts(nn.Module):
    """Once."""

    def forward(self, x):
        if not hasattr(self, "is_done"):
            self.is_done = True
            os.kill(os.getpid(), signal.SIGINT)
        return x


def test_after_ctrl_c_no_thread_is_left_and_the_next_step_works():
    model = nn.Sequential(*linears(2), Interrupts())
    pipeline = paceline.Pipeline(model, CPUS, balance=["1"], loss=mean_square)
    with pytest.raises(KeyboardInterrupt):
        pipeline.forward_backward(torch.randn(8, 4))
    assert threading.active_count() == 1
    pipeline.zero_grad()
    x = torch.randn(8, 4)
    pipeline.forward_backward(x)
    whole = nn.Sequential(*copy.deepcopy(list(model)[:2]))
    whole.zero_grad()
    mean_square(whole(x)).backward()
    assert_same_grads(pipeline, whole)


def test_where_no_thread_can_be_started_those_that_were_do_not_wait_for_it(monkeypatch):
    start = threading.Thread.start

    def start_first(thread):
        if "replica 1" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_first)
    pipeline = paceline.Pipeline(nn.Sequential(*linears()), CPUS, loss=mean_square)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pipeline.forward_backward(torch.randn(4, 4))
    assert threading.active_count() == 1


def test_steps_leave_nothing_behind():
    """Without the garbage collector: no thread, no cycle, no tensor."""
    pipeline = paceline.Pipeline(nn.Sequential(*linears()), CPUS, microbatches=4, loss=mean_square)
    counts = []
    gc.disable()
    try:
        for _ in range(3):
            for _ in range(20):
                pipeline.forward_backward(torch.randn(8, 4))
            counts.append(sum(type(item) is torch.Tensor for item in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[1] == counts[2]
    assert threading.active_count() == 1
