"""What a bench trains in tests; each function makes a model and a batch."""

import torch
from torch import nn


def make():
    """Gradients of 2,002,000 bytes, and buffers of 4,008."""
    model = nn.Sequential(nn.Linear(1000, 500), nn.BatchNorm1d(500, affine=False))
    return model, (torch.randn(4, 1000), torch.zeros(4, 500))
