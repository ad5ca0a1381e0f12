"""The table of levels, and what may be overridden."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from paceline import amp
from paceline.amp.levels import LEVELS
from paceline.amp.options import choose, choose_bounds
from paceline.errors import AmpError

TABLE = {
    # cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}


def test_the_levels_are_apexs():
    assert {name: dataclasses.astuple(level) for name, level in LEVELS.items()} == TABLE


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        LEVELS["O1"] = LEVELS["O2"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        LEVELS["O1"].loss_scale = 1.0


@pytest.mark.parametrize("name", TABLE)
def test_without_overrides_the_properties_are_the_levels(name):
    properties = choose(name)
    assert dataclasses.astuple(properties)[:5] == TABLE[name]
    assert (properties.enabled, properties.opt_level) == (True, name)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ({"keep_batchnorm_fp32": "True"}, True),
        ({"keep_batchnorm_fp32": "False"}, False),
        ({"master_weights": "False"}, False),
        ({"loss_scale": "128.0"}, 128.0),
        ({"loss_scale": 128}, 128.0),
        ({"loss_scale": "dynamic"}, "dynamic"),
        ({"cast_model_type": torch.bfloat16}, torch.bfloat16),
        ({"cast_model_type": "torch.bfloat16"}, torch.bfloat16),
        ({"cast_model_type": "bfloat16"}, torch.bfloat16),
        ({"cast_model_type": False}, None),
    ],
    ids=str,
)
def test_overrides_may_be_strings_as_command_lines_give_them(override, value):
    assert getattr(choose("O2", **override), next(iter(override))) == value


@pytest.mark.parametrize(
    ("level", "override", "message"),
    [
        ("01", {}, r"^opt_level='01': expected 'O0', 'O1', 'O2' or 'O3' \(the letter O, not a zero\)\.$"),
        ("O1", {"cast_model_type": torch.float16}, "cast_model_type=torch.float16: under O1 weights stay float32"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True: under O1 all weights stay float32"),
        ("O1", {"master_weights": False}, "master_weights=False: under O1 all weights stay float32"),
        ("O2", {"patch_torch_functions": True}, "only O1 chooses a dtype for each function"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32='yes': expected True, False, 'True', 'False'"),
        ("O2", {"loss_scale": "large"}, "loss_scale='large': expected a positive number, or a string of one, or 'dyn"),
        ("O2", {"loss_scale": 0}, "loss_scale=0: expected a positive number"),
        ("O3", {"cast_model_type": torch.int8}, "cast_model_type=torch.int8: expected a floating-point dtype"),
        ("O3", {"cast_model_type": "half16"}, "cast_model_type='half16': expected a floating-point dtype"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_level_is_an_error(level, override, message):
    with pytest.raises(AmpError, match=message):
        choose(level, **override)


def test_errors_are_what_scripts_catch_of_apex():
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind):
            choose("O4")


def test_bounds_of_the_scale():
    assert choose_bounds(None, 2.0**24) == (None, 2.0**24)
    assert choose_bounds("1", "8.0") == (1.0, 8.0)
    with pytest.raises(AmpError, match=r"^min_loss_scale=16.0 is larger than max_loss_scale=8.0\.$"):
        choose_bounds(16, 8)
    with pytest.raises(AmpError, match=r"^max_loss_scale=-1: expected a positive number, or a string of one\.$"):
        choose_bounds(None, -1)


def linear():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def off():
    yield
    amp.deactivate()


def test_lists_come_back_where_lists_came_in():
    (m0, o0), (m1, o1), (m2, o2), (m3, _) = (linear() for _ in range(4))
    assert amp.initialize(m0, o0, verbosity=0) == (m0, o0)
    assert amp.initialize([m1, m2], [o1, o2], verbosity=0) == ([m1, m2], [o1, o2])
    assert amp.initialize(m3) is m3
    assert amp.initialize([m3]) == [m3]


def test_what_is_no_model_and_no_optimizer_is_refused():
    model, optimizer = linear()
    with pytest.raises(TypeError, match=r"^models: expected a module or a list of modules, got tuple\.$"):
        amp.initialize((model,), optimizer)
    with pytest.raises(TypeError, match=r"^optimizers: expected an optimizer or a list of them, got dict\.$"):
        amp.initialize(model, {})
    with pytest.raises(
        AmpError, match=r"^models: DataParallel is a parallel wrapper\. Wrap models after amp\.initiali"
    ):
        amp.initialize(nn.DataParallel(model), optimizer)
    with pytest.raises(
        AmpError, match=r"^parameter 'weight' of Linear has dtype torch\.float16, expected torch\.float32"
    ):
        amp.initialize(nn.Linear(2, 2).half(), optimizer)
    amp.initialize(model, optimizer)
    with pytest.raises(AmpError, match=r"^this SGD has been through amp\.initialize already\."):
        amp.initialize(model, optimizer)


class Outer(SGD):
    """Has another optimizer step the weights, as torch's ZeroRedundancyOptimizer does."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=1.0)
        self.optim = Adam(params)


def test_an_optimizer_that_masters_would_not_reach_is_refused():
    model = nn.Linear(1, 1)
    message = r"^Outer has a Adam step the weights, which master weights would not reach\. Use opt_level='O1', or mas"
    with pytest.raises(AmpError, match=message):
        amp.initialize(model, Outer(model.parameters()), opt_level="O2", verbosity=0)
    assert model.weight.dtype == torch.float32
    amp.initialize(model, Outer(model.parameters()), opt_level="O1", verbosity=0)
    shared = Outer(model.parameters())
    shared.optim.param_groups = shared.param_groups
    amp.initialize(model, shared, opt_level="O2", verbosity=0)


def test_models_in_fsdps_first_version_are_refused():
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})()  # torch's own needs a process group
    message = r"^models: within Sequential there is a FullyShardedDataParallel, of whose gradients each rank has a part"
    with pytest.raises(AmpError, match=message):
        amp.initialize(nn.Sequential(wrapper), verbosity=0)


def test_sharded_weights_are_refused_where_there_would_be_masters():
    model = nn.Linear(1, 1)
    model.weight.placements = ()  # of what a DTensor has, what it is known by
    message = (
        r"^SGD steps sharded weights \(DTensor\), which have no master weights here\. Use opt_level='O1'; or fully"
    )
    with pytest.raises(AmpError, match=message):
        amp.initialize(model, SGD(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)


def test_disabled_nothing_is_changed_and_every_call_works():
    model, optimizer = linear()
    step = optimizer.step
    assert amp.initialize(model, optimizer, enabled=False, opt_level="whatever") == (model, optimizer)
    loss = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    assert optimizer.step == step
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert (amp.state_dict(), amp.skipped_steps()) == ({}, 0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    assert "forward" not in vars(model)
