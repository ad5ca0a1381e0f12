"""Stages on ranks compute what the undivided model computes in one process."""

import copy
import tempfile

import pytest
import torch
import torch._dynamo  # the first optimizer imports it: once here, rather than in each rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import paceline
from paceline.errors import PipelineError
from paceline.pipeline.layout import make_layout
from support.gpt import Gpt
from support.ranks import expect_errors, run_ranks

PADDING = -100


def token_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def num_tokens(targets):
    return (targets != PADDING).sum()


def gpt():
    torch.manual_seed(0)
    return Gpt().eval()  # without dropout, whose draws differ


def tokens(num_samples, seed=0):
    """Inputs, and targets of which some are padding."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(11, (num_samples, 7), generator=generator)
    return inputs, torch.where(torch.rand(inputs.shape, generator=generator) < 0.3, PADDING, inputs)


def assert_same_grads(pipeline, model):
    theirs = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    own = list(pipeline.named_parameters())
    assert own
    for name, param in own:
        torch.testing.assert_close(param.grad, theirs[name], atol=1e-6, rtol=1e-6)


def assert_same_weights(state, model):
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-6)


def train_tied(world, schedule):
    """Three steps with Adam, batches of several sizes, and a checkpoint; what each rank holds of the tied weights."""
    model = gpt()
    pipeline = paceline.Pipeline(
        copy.deepcopy(model), microbatches=4, schedule=schedule, loss=token_loss, count=num_tokens
    ).eval()
    assert sum(param.numel() for param in pipeline.parameters()) < sum(param.numel() for param in model.parameters())
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (pipeline, model))
    for step, num_samples in enumerate((8, 7, 2)):
        inputs, targets = tokens(num_samples, step)
        expected = token_loss(model(inputs), targets)
        expected.backward()
        is_first, is_last = world.rank == 0, world.rank == world.world_size - 1
        loss = pipeline.forward_backward(inputs if is_first else None, target=targets if is_last else None)
        torch.testing.assert_close(loss, expected.detach())
        if step != 1:  # the gradients of the second are added to
            assert_same_grads(pipeline, model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(pipeline.clip_grad_norm_(0.1), norm)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    assert_same_weights(pipeline.full_state_dict(), model)
    torch.testing.assert_close(pipeline(tokens(5)[0]), model(tokens(5)[0]), atol=1e-5, rtol=1e-5)
    pipeline.load_state_dict(gpt().state_dict())
    assert_same_weights(pipeline.full_state_dict(), gpt())
    mine = pipeline.module
    return [each.weight.tolist() for each in (mine.tokens, mine.head) if each.weight is not None]


@pytest.mark.parametrize(
    ("world_size", "schedule", "backend"),
    [(2, "1f1b", "shm"), (2, "gpipe", "gloo"), (2, "interleaved", "shm"), (3, "1f1b", "shm")],
)
def test_training_is_that_of_one_process_and_tied_weights_stay_equal(world_size, schedule, backend):
    held = run_ranks(world_size, train_tied, schedule, backend=backend)
    tied = [weights for of_rank in held for weights in of_rank]
    assert len(held[0]) == len(held[-1]) == 2
    assert all(weights == tied[0] for weights in tied)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return x + self.norm(self.layer(x)).relu()


def train_mesh(world, schedule):
    """Two stages by two replicas, whose batches differ in size and padding."""
    model = gpt()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    pipeline = paceline.Pipeline(
        copy.deepcopy(model), ranks=mesh, microbatches=2, schedule=schedule, loss=token_loss, count=num_tokens
    ).eval()
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (pipeline, model))
    for step in range(3):
        inputs, targets = tokens(7, step)
        expected = token_loss(model(inputs), targets)
        expected.backward()
        share = slice(0, 3) if world.rank % 2 == 0 else slice(3, 7)
        loss = pipeline.forward_backward(inputs[share], target=targets[share])
        torch.testing.assert_close(loss, expected.detach())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(pipeline.full_state_dict(), model)
    blocks = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(6, 1))
    normed = paceline.Pipeline(blocks, ranks=mesh, microbatches=2, loss=lambda output: output.square().mean())
    for _ in range(2):
        normed.forward_backward(torch.randn(4, 6) + world.rank)
    # a stage that is not trained is alike, too
    frozen = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    nn.init.constant_(frozen[0].weight.requires_grad_(False), world.rank)
    nn.init.constant_(frozen[0].bias.requires_grad_(False), world.rank)
    half = paceline.Pipeline(frozen, ranks=mesh, microbatches=2, loss=lambda output: output.square().mean())
    half.forward_backward(torch.ones(4, 6))
    assert half.full_state_dict()["0.weight"].unique().tolist() == [0.0]
    return {name: value.tolist() for name, value in normed.named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_two_stages_by_two_replicas_train_as_one_process(schedule):
    first, second, third, fourth = run_ranks(4, train_mesh, schedule, timeout_s=60)
    assert first == second
    assert third == fourth


class Tempered(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, output, target):
        return functional.cross_entropy(output * self.factor, target)


def train_rest_of_mesh(world):
    """What is not a trained stage: a loss with a parameter, and batch norm without any; batches down to nothing."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    model, loss, x, y = nn.Sequential(*layers), Tempered(), torch.randn(10, 6), torch.randint(3, (10,))
    lanes = [[2, 0], [1, 3]]  # not in the order of ranks
    replica = int(world.rank in (0, 3))
    own_loss = copy.deepcopy(loss)
    pipeline = paceline.Pipeline(copy.deepcopy(model), ranks=lanes, microbatches=3, loss=own_loss, count=len)
    for num_first in (4, 1, 0):
        expected = loss(model(x), y)
        expected.backward()
        share = slice(0, num_first) if replica == 0 else slice(num_first, 10)
        torch.testing.assert_close(pipeline.forward_backward(x[share], target=y[share]), expected.detach())
        assert_same_grads(pipeline, model)
    if world.rank in lanes[1]:
        torch.testing.assert_close(own_loss.factor.grad, loss.factor.grad)
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False))
    normed = paceline.Pipeline(plain, ranks=lanes, microbatches=2, loss=lambda output: output.square().mean())
    for _ in range(2):
        normed.forward_backward(torch.randn(10, 6) + replica)
    buffers = [buffer.clone() for buffer in normed.buffers()]
    normed.forward_backward(torch.ones(10, 6))  # begins with those of the first replica
    return [buffer.tolist() for buffer in normed.buffers()], [buffer.tolist() for buffer in buffers]


def test_replicas_agree_on_what_is_no_trained_stage_either():
    zero, first, two, third = run_ranks(4, train_rest_of_mesh, timeout_s=60)
    assert zero == two == ([], [])
    assert first[0] == third[0]
    assert first[1] != third[1]


class Counts(nn.Linear):
    """With a state that is no tensor."""

    def get_extra_state(self):
        return {"wide": torch.ones(2) * self.in_features}

    def set_extra_state(self, state):
        self.seen = state


class Task(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def save_and_load(world):
    """Lanes in the reverse order of ranks, three stages on each; the model within another module."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Counts(6, 6) for _ in range(6)))
    pipeline = paceline.Pipeline(
        copy.deepcopy(model),
        ranks=[1, 0],
        schedule="interleaved",
        stages_per_lane=3,
        microbatches=3,
        loss=lambda output: output.square().mean(),
    )
    x = torch.randn(7, 6)
    expected = model(x).square().mean()
    expected.backward()
    is_first = world.rank == 1
    torch.testing.assert_close(pipeline.forward_backward(x if is_first else None), expected.detach())
    assert_same_grads(pipeline, model)
    with torch.no_grad():
        torch.testing.assert_close(pipeline(x), model(x))
    state = {name: value + 1 for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    extra = {f"{number}._extra_state": {"wide": torch.ones(2)} for number in range(6)}
    Task(pipeline).load_state_dict({f"net.{name}": value for name, value in (state | extra).items()})
    whole = pipeline.full_state_dict()
    assert list(whole) == list(model.state_dict())
    assert all(torch.equal(whole[name], state[name]) for name in state)
    model.load_state_dict(whole)
    assert model[5].seen["wide"].tolist() == [6.0, 6.0]
    return [float(layer.seen["wide"][0]) for layer in pipeline.module]


def test_lanes_may_be_in_any_order_and_states_that_are_no_tensors_are_saved_too():
    assert run_ranks(2, save_and_load) == [[1.0] * 6] * 2


def run_alone(world):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), torch.randn(4, 6)
    pipeline = paceline.Pipeline(copy.deepcopy(model), loss=lambda output: output.square().mean())
    model(x).square().mean().backward()
    pipeline.forward_backward(x)
    assert_same_grads(pipeline, model)
    return pipeline.units


def test_a_script_for_ranks_runs_as_one_process_too():
    assert run_ranks(1, run_alone) == [[["0", "1"]]]


def measure_and_draw(world):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
    pipeline = paceline.Pipeline(
        model, microbatches=2, loss=lambda output: output.square().mean(), balance="time", example=torch.randn(2, 6)
    )
    with pipeline.measure_bytes() as peaks:
        pipeline.forward_backward(torch.randn(4, 6))
    bubble, drawing = pipeline.measured_bubble(), pipeline.draw_last_step()
    return pipeline.units, bubble, drawing, sorted(peaks)


def test_ranks_share_what_the_first_measures_and_know_all_lanes_times():
    first, second = run_ranks(2, measure_and_draw)
    assert first[:3] == second[:3]
    assert [first[3], second[3]] == [[0], [1]]
    assert sum(map(len, first[0])) == 5
    assert 0 <= first[1] < 1
    assert first[2].count("<title>") == 8


class Fails(nn.Module):
    def forward(self, x):
        if x.abs().sum() > 100:
            raise KeyError("too much")
        return x


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Hides(nn.Module):
    def forward(self, x):
        return Opaque(x)


def pipeline_of(*layers, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 3))
    return paceline.Pipeline(model, microbatches=2, loss=nn.CrossEntropyLoss(), **arguments)


def build_differently(world):
    pipeline_of(*(nn.Linear(6, 6) for _ in range(world.rank + 1)))


def name_too_few(world):
    pipeline_of(ranks=[0])


def cut_where_nothing_is(world):
    pipeline_of(balance=["9"])


def ask_for_a_graph(world):
    pipeline_of()(torch.randn(4, 6))


def hide_a_tensor(world):
    paceline.Pipeline([nn.Sequential(nn.Linear(6, 6), Hides()), nn.Identity()]).eval()(torch.randn(4, 6))


def give_other_targets(world):
    pipeline_of().forward_backward(torch.randn(4, 6), target=torch.zeros(5, dtype=torch.long))


def fail_in_the_second(world):
    pipeline = pipeline_of(Fails(), balance=["1"])
    pipeline.forward_backward(torch.full((4, 6), 1e6), target=torch.zeros(4, dtype=torch.long))


def go_on_after_a_failure(world):
    pipeline = pipeline_of()
    with pytest.raises(Exception):  # noqa: B017, PT011  # on one its own, on the other what it is told
        pipeline.forward_backward(torch.randn(4, 6), target=torch.zeros(5, dtype=torch.long))
    pipeline.forward_backward(torch.randn(4, 6), target=torch.zeros(4, dtype=torch.long))


def save_unlike_groups(world):
    pipeline = pipeline_of()
    params = list(pipeline.parameters())
    groups = [{"params": [param]} for param in params] if world.rank == 0 else params
    pipeline.whole(torch.optim.SGD(groups, lr=0.1)).state_dict()


def save_one_ranks_part(world):
    with tempfile.TemporaryDirectory() as folder:
        paceline.Checkpointer(folder, every=1, model=pipeline_of()).step()


def part_the_tied(world):
    pipeline = paceline.Pipeline(gpt(), microbatches=2, loss=token_loss)
    with torch.no_grad():
        for param in pipeline.parameters():
            param.add_(world.rank)
    inputs, targets = tokens(4)
    pipeline.forward_backward(inputs, target=targets)


@pytest.mark.parametrize(
    ("fn", "messages"),
    [
        (build_differently, ["PipelineError: rank 1 has ((6, 6), 'torch.float32') for '2.weight', but rank 0 has"] * 2),
        (name_too_few, ["PipelineError: ranks=[0]: expected each rank of the world (0 to 1) once, got [0]."] * 2),
        (cut_where_nothing_is, ["PlanError: balance names '9', but the units are 0, 1."] * 2),
        (
            ask_for_a_graph,
            [f"PipelineError: rank {rank}: no graph reaches over ranks, so gradients need" for rank in (0, 1)],
        ),
        (hide_a_tensor, ["PipelineError: a stage passes on an object that holds a tensor, which would arrive", ""]),
        (give_other_targets, ["", "DataError: target has size 5 along dimension 0, but the inputs have 4."]),
        (
            go_on_after_a_failure,
            [f"PipelineError: rank {rank}: an earlier step of this pipeline failed" for rank in (0, 1)],
        ),
        (fail_in_the_second, ["", "KeyError: \"stage 1, microbatch 0, forward: 'too much'\""]),
        (
            save_unlike_groups,
            ["PipelineError: the lanes' optimizers have [2, 1] groups of parameters; expected equally many in each."]
            * 2,
        ),
        (
            save_one_ranks_part,
            ["CheckpointError: rank 1 has ['1.weight'] in the state of model, and the first rank, whose state is saved"]
            * 2,
        ),
        (
            part_the_tied,
            [
                f"PipelineError: rank {rank}: the tied weights 'positions' of lane 1 are no longer those of lane 0"
                for rank in (0, 1)
            ],
        ),
    ],
    ids=lambda item: item.__name__ if callable(item) else "",
)
def test_errors_name_what_is_wrong(fn, messages):
    for said, expected in zip(expect_errors(2, fn), messages, strict=True):
        assert said.startswith(expected)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], r"^ranks=\[\]: expected for each lane one rank, or equally many replicas\.$"),
        ([[0, 1], [2]], r"^ranks=\[\[0, 1\], \[2\]\]: expected for each lane one rank, or equally many replicas\.$"),
        ([0, 1, 1], r"^ranks=\[0, 1, 1\]: expected each rank of the world \(0 to 2\) once, got \[0, 1, 1\]\. Name all"),
    ],
)
def test_ranks_that_make_no_layout_are_refused(ranks, message):
    with pytest.raises(PipelineError, match=message):
        make_layout(ranks, 3)


def test_a_layout_tells_lanes_and_replicas():
    layout = make_layout([[0, 2], [1, 3]], 4)
    assert layout.place_of(2) == (0, 1)
    assert layout.column(1) == [2, 3]
    assert make_layout((1, 0), 2).rows == ((1,), (0,))


def go_on_with_another_cut(world, folder):
    """Two steps on two ranks, saved by a Checkpointer; two more after another cut. As in one process."""
    model, parts = gpt(), {}
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for border in ("blocks.1", "blocks.3"):
        pipeline = paceline.Pipeline(gpt(), microbatches=2, loss=token_loss, count=num_tokens, balance=[border])
        ours = torch.optim.SGD(pipeline.parameters(), lr=9.0 if parts else 0.1, momentum=0.9)
        parts = {"run": pipeline.whole(ours)}
        with paceline.Checkpointer(folder, every=2, stop=False, **parts) as checkpoints:
            checkpoints.resume()
            for step in range(2):
                inputs, targets = tokens(4, checkpoints.num_steps + step)
                token_loss(model(inputs), targets).backward()
                pipeline.forward_backward(inputs, target=targets)
                for optimizer in (ours, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
                checkpoints.step()
    assert_same_weights(pipeline.full_state_dict(), model)
    loss = nn.Linear(2, 2)
    with pytest.raises(PipelineError, match=r"has a parameter of shape \(2, 2\) that is not the pipeline's"):
        pipeline.whole(torch.optim.SGD(loss.parameters(), lr=1)).state_dict()
    partial = parts["run"].state_dict()
    partial["optimizer"]["param_groups"] = []
    with pytest.raises(
        PipelineError, match=r"^the optimizer's state has nothing of '.*'\. Load what was saved of the same"
    ):
        parts["run"].load_state_dict(partial)


def test_a_checkpoint_has_all_ranks_models_and_optimizers_and_goes_on_with_another_cut(tmp_path):
    run_ranks(2, go_on_with_another_cut, str(tmp_path))
