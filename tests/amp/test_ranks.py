"""Several ranks: the same steps skipped, the same scale, the same weights."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD

from paceline import DistributedDataParallel, amp
from paceline.amp import ranks
from paceline.errors import AmpError, LossScaleError, ReductionError
from paceline.parallel import apex
from support.ranks import run_ranks

INF = float("inf")


def linear(value=1.0):
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def build(level, model, lr=0.5, **options):
    model, optimizer = amp.initialize(
        model, SGD(model.parameters(), lr=lr), opt_level=level, **{"verbosity": 0, "loss_scale": "dynamic"} | options
    )
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale = 64.0
    return model, optimizer


def backward(model, optimizer, x, **options):
    with amp.scale_loss(model(x).sum(), optimizer, **options) as scaled:
        scaled.backward()


def weights_of(model):
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


# -- what is called on two ranks: each function returns what a rank has to say ---------------------------------------


def trained_from_different_weights(rank, wrap):
    """Random weights that differ between the ranks; four steps, the second with an infinity on rank 1 alone."""
    told = []
    for level in ("O1", "O2", "O3"):
        torch.manual_seed(rank)
        model, optimizer = build(level, nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
        wrapped = wrap(model)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((1, 2), INF if step == 1 and rank == 1 else 1.0 + rank)
            backward(wrapped, optimizer, x)
            optimizer.step()
        told.append((weights_of(model), amp.skipped_steps(), amp._amp_state.loss_scalers[0].loss_scale()))
        amp.deactivate()
    return told


def accumulated(rank, wrap, level):
    """Two backwards, the first in no_sync: the gradient is the average over ranks of both."""
    model, optimizer = build(level, linear())
    wrapped = wrap(model)
    for k in range(2):
        with wrapped.no_sync() if k == 0 else contextlib.nullcontext():
            backward(wrapped, optimizer, torch.full((1, 2), 1.0 + rank + k))
    grads = [param.grad.flatten().tolist() for param in amp.master_params(optimizer)]
    optimizer.step()
    amp.deactivate()
    return grads, weights_of(model)


class Inner(nn.Module):
    """A model within which a part is wrapped."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped
        self.no_sync = wrapped.no_sync

    def forward(self, x):
        return self.wrapped(x)


def wrapped_before(rank, wrap, level, *, within):
    """As ``accumulated``, where the wrapper was there before ``initialize``."""
    wrapped = wrap(linear())
    outer = Inner(wrapped) if within else wrapped
    try:
        _, optimizer = build(level, outer if within else wrapped.module)
    except AmpError as error:
        return str(error)
    for k in range(2):
        with wrapped.no_sync() if k == 0 else contextlib.nullcontext():
            backward(outer, optimizer, torch.full((1, 2), 1.0 + rank + k))
    grads = [param.grad.flatten().tolist() for param in amp.master_params(optimizer)]
    amp.deactivate()
    return grads


def made_before_amp_was_imported():
    wrapped = DistributedDataParallel(linear())
    ranks._wrappers.clear()
    ranks.find_earlier()
    return [each is wrapped for each in ranks.wrappers_of([wrapped.module])]


def partly_wrapped(rank):
    """One of two models is wrapped; an infinity in the other, on rank 1 alone."""
    models = [linear(), linear()]
    optimizer = SGD([param for model in models for param in model.parameters()], lr=0.5)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    wrapped = DistributedDataParallel(models[0])
    loss = wrapped(torch.ones(1, 2)).sum() + models[1](torch.full((1, 2), INF if rank else 1.0)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    amp.deactivate()
    return optimizer._amp_stash.num_skipped


def alone(rank):
    """Models that are not wrapped are each rank's own: rank 1 skips a step, and trains for one more."""
    model, optimizer = build("O2", linear())
    for step in range(2 + rank):
        optimizer.zero_grad()
        backward(model, optimizer, torch.full((1, 2), INF if step < rank else 1.0))
        optimizer.step()
    amp.deactivate()
    return optimizer._amp_stash.num_skipped, weights_of(model)


def reduced(rank):
    """Apex's Reducer, which averages after the check."""
    model, optimizer = build("O2", linear(1.0 + rank))
    reducer = apex.Reducer(model)
    told = [weights_of(model)]
    for step in range(2):
        optimizer.zero_grad()
        backward(model, optimizer, torch.full((1, 2), INF if step < rank else 1.0 + rank), delay_unscale=step == 1)
        if step == 1:
            reducer.reduce()
            backward(model, optimizer, torch.zeros(1, 2))
        optimizer.step()
        told.append(weights_of(model))
    grads = [torch.full((2,), 1.0 + rank), torch.full((1,), 3.0 * rank)]
    apex.Reducer(grads).reduce()
    amp.deactivate()
    return told, optimizer._amp_stash.num_skipped, [grad.tolist() for grad in grads]


def stuck(rank):
    model, optimizer = build("O2", linear(), min_loss_scale=64.0)
    wrapped = DistributedDataParallel(model)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            backward(wrapped, optimizer, torch.full((1, 2), INF))
    except LossScaleError as error:
        return str(error).split(".")[0]
    finally:
        amp.deactivate()


def joined(rank):
    """Rank 1 has three batches, of which the second overflows, and rank 0 two; then both train on."""
    told = []
    for level in ("O1", "O2"):
        model, optimizer = build(level, linear(), lr=0.3)
        wrapped = DistributedDataParallel(model)
        with wrapped.join(states=[optimizer, amp, model]):
            for step in range(2 + rank):
                optimizer.zero_grad()
                backward(wrapped, optimizer, torch.full((1, 2), INF if step == 1 and rank else 1.0))
                optimizer.step()
        optimizer.zero_grad()
        backward(wrapped, optimizer, torch.ones(1, 2))
        optimizer.step()
        told.append((weights_of(model), amp.state_dict()))
        amp.deactivate()
    return told


def of_torchs_scaler(rank, config, autocasts):
    """torch.amp.GradScaler with paceline's wrapper; an infinity on rank 1 alone, in the second of three steps."""
    model = linear()
    wrapped = DistributedDataParallel(model, mixed_precision=config)
    optimizer = SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    told = []
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
            loss = wrapped(torch.full((1, 2), INF if step == 1 and rank else 1.0)).float().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found = [value.item() for value in scaler._found_inf_per_device(optimizer).values()]
        scaler.step(optimizer)
        scaler.update()
        told.append((found, scaler.get_scale(), weights_of(model)))
    return told


APEX_OPTIONS = [
    {},
    {"message_size": 1, "num_allreduce_streams": 2},
    {"delay_allreduce": True},
    {"gradient_average": False},
    {"gradient_predivide_factor": 2.0},
    {"gradient_average": False, "gradient_predivide_factor": 2.0},
    {"allreduce_always_fp32": True},
]


def of_apexs_wrapper(rank):
    """The gradient of a weight of float16 whose inputs are 1 and 3, under each of the options; the buckets of two."""
    told = []
    for options in APEX_OPTIONS:
        model = linear().half()
        wrapped = apex.DistributedDataParallel(model, **options)
        wrapped(torch.full((1, 2), 1.0 + 2 * rank, dtype=torch.float16)).sum().backward()
        told.append(model.weight.grad.flatten().tolist())
    large = apex.DistributedDataParallel(linear().half(), allreduce_always_fp32=True)
    large(torch.full((1, 2), 60000.0, dtype=torch.float16)).sum().backward()
    told.append(large.module.weight.grad.flatten().tolist())
    wrapped = apex.DistributedDataParallel(linear())
    wrapped.disable_allreduce()
    wrapped(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
    told.append(wrapped.module.weight.grad.flatten().tolist())
    wrapped.enable_allreduce()
    wrapped(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
    told.append(wrapped.module.weight.grad.flatten().tolist())
    return told


def everything(world):
    """One world for all of it: what is looked at differs, not how ranks meet."""
    rank = world.rank
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own wrapper, of a world that Gloo does not serve alone
        gloo = dist.new_group(backend="gloo")

        def of_torch(model):
            return nn.parallel.DistributedDataParallel(model, process_group=gloo)

        wraps = {"paceline's": DistributedDataParallel, "torch's": of_torch, "apex's": amp.DistributedDataParallel}
        return {
            "trained": {name: trained_from_different_weights(rank, wrap) for name, wrap in wraps.items()},
            "accumulated": {
                (name, level): accumulated(rank, wrap, level) for name, wrap in wraps.items() for level in ("O1", "O2")
            },
            "made before": made_before_amp_was_imported(),
            "wrapped before": {
                (name, level, within): wrapped_before(rank, wraps[name], level, within=within)
                for name in ("paceline's", "torch's")
                for level in ("O1", "O2")
                for within in (False, True)
            },
            "partly wrapped": partly_wrapped(rank),
            "alone": alone(rank),
            "reduced": reduced(rank),
            "stuck": stuck(rank),
            "joined": joined(rank),
            "torch's scaler": of_torchs_scaler(rank, None, True),
            "torch's scaler, mixed_precision=": of_torchs_scaler(
                rank, _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16), False
            ),
            "apex's wrapper": of_apexs_wrapper(rank),
        }


@pytest.fixture(scope="module")
def told():
    return run_ranks(2, everything, timeout_s=60)


def test_ranks_that_began_with_different_weights_skip_the_same_step_and_end_with_the_same(told):
    for wrapper in told[0]["trained"]:
        first, second = (each["trained"][wrapper] for each in told)
        assert first == second, wrapper
        assert [skipped_and_scale for _, *skipped_and_scale in first] == [[1, 32.0]] * 3, wrapper


def test_gradients_accumulated_under_no_sync_are_averaged_whole(told):
    """Inputs are 1 + rank and 2 + rank: 1.5 and 2.5 on average."""
    for each in told:
        for key, (grads, weights) in each["accumulated"].items():
            assert grads == [[4.0, 4.0]], key
            assert weights == [-1.0, -1.0], key


def test_wrappers_that_were_there_before_are_known_and_torchs_refused_where_weights_are_cast(told):
    refusal = (
        "models: torch's DistributedDataParallel is around a Linear already, and would not average gradients of "
        "weights that become torch.float16. Make it after amp.initialize."
    )
    for each in told:
        assert each["made before"] == [True]
        for key, found in each["wrapped before"].items():
            assert found == (refusal if key[:2] == ("torch's", "O2") else [[4.0, 4.0]]), key


def test_where_some_gradients_are_not_averaged_ranks_agree_by_a_message(told):
    assert [each["partly wrapped"] for each in told] == [1, 1]


def test_models_that_are_not_wrapped_are_each_ranks_own(told):
    assert [each["alone"] for each in told] == [(0, [0.0, 0.0]), (1, [0.0, 0.0])]


def test_apexs_reducer_averages_when_told_and_ranks_agree(told):
    """Rank 1 overflows in the first step; in the second the average of 1 and 2 is stepped, by half of it."""
    for each in told:
        assert each["reduced"] == ([[1.0, 1.0], [1.0, 1.0], [0.25, 0.25]], 1, [[1.5, 1.5], [1.5]])


def test_a_scale_at_its_floor_is_an_error_on_all_ranks(told):
    message = (
        "loss 0: gradients have overflowed twice in a row, and the scale, 64, is its floor: a smaller one would not"
    )
    assert [each["stuck"] for each in told] == [f"{message} help"] * 2


def test_a_rank_that_has_run_out_is_brought_along_masters_and_scale(told):
    """Of rank 1's three steps and the one after, the second is skipped: weights go from 1 by three times 0.3."""
    first, second = (each["joined"] for each in told)
    assert first == second
    for weights, scales in first:
        assert weights == pytest.approx([0.1, 0.1], abs=1e-6)  # float16 knows it to 2.4e-5
        assert scales == {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 2, "skipped": 1}}


def test_torchs_scaler_finds_the_same_on_all_ranks(told):
    steps = [([0.0], 64.0, [0.5, 0.5]), ([1.0], 32.0, [0.5, 0.5]), ([0.0], 32.0, [0.0, 0.0])]
    for name in ("torch's scaler", "torch's scaler, mixed_precision="):
        assert [each[name] for each in told] == [steps, steps], name


def test_apexs_options_of_the_wrapper(told):
    """Gradients 1 and 3: the average is 2, the sum 4, the sum of halves 2. Twice 60000 is too large for float16."""
    averages = [2.0, 2.0, 2.0, 4.0, 2.0, 2.0, 2.0, 60000.0]
    for rank, each in enumerate(told):
        assert each["apex's wrapper"] == [[value] * 2 for value in (*averages, 1.0 + 2 * rank, 4.0)]


# -- without other ranks ---------------------------------------------------------------------------------------------


def test_arguments_that_apex_has_given_up_are_refused_as_there():
    with pytest.raises(ValueError, match=r"^shared_param is no longer an argument"):
        apex.DistributedDataParallel(linear(), shared_param=True)
    with pytest.raises(ValueError, match=r"^gradient_average_split_factor has become gradient_predivide_factor"):
        apex.DistributedDataParallel(linear(), gradient_average_split_factor=2.0)


def test_convert_syncbn_model():
    model = apex.convert_syncbn_model(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), channel_last=True)
    assert isinstance(model[1], nn.SyncBatchNorm)


@pytest.mark.parametrize(
    ("clip", "decay", "expected"),
    [
        # |w| = 2, g = 1 + decay * 2: local rate 0.1 * 2 / (1 + 2 * decay)
        (True, 0.0, 2.0 - 0.2),  # less than lr = 0.5
        (False, 0.0, 2.0 - 0.5 * 0.2),
        (True, 0.5, 2.0 - 0.1 * 2.0),  # 0.1 * 2 / 2 times a gradient of 1 + 0.5 * 2
        (False, 0.5, 2.0 - 0.5 * 0.1 * 2.0),
    ],
)
@pytest.mark.parametrize("level", [None, "O2"])
def test_larc_follows_the_ratio_of_weight_to_gradient(clip, decay, expected, level):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = apex.LARC(SGD(model.parameters(), lr=0.5, weight_decay=decay), trust_coefficient=0.1, clip=clip)
    if level:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
        backward(model, optimizer, torch.ones(1, 1))
    else:
        model(torch.ones(1, 1)).sum().backward()
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    optimizer.step()
    assert model.weight.item() == pytest.approx(expected, rel=1e-3)
    assert optimizer.state_dict()["param_groups"] == before  # the weight decay is back
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    amp.deactivate()


def test_larc_leaves_weights_without_gradient_and_weights_of_zero_alone():
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    optimizer = apex.LARC(SGD(model.parameters(), lr=0.5, weight_decay=0.5))
    model.weight.grad = torch.ones(1, 1)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert model.weight.item() == -0.5


def test_larc_can_be_copied_and_pickled():
    model = linear()
    optimizer = apex.LARC(SGD(model.parameters(), lr=0.5), trust_coefficient=0.25, clip=False)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (param,) = copied.param_groups[0]["params"]
        param.grad = torch.ones_like(param)
        copied.step()
        assert param.flatten().tolist() == pytest.approx([0.875, 0.875])  # by 0.5 * 0.25 * |w| / |g|
    assert weights_of(model) == [1.0, 1.0]


def test_apexs_reducer_refuses_sparse_gradients():
    model = nn.Embedding(2, 1, sparse=True)
    model(torch.tensor([0])).sum().backward()
    reducer = apex.Reducer([model.weight.grad])
    with pytest.raises(
        ReductionError, match=r"^a Reducer averages dense gradients, and one of these is sparse\. Use Dist"
    ):
        reducer.reduce()
