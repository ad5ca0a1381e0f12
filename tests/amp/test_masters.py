"""Master weights: parameter groups, checkpoints, and who writes to which weights."""

import contextlib
import copy
import gc
import io
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch.optim import SGD

from paceline import amp
from paceline.amp import masters
from paceline.errors import AmpError

LEVELS = ["O0", "O1", "O2", "O3"]
FLOAT, HALF = torch.float32, torch.float16


@pytest.fixture(autouse=True)
def off():
    yield
    amp.deactivate()


class Net(nn.Module):
    """A convolution, a batch normalisation, a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.norm(self.conv(x * self.scale)).relu().flatten(1))


def momentum(model):
    return SGD(model.parameters(), lr=1e-2, momentum=0.5)


def master_of(optimizer, shape):
    return next(param for param in amp.master_params(optimizer) if param.shape == shape)


def build(level, seed=0, **options):
    torch.manual_seed(seed)
    model = Net()
    optimizer = momentum(model)
    return amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0} | options)


def train(model, optimizer, num_steps, seed=1):
    random = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x, y = torch.randn(8, 1, 4, 4, generator=random), torch.randint(3, (8,), generator=random)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("level", "options", "dtypes"),
    [
        ("O0", {}, [FLOAT, FLOAT]),
        ("O1", {}, [FLOAT, FLOAT]),
        ("O2", {}, [HALF, FLOAT]),
        ("O2", {"keep_batchnorm_fp32": "False"}, [HALF, HALF]),
        ("O3", {}, [HALF, HALF]),
        ("O3", {"keep_batchnorm_fp32": True}, [HALF, FLOAT]),
        ("O2", {"cast_model_type": torch.bfloat16}, [torch.bfloat16, FLOAT]),
    ],
)
def test_weights_are_cast_as_the_level_says(level, options, dtypes):
    model, optimizer = build(level, **options)
    assert [model.conv.weight.dtype, model.norm.weight.dtype] == dtypes
    assert [model.conv.bias.dtype, model.norm.running_mean.dtype] == dtypes
    has_masters = level == "O2"
    assert {param.dtype for param in amp.master_params(optimizer)} == ({FLOAT} if has_masters else {*dtypes})


def test_masters_are_the_weights_that_there_were_bit_by_bit_in_the_memory_that_there_was():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    before, memory = model.weight.detach().clone(), model.weight.data_ptr()
    weight = model.weight
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)
    master = next(amp.master_params(optimizer))
    assert torch.equal(master, before)
    assert master.data_ptr() == memory
    assert model.weight is weight
    assert torch.equal(weight, before.half())


def test_small_steps_add_up_in_masters():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=2.0**-14), opt_level="O2", loss_scale=4.0)
    for _ in range(16):
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == 1.0 - 2.0**-10  # float16 alone would stay at 1


# -- checkpoints -----------------------------------------------------------------------------------------------------


def saved(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("loads_first", [False, True], ids=["initialize, then load", "load, then initialize"])
@pytest.mark.parametrize("level", LEVELS)
def test_training_goes_on_bit_by_bit_from_a_checkpoint(level, loads_first):
    model, optimizer = build(level)
    train(model, optimizer, 3)
    checkpoint = saved(model, optimizer)
    assert {tensor.dtype for tensor in checkpoint["model"].values()} == {FLOAT, torch.int64}
    train(model, optimizer, 3, seed=2)
    expected, scales = copy.deepcopy(model.state_dict()), amp.state_dict()
    if loads_first:
        resumed = Net()
        optimizer = momentum(resumed)
        resumed.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        resumed, optimizer = amp.initialize(resumed, optimizer, opt_level=level, verbosity=0)
    else:
        resumed, optimizer = build(level, seed=5)
        resumed.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    train(resumed, optimizer, 3, seed=2)
    assert amp.state_dict() == scales
    torch.testing.assert_close(resumed.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("level", "other"), [*itertools.permutations(LEVELS, 2)])
def test_a_checkpoint_of_one_level_loads_under_another(level, other):
    model, optimizer = build(level)
    train(model, optimizer, 2)
    checkpoint = saved(model, optimizer)
    resumed, optimizer = build(other, seed=5)
    resumed.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    tolerance = {"rtol": 2e-3, "atol": 1e-6} if other == "O3" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(resumed.state_dict(), checkpoint["model"], **tolerance)
    train(resumed, optimizer, 1)


def test_the_scales_are_saved_in_apexs_format_and_its_checkpoints_load(caplog):
    build("O1", num_losses=2)
    amp.load_state_dict(
        {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 7}, "loss_scaler1": {"loss_scale": 2.0, "unskipped": 1}}
    )
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 8.0, "unskipped": 7, "skipped": 0},
        "loss_scaler1": {"loss_scale": 2.0, "unskipped": 1, "skipped": 0},
    }
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}})
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [4.0, 2.0]
    assert [r.getMessage() for r in caplog.records] == ["amp.load_state_dict: it is of 1 losses, and num_losses is 2."]
    with pytest.raises(AmpError, match=r"^amp\.load_state_dict: unexpected keys 'scale', 'growth'; expected"):
        amp.load_state_dict({"scale": 1.0, "growth": 2.0})


def test_a_state_dict_with_its_graph_holds_the_masters_themselves():
    model, optimizer = build("O2")
    assert model.state_dict(keep_vars=True)["conv.weight"] is master_of(optimizer, (4, 1, 3, 3))


# -- parameter groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeroes_first", [False, True])
@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_parameter_groups_may_be_added(level, num_backwards, zeroes_first):
    """Three steps with momentum; the second model joins after the first. Plain torch says what is right."""

    def steps(models, optimizer, scale_loss):
        for step in range(3):
            if step == 1:
                if zeroes_first:
                    optimizer.zero_grad()
                optimizer.add_param_group({"params": list(models[1].parameters()), "lr": 0.25})
            optimizer.zero_grad()
            for _ in range(num_backwards):
                loss = sum(model(torch.ones(1, 2)).sum() for model in models[: 1 + (step > 0)])
                with scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
        return [param.detach().float().clone() for model in models for param in model.parameters()]

    def make():
        models = [nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)]
        for number, model in enumerate(models):
            nn.init.constant_(model.weight, 1.0 + number)
        return models, SGD(models[0].parameters(), lr=0.5, momentum=0.125)

    expected = steps(*make(), lambda loss, optimizer: contextlib.nullcontext(loss))
    models, optimizer = make()
    models, optimizer = amp.initialize(models, optimizer, opt_level=level, verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    torch.testing.assert_close(steps(models, optimizer, amp.scale_loss), expected, rtol=2e-3, atol=1e-3)
    masters = list(amp.master_params(optimizer))
    assert len(masters) == 2
    assert {param.dtype for param in masters} == ({HALF} if level == "O3" else {FLOAT})


def test_a_weight_in_two_optimizers_has_one_master():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizers = [SGD(model.parameters(), lr=rate) for rate in (0.25, 0.5)]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O2", loss_scale=4.0, verbosity=0)
    for optimizer in optimizers:
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizers) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = [next(amp.master_params(optimizer)) for optimizer in optimizers]
    assert masters[0] is masters[1]
    assert (masters[0].item(), model.weight.item()) == (0.25, 0.25)


def test_a_frozen_weight_that_is_unfrozen_is_trained():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model.weight.requires_grad_(False)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.5), opt_level="O2", loss_scale=4.0)
    model.weight.requires_grad_(True)
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.item() == 0.5


# -- writes to weights -----------------------------------------------------------------------------------------------


def test_what_is_written_to_the_models_weights_is_taken_over_and_the_rest_keeps_its_bits():
    model, optimizer = build("O2")
    master = master_of(optimizer, (3, 64))
    whole = master.detach().clone()
    with torch.no_grad():
        model.head.weight[0].fill_(0.125)
    optimizer.zero_grad()
    optimizer.step()  # without gradients
    assert torch.equal(master[0], torch.full((64,), 0.125))
    assert torch.equal(master[1:], whole[1:])
    assert torch.equal(model.head.weight, master.half())
    with torch.no_grad():
        model.head.weight[1].fill_(0.5)
    assert model.state_dict()["head.weight"][1].unique().tolist() == [0.5]


def step(model, optimizer, *, scale=0.0):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(2, 1, 4, 4)).sum() * scale, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_writes_through_data_which_torch_does_not_count_are_taken_over():
    """As in weights that are initialised late, and in those of a critic that are clamped after each step."""
    model, optimizer = build("O2", loss_scale=4.0)
    optimizer.param_groups[0]["momentum"] = 0.0
    model.head.weight.data.fill_(0.25)
    step(model, optimizer)
    assert model.head.weight.unique().tolist() == [0.25]
    for _ in range(2):
        step(model, optimizer, scale=1.0)
        for param in model.parameters():
            param.data.clamp_(-0.125, 0.125)
    step(model, optimizer)
    assert max(param.abs().max().item() for param in amp.master_params(optimizer)) <= 0.126


def test_what_is_written_to_masters_goes_to_checkpoints_and_to_the_model_with_the_next_step():
    model, optimizer = build("O2", loss_scale=4.0)
    step(model, optimizer)
    for param in amp.master_params(optimizer):
        param.data.fill_(0.3)
    assert model.state_dict()["head.weight"].unique().tolist() == [torch.tensor(0.3).item()]
    step(model, optimizer)
    assert model.head.weight.unique().tolist() == [torch.tensor(0.3).half().item()]


def test_what_is_written_to_a_masters_memory_is_not_taken_back():
    model, optimizer = build("O2", loss_scale=4.0)
    step(model, optimizer)
    model.state_dict()["head.weight"].fill_(0.3)  # which is the master
    step(model, optimizer)
    assert model.head.weight.unique().tolist() == [torch.tensor(0.3).half().item()]
    assert model.state_dict()["head.weight"].unique().tolist() == [torch.tensor(0.3).item()]


def test_writes_to_the_model_are_taken_over_before_masters_are_handed_out():
    model, optimizer = build("O2", loss_scale=4.0)
    step(model, optimizer)
    model.head.weight.data.fill_(0.25)
    assert master_of(optimizer, (3, 64)).unique().tolist() == [0.25]


def test_writes_are_found_in_all_masters_however_many_there_are_and_in_empty_ones(monkeypatch):
    monkeypatch.setattr(masters, "_CHUNK_BYTES", 8)
    params = [nn.Parameter(torch.ones(size, dtype=HALF)) for size in (0, 3, 4, 1)]
    made = [masters.Master(param) for param in params]
    assert [found.item() for found in masters.find_writes(made)] == [0.0, 0.0]
    params[3].data.fill_(2.0)
    assert sorted(found.item() for found in masters.find_writes(made)) == [0.0, 1.0]


def test_a_copy_of_the_model_is_a_model_of_its_own():
    model, optimizer = build("O2")
    copied = copy.deepcopy(model)
    train(model, optimizer, 1)
    model.conv.weight.data.zero_()
    x = torch.ones(2, 1, 4, 4)
    assert copied(x).dtype == FLOAT
    assert not torch.equal(copied(x), model(x))
    assert {tensor.dtype for tensor in copied.state_dict().values()} == {FLOAT, torch.int64}
    copied.load_state_dict(model.state_dict())
    torch.testing.assert_close(copied.conv.weight, master_of(optimizer, (4, 1, 3, 3)).half(), rtol=0, atol=0)


def test_nothing_keeps_models_and_masters_alive():
    model, optimizer = build("O2")
    train(model, optimizer, 1)
    alive = [weakref.ref(model), weakref.ref(model.conv.weight), weakref.ref(next(amp.master_params(optimizer)))]
    amp.deactivate()
    del model, optimizer
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
