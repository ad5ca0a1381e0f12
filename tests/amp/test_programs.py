"""Whole programs, as people write them: what amp adds to them is nothing but fewer bits."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import OneCycleLR

from paceline import amp
from paceline.errors import AmpError


@pytest.fixture(autouse=True)
def off():
    yield
    amp.deactivate()


def critic_and_generator():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return [critic, generator], [Adam(critic.parameters(), lr=1e-2), Adam(generator.parameters(), lr=1e-2)]


def adversaries(options):
    """Two models, two optimizers, three losses, with accumulation, clipping, clamped weights, frozen ones, a parameter
    that joins, a scheduler, evaluation, and a checkpoint that is gone back to. What the parameters have become."""
    models, optimizers = critic_and_generator()
    late = nn.Parameter(torch.zeros(1))
    schedule = OneCycleLR(optimizers[1], max_lr=0.02, total_steps=20)
    scaled_by = amp.scale_loss
    if options is None:
        scaled_by = lambda loss, *_, **__: contextlib.nullcontext(loss)  # noqa: E731
    else:
        models, optimizers = amp.initialize(models, optimizers, num_losses=3, verbosity=0, **options)
    (critic, generator), (of_critic, of_generator) = models, optimizers
    draw = torch.Generator().manual_seed(3)
    real_is, fake_is = torch.ones(16, 1), torch.zeros(16, 1)

    def backward(output, is_what, optimizer, **how):
        with scaled_by(F.binary_cross_entropy_with_logits(output, is_what), optimizer, **how) as scaled:
            scaled.backward()

    for step in range(8):
        critic.zero_grad()
        for k in range(2):
            real, noise = torch.randn(16, 8, generator=draw), torch.randn(16, 4, generator=draw)
            backward(critic(real), real_is, of_critic, loss_id=0)
            backward(critic(generator(noise).detach()) + late, fake_is, of_critic, loss_id=1, delay_unscale=k == 0)
        nn.utils.clip_grad_norm_(list(amp.master_params(of_critic)), 0.5)
        of_critic.step()
        for param in critic.parameters():
            param.data.clamp_(-0.3, 0.3)
        generator.zero_grad()
        critic.requires_grad_(step % 2 == 0)
        backward(critic(generator(noise)), real_is, of_generator, loss_id=2)
        critic.requires_grad_(True)
        of_generator.step()
        schedule.step()
        if step == 3:
            late.grad = None
            of_critic.add_param_group({"params": [late], "lr": 0.1})
        if step == 4:
            parts = [critic, generator, of_critic, of_generator]
            saved, scales = copy.deepcopy([part.state_dict() for part in parts]), amp.state_dict()
        if step == 5:
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
            amp.load_state_dict(scales)
            generator.eval()
            with torch.no_grad():
                assert generator(noise).dtype == torch.float32
            generator.train()
    return [param.tolist() for param in (*critic.parameters(), *generator.parameters(), late)]


@pytest.mark.parametrize(
    "options",
    [
        {"opt_level": "O0", "loss_scale": 128.0},
        {"opt_level": "O1", "patch_torch_functions": False},
        {"opt_level": "O2", "cast_model_type": torch.float32},
    ],
    ids=["O0", "O1 without casts", "O2 in float32"],
)
def test_with_all_bits_a_program_ends_bit_by_bit_as_without_amp(options):
    assert adversaries(options) == adversaries(None)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_models_compute_and_train_as_others(level):
    def train(compiled):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
        called = compiled(model)
        for _ in range(2):
            with amp.scale_loss(called(torch.ones(2, 4)).sum() / 1024, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [value.tolist() for value in model.state_dict().values()]

    expected = train(lambda model: model)
    assert train(lambda model: torch.compile(model, backend="eager")) == expected
    assert train(lambda model: model.compile(backend="eager") or model) == expected


def test_an_optimizer_whose_weight_was_replaced_says_so():
    model = nn.Linear(2, 1)
    model, optimizer = amp.initialize(model, SGD(model.parameters(), lr=1.0), opt_level="O2", verbosity=0)
    model.weight = nn.Parameter(torch.ones(1, 2, dtype=torch.float16))
    with pytest.raises(
        AmpError, match=r"^a weight of which this optimizer steps a master is gone: the model was deleted"
    ):
        optimizer.step()
