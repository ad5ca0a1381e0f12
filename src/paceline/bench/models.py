"""Models that a bench brings along, each made as a user's own function would make it.

The invariant: they need no file and no download, and train on random numbers, which take as long as real ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, scaled_dot_product_attention

_WORDS, _LENGTH = 256, 128  # of the language model


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))  # (batch, time, 3, heads, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, time, head_dim)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class GPT(nn.Module):
    """A small one: 10.9 million parameters as it is."""

    def __init__(self, num_layers: int = 6, width: int = 384, num_heads: int = 6, vocabulary: int = _WORDS) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(_LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, vocabulary)."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class UNet(nn.Module):
    """Two levels down and up again, with BatchNorm: 0.5 million parameters as it is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second, self.bottom = _twice(3, width), _twice(width, 2 * width), _twice(2 * width, 4 * width)
        self.down = nn.MaxPool2d(2)
        self.up_2, self.up_1 = _up(4 * width), _up(2 * width)
        self.back_2, self.back_1 = _twice(4 * width, 2 * width), _twice(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, 1, height, width)."""
        first = self.first(images)
        second = self.second(self.down(first))
        x = self.up_2(self.bottom(self.down(second)))
        x = self.up_1(self.back_2(torch.cat([x, second], 1)))
        mask: Tensor = self.head(self.back_1(torch.cat([x, first], 1)))
        return mask


def _twice(inner: int, outer: int) -> nn.Module:
    layers = [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    layers += [nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
    return nn.Sequential(*layers)


def _up(width: int) -> nn.Module:
    return nn.ConvTranspose2d(width, width // 2, 2, stride=2)


def mnist_net() -> nn.Module:
    """The net of torch's MNIST example, without its dropout: 1.2 million parameters."""
    conv = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*conv, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def mnist(batch_size: int = 32) -> tuple[Any, ...]:
    """Digits of 28 x 28 pixels."""
    batch = torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    return mnist_net(), batch, nn.CrossEntropyLoss()


def unet(batch_size: int = 4) -> tuple[Any, ...]:
    """Masks of images of 64 x 64 pixels."""
    batch = torch.randn(batch_size, 3, 64, 64), torch.rand(batch_size, 1, 64, 64).round()
    return UNet(), batch, binary_cross_entropy_with_logits


def gpt(batch_size: int = 2) -> tuple[Any, ...]:
    """The next of 128 words."""
    words = torch.randint(_WORDS, (batch_size, _LENGTH + 1))
    return GPT(), (words[:, :-1], words[:, 1:]), _loss_of_words


def _loss_of_words(logits: Tensor, words: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), words.flatten())


BUILT_IN: dict[str, Callable[..., tuple[Any, ...]]] = {"mnist": mnist, "unet": unet, "gpt": gpt}
