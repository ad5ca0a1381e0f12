"""Training to the same accuracy under all levels."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from paceline import amp

pytestmark = pytest.mark.slow

BRAIN = torch.bfloat16
CASES = {
    "O1, float16": ("O1", {}),
    "O1, bfloat16": ("O1", {"patch_torch_functions_type": BRAIN}),
    "O2, float16": ("O2", {}),
    "O2, bfloat16": ("O2", {"cast_model_type": BRAIN}),
    "O2, static scale": ("O2", {"loss_scale": "128.0"}),
    "O2, batch normalisation cast too": ("O2", {"keep_batchnorm_fp32": "False"}),
    "O3, float16": ("O3", {}),
    "O3, dynamic scale": ("O3", {"loss_scale": "dynamic", "keep_batchnorm_fp32": True}),
}


def accuracy(level, **options):
    """Of ten epochs with 1437 of the digits, on the other 360."""
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    try:
        for _ in range(10):
            for batch in train.split(96):
                optimizer.zero_grad()
                with amp.scale_loss(nn.functional.cross_entropy(model(x[batch]), y[batch]), optimizer) as scaled:
                    scaled.backward()
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
                optimizer.step()
        model.eval()
        with torch.no_grad():
            return (model(x[test]).argmax(1) == y[test]).float().mean().item()
    finally:
        amp.deactivate()


@pytest.fixture(scope="module")
def in_full():
    return accuracy("O0")


def test_float32_learns(in_full):
    assert in_full > 0.95


@pytest.mark.parametrize("case", CASES)
def test_fewer_bits_learn_as_well(case, in_full):
    level, options = CASES[case]
    assert accuracy(level, **options) >= in_full - 0.02
