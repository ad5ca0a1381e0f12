"""Backwards on scaled losses: gradients, skipped steps, and several models, optimizers and losses at once."""

import itertools
import logging

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from paceline import amp
from paceline.errors import AmpError, LossScaleError

LEVELS = ["O0", "O1", "O2", "O3"]
INF = float("inf")


@pytest.fixture(autouse=True)
def off():
    yield
    amp._amp_state.allow_incoming_model_not_fp32 = False
    amp.deactivate()


class Product(nn.Module):
    """A float32 weight and a float16 one; all values are small integers and their fractions, exact in both."""

    def __init__(self, first):
        super().__init__()
        self.whole = Parameter(first + torch.arange(2.0))
        self.narrow = Parameter((1.0 + first + torch.arange(2.0)).half())

    def forward(self, x):
        return ((x * self.whole.float()) * self.narrow.float()).sum()


X = torch.ones(2)


class Case:
    """Which models there are in each optimizer, which models in each loss, and which optimizers a loss reaches."""

    def __init__(self, optimizers, losses, reaches):
        self.optimizers, self.losses, self.reaches = optimizers, losses, reaches

    def build(self):
        models = [Product(1.0 + n) for n in range(max(map(max, self.losses)) + 1)]
        optimizers = [
            SGD([{"params": models[n].parameters(), "lr": 2.0 ** -(2 + n)} for n in members], lr=0.1, momentum=0.125)
            for members in self.optimizers
        ]
        return models, optimizers

    def loss(self, models, index):
        return sum(models[n](X) for n in self.losses[index])


CASES = {
    "2 models, 2 losses, 1 optimizer": Case([[0, 1]], [[0], [1]], [[0], [0]]),
    "3 models, 2 losses, 1 optimizer": Case([[0, 1, 2]], [[0, 2], [1, 2]], [[0], [0]]),
    "2 models, 2 losses, 2 optimizers": Case([[0], [1]], [[0], [1]], [[0], [1]]),
    "3 models, 2 losses, 2 optimizers": Case([[0], [1, 2]], [[0, 2], [1, 2]], [[0, 1], [1]]),
}


def values_of(models):
    return [param.detach().float().clone() for model in models for param in model.parameters()]


def of_plain_torch(case, num_steps, broken):
    """Gradients of each step, and the final weights. ``broken``: a step and a loss whose optimizers skip that step."""
    models, optimizers = case.build()
    for model in models:
        model.float()
    grads = []
    for step in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index in range(2):
            case.loss(models, index).backward()
        grads.append([param.grad.clone() for model in models for param in model.parameters()])
        for index, optimizer in enumerate(optimizers):
            if broken is None or step != broken[0] or index not in case.reaches[broken[1]]:
                optimizer.step()
    return grads, values_of(models)


def zero(how, models, optimizers):
    if how == "none":
        for model in models:
            for param in model.parameters():
                param.grad = None
    else:
        for item in models if how == "model" else optimizers:
            item.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_several_models_optimizers_and_losses(case, level):
    """Also where one gradient, float32 or float16, is infinite in one backward of one step."""
    infinities = [None]
    if level in ("O1", "O2"):
        infinities += [(*where, kind) for where in itertools.product((0, 1), (0, 1)) for kind in ("whole", "narrow")]
    for how, num_losses, infinity in itertools.product(("none", "model", "optimizer"), (1, 2), infinities):
        broken = infinity and infinity[:2]
        num_steps = 2 if broken is None else 3
        reference_grads, final = of_plain_torch(case, num_steps, broken)
        models, optimizers = case.build()
        amp._amp_state.allow_incoming_model_not_fp32 = True
        models, optimizers = amp.initialize(
            models, optimizers, opt_level=level, cast_model_type=False, num_losses=num_losses, verbosity=0
        )
        for scaler, scale in zip(amp._amp_state.loss_scalers, (4.0, 16.0), strict=False):
            scaler._loss_scale = scale
        for step in range(num_steps):
            zero(how, models, optimizers)
            losses = [case.loss(models, index) for index in range(2)]
            for index, loss in enumerate(losses):
                reached = [optimizers[n] for n in case.reaches[index]]
                with amp.scale_loss(loss, reached, loss_id=index % num_losses) as scaled:
                    scaled.backward()
                    if infinity is not None and (step, index) == broken:
                        getattr(models[case.losses[index][0]], infinity[2]).grad[0] = INF
            if broken is None or step != broken[0]:
                masters = [param for optimizer in optimizers for param in amp.master_params(optimizer)]
                order = [n for members in case.optimizers for n in members]
                expected = [reference_grads[step][2 * n + k] for n in order for k in range(2)]
                for param, grad in zip(masters, expected, strict=True):
                    torch.testing.assert_close(param.grad.float(), grad, rtol=1e-3, atol=0)
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(values_of(models), final, rtol=2e-3, atol=0)
        assert amp.skipped_steps() == (broken is not None)


# -- the value -------------------------------------------------------------------------------------------------------


def build(level="O1", *, lr=1.0, model=None, **options):
    model = Linear() if model is None else model
    optimizer = options.pop("optimizer", None) or SGD(model.parameters(), lr=lr)
    made = amp.initialize(model, optimizer, opt_level=level, **{"verbosity": 0, "loss_scale": "dynamic"} | options)
    for scaler in amp._amp_state.loss_scalers:
        if scaler.dynamic:
            scaler._loss_scale = 1024.0  # 65536, the gradient of a sum, is infinite in float16
    return made


class Linear(nn.Linear):
    """One weight of 1, no bias: the gradient of its output is its input."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)


def backward(model, optimizer, value, **options):
    loss = model(torch.full((1, 1), value)).sum()
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return scaled.detach() / loss.detach()


@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_is_multiplied_in_float32_and_gradients_are_divided(level):
    for scale in (1.0, 128.0, "256.0"):
        model, optimizer = build(level, loss_scale=scale)
        assert backward(model, optimizer, 3.0).item() == float(scale)
        (param,) = amp.master_params(optimizer)
        assert param.grad.item() == 3.0
        with amp.scale_loss(torch.tensor(1000.0, dtype=torch.float16), optimizer) as scaled:
            assert scaled.dtype == torch.float32
            assert scaled.item() == 1000.0 * float(scale)


@pytest.mark.parametrize("level", LEVELS)
def test_backwards_accumulate_also_when_the_scale_changes_between_them(level):
    model, optimizer = build(level)
    for k, scale in enumerate((2.0**8, 2.0**10, 2.0**4)):
        amp._amp_state.loss_scalers[0]._loss_scale = scale
        backward(model, optimizer, 1.0 + k)
    assert [param.grad.item() for param in amp.master_params(optimizer)] == [6.0]
    optimizer.step()
    assert model.weight.item() == -5.0


@pytest.mark.parametrize("level", LEVELS)
def test_unscaling_may_be_delayed(level):
    model, optimizer = build(level)
    for k, scale in enumerate((2.0**8, 2.0**10, 2.0**4)):
        amp._amp_state.loss_scalers[0]._loss_scale = scale
        backward(model, optimizer, 1.0 + k, delay_unscale=k < 2)
        if k < 2:
            assert model.weight.grad.item() == sum(range(1, k + 2)) * scale  # k + 1 gradients, at this scale
    assert [param.grad.item() for param in amp.master_params(optimizer)] == [6.0]
    assert amp._amp_state.loss_scalers[0]._unskipped == 1


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_clipped_on_what_the_optimizer_steps(level):
    model, optimizer = build(level)
    backward(model, optimizer, 8.0)
    assert torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5).item() == 8.0
    optimizer.step()
    assert model.weight.item() == pytest.approx(0.5, abs=1e-3)


def test_zeroing_within_the_block_is_no_harm():
    for level in ("O1", "O2"):
        model, optimizer = build(level)
        with amp.scale_loss(model(torch.full((1, 1), 0.5)).sum(), optimizer) as scaled:
            optimizer.zero_grad()
            scaled.backward()
        assert [param.grad.item() for param in amp.master_params(optimizer)] == [0.5]


def test_after_an_exception_within_the_block_gradients_are_rescaled_by_the_next():
    model, optimizer = build()
    amp._amp_state.loss_scalers[0]._loss_scale = 256.0

    def fail():
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    backward(model, optimizer, 2.0)
    assert model.weight.grad.item() == 3.0


def test_sparse_gradients_are_unscaled_and_judged():
    for level in ("O1", "O2"):
        model = nn.Embedding(4, 2, sparse=True)
        nn.init.ones_(model.weight)
        model, optimizer = build(level, model=model)
        amp._amp_state.loss_scalers[0]._loss_scale = 64.0
        for expected in ([-1.0, 1.0, 1.0, 0.0], [-1.0, 1.0, 1.0, 0.0]):
            loss = model(torch.tensor([0, 0, 3])).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
                if amp._amp_state.loss_scalers[0]._unskipped == 1:
                    model.weight.grad._values()[0] = INF
            optimizer.step()
            optimizer.zero_grad()
            assert model.weight[:, 0].tolist() == expected


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_weight_of_two_optimizers_and_an_optimizer_that_is_named_twice_are_unscaled_once(level):
    model = Linear()
    optimizers = [SGD(model.parameters(), lr=0.25), SGD(model.parameters(), lr=0.5)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale=64.0, verbosity=0)
    backward(model, [*optimizers, optimizers[0]], 1.0)
    assert [param.grad.item() for param in amp.master_params(optimizers[0])] == [1.0]
    for optimizer in optimizers:
        optimizer.step()
    assert model.weight.item() == 0.25
    model.zero_grad()
    backward(model, optimizers, 0.5)
    assert [param.grad.item() for param in amp.master_params(optimizers[1])] == [0.5]


def test_a_block_within_a_block_of_the_same_optimizer_is_refused():
    model, optimizer = build()
    with (
        pytest.raises(AmpError, match=r"^amp\.scale_loss within another one of the same optimizer, which would divide"),
        amp.scale_loss(X.sum(), optimizer),
        amp.scale_loss(X.sum(), optimizer),
    ):
        pass
    backward(model, optimizer, 2.0)
    assert model.weight.grad.item() == 2.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_with_gradients_that_are_still_scaled_is_refused(level):
    model, optimizer = build(level)
    message = r"^step\(\) while gradients are still multiplied by 1024: the last amp\.scale_loss of this optimizer had"
    backward(model, optimizer, 2.0, delay_unscale=True)
    with pytest.raises(AmpError, match=message):
        optimizer.step()
    with pytest.raises(AmpError, match=message):
        optimizer.step(lambda: backward(model, optimizer, 2.0, delay_unscale=True))
    assert model.weight.item() == 1.0
    optimizer.zero_grad()
    backward(model, optimizer, 0.5)
    optimizer.step()
    assert model.weight.item() == 0.5


# -- overflows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_after_an_overflow_the_step_is_skipped_counted_and_told_and_training_goes_on(level, caplog):
    model, optimizer = build(level, verbosity=1)
    caplog.set_level(logging.WARNING, "paceline.amp")
    for value in (0.25, INF, 0.25):
        optimizer.zero_grad()
        backward(model, optimizer, value)
        optimizer.step()
    assert model.weight.item() == 0.5
    assert (amp.skipped_steps(), optimizer._amp_stash.num_skipped) == (1, 1)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 1, "skipped": 1}}
    told = "the gradients of loss 0, scaled by 1024, have overflowed: step skipped, 1 so far."
    assert [record.getMessage() for record in caplog.records] == [told]


def test_with_a_static_scale_a_step_is_skipped_too():
    model, optimizer = build("O2", loss_scale=128.0)
    backward(model, optimizer, INF)
    optimizer.step()
    assert (model.weight.item(), amp.skipped_steps()) == (1.0, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_at_infinity_for_ever_the_scale_stops_at_its_floor_with_an_error_that_names_the_parameters(level):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.good, self.bad = Linear(), Linear()

        def forward(self, x):
            return self.good(x), self.bad(x)

    model, optimizer = build(level, model=Model(), min_loss_scale=2.0**6)
    scales = []
    message = (
        r"^loss 0: gradients have overflowed twice in a row, and the scale, 64, is its floor: a smaller one would "
        r"not help\. On this rank, gradients of bad\.weight are not finite\. Look for an infinite loss"
    )

    def train():
        for _ in range(10):
            optimizer.zero_grad()
            good, bad = model(torch.full((1, 1), 0.25))
            with amp.scale_loss(good.sum() + bad.sum() * INF, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scales.append(amp._amp_state.loss_scalers[0].loss_scale())

    with pytest.raises(LossScaleError, match=message):
        train()
    assert scales == [2.0**k for k in (9, 8, 7, 6)]
    assert [param.item() for param in amp.master_params(optimizer)] == [1.0, 1.0]


def test_one_of_two_models_is_named_by_its_number():
    models = [Linear(), Linear()]
    optimizer = SGD([param for model in models for param in model.parameters()], lr=1.0)
    models, optimizer = amp.initialize(models, optimizer, loss_scale=8.0, verbosity=0)
    backward(models[1], optimizer, INF)
    optimizer.zero_grad()
    message = r"the scale, 8, is a number that was chosen.*gradients of model 1: weight are not finite"
    with pytest.raises(LossScaleError, match=message):
        backward(models[1], optimizer, INF)


def test_a_delayed_check_skips_the_step_and_leaves_the_scale_to_the_next_block():
    model, optimizer = build()
    backward(model, optimizer, INF, delay_overflow_check=True)
    optimizer.step()
    assert (model.weight.item(), amp._amp_state.loss_scalers[0].loss_scale()) == (1.0, 1024.0)
    optimizer.zero_grad()
    backward(model, optimizer, 0.25)
    optimizer.step()
    assert (model.weight.item(), amp._amp_state.loss_scalers[0].loss_scale()) == (0.75, 512.0)


def test_losses_have_scales_of_their_own():
    """Loss k overflows in the first k of two backwards."""
    model, optimizer = build(num_losses=3)
    for step in range(2):
        optimizer.zero_grad()
        for index in range(3):
            backward(model, optimizer, INF if step < index else 0.25, loss_id=index)
        optimizer.step()
    assert [tuple(scaler.values()) for scaler in amp.state_dict().values()] == [
        (1024.0, 2, 0),
        (512.0, 1, 1),
        (256.0, 0, 2),
    ]


@pytest.mark.parametrize("before", [False, True], ids=["made after initialize", "made before"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_schedulers_do_not_complain_of_skipped_steps(level, before):
    model = Linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, 1) if before else None
    model, optimizer = build(level, model=model, optimizer=optimizer)
    scheduler = scheduler or StepLR(optimizer, 1)
    for value in (INF, 0.25):
        backward(model, optimizer, value)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()  # a warning would be an error here
    assert model.weight.item() == pytest.approx(1.0 - 0.25 * 0.1, abs=1e-3)


# -- closures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("values", [[0.25], [INF, 0.25]], ids=["finite", "overflow at first"])
def test_a_step_with_a_closure(level, values):
    model, optimizer = build(level)
    losses = []
    for value in values:

        def closure(value=value):
            optimizer.zero_grad()
            loss = model(torch.full((1, 1), value)).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses == values
    assert model.weight.item() == 0.75
    assert amp.skipped_steps() == len(values) - 1


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_that_overflows_half_way_is_evaluated_again_at_a_smaller_scale(level):
    model = Linear()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=10)
    model, optimizer = build(level, model=model, optimizer=optimizer)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 1)) - 3.0).square().sum() / 64
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            calls.append(amp._amp_state.loss_scalers[0].loss_scale())
            if len(calls) == 2:
                next(iter(model.parameters())).grad.fill_(INF)
        return loss

    optimizer.step(closure)
    assert calls[:3] == [1024.0, 1024.0, 512.0]
    assert model.weight.item() == pytest.approx(3.0, abs=0.01)


# -- out of order ----------------------------------------------------------------------------------------------------


def test_calls_out_of_order_say_what_is_missing():
    optimizer = SGD(Linear().parameters(), lr=1.0)
    before, amp._amp_state.session = amp._amp_state.session, None
    try:
        with pytest.raises(AmpError, match=r"^amp\.scale_loss before amp\.initialize\."), amp.scale_loss(X, optimizer):
            pass
        with pytest.raises(AmpError, match=r"^amp\.load_state_dict before amp\.initialize"):
            amp.load_state_dict({})
    finally:
        amp._amp_state.session = before
    build()
    message = r"^amp\.scale_loss with a SGD that has not been through amp\.initialize\."
    with pytest.raises(AmpError, match=message), amp.scale_loss(X, optimizer):
        pass
    message = r"^amp\.scale_loss without an optimizer: pass those whose parameters this backward reaches\.$"
    with pytest.raises(AmpError, match=message), amp.scale_loss(X, []):
        pass
    _, optimizer = build()
    message = r"^loss: expected a tensor, got list\. Add several losses up before\.$"
    with pytest.raises(TypeError, match=message), amp.scale_loss([X, X], optimizer):
        pass
    message = r"^loss_id=1, but amp\.initialize was told num_losses=1\.$"
    with pytest.raises(AmpError, match=message), amp.scale_loss(X, optimizer, loss_id=1):
        pass


def test_two_calls_of_initialize_serve_their_own_optimizers():
    first, second = build("O1"), build("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    assert (backward(*first, 1.0).item(), backward(*second, 1.0).item()) == (1024.0, 8.0)


def test_adams_state_is_that_of_the_masters():
    model = Linear()
    model, optimizer = build("O2", model=model, optimizer=Adam(model.parameters(), lr=0.5))
    backward(model, optimizer, 0.25)
    optimizer.step()
    (state,) = optimizer.state.values()
    assert state["exp_avg"].dtype == torch.float32
    assert model.weight.item() == pytest.approx(0.5, abs=1e-3)
