"""Gradients multiplied by a loss scale, and freed of it; and whether they are finite.

The invariant: what is accumulated onto a gradient carries the same factor as the gradient, so sums stay sums, and an
average over ranks stays the average of all that the ranks have accumulated.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.amp.masters import Master


@torch.no_grad()
def multiply(params: Iterable[Tensor], factor: float) -> None:
    """Multiply the gradients that there are, in place."""
    if factor != 1.0:
        for grads in _by_kind(params):
            torch._foreach_mul_(grads, factor)


@torch.no_grad()
def divide(params: Iterable[Tensor], scale: float) -> list[Tensor]:
    """Divide the gradients that there are by ``scale``, in place.

    Returns:
        One number a device, which is not 0 where a gradient is not finite. (1,)
    """
    verdicts: dict[torch.device, tuple[Tensor, Tensor]] = {}
    for grads in _by_kind(params):
        device = grads[0].device
        if device not in verdicts:
            verdicts[device] = torch.zeros(1, device=device), torch.full((1,), 1.0 / scale, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, *verdicts[device])
    return [verdict for verdict, _ in verdicts.values()]


@torch.no_grad()
def move_to_masters(masters: Iterable[Master], scale: float) -> list[Tensor]:
    """Add the gradients of the model's weights, divided by ``scale``, to those of their masters, in float32.

    The weights are left without gradients. An overflow shows up in the masters' gradients.

    Returns:
        As ``divide``.
    """
    before: list[tuple[Tensor, Tensor]] = []
    fresh: list[Tensor] = []
    for master in masters:
        param, weight = master.param, master.weight
        if param.grad is None:
            continue
        if weight.grad is not None:
            before.append((weight, weight.grad))
        weight.grad = param.grad.float()
        param.grad = None
        fresh.append(weight)
    verdicts = divide(fresh, scale)
    for held, grad in before:
        assert held.grad is not None
        held.grad = grad + held.grad if held.grad.is_sparse else held.grad.add_(grad)
    return verdicts


def is_finite(param: Tensor) -> bool:
    """Whether its gradient, if it has one, holds neither infinity nor NaN."""
    return param.grad is None or bool(torch.isfinite(_values_of(param)).all())


def _by_kind(params: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Gradients, apart by device and dtype, as torch's functions of many tensors want them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            values = _values_of(param)
            kinds.setdefault((values.device, values.dtype), []).append(values)
    return kinds.values()


def _values_of(param: Tensor) -> Tensor:
    """The numbers of its gradient, in its memory."""
    assert param.grad is not None
    if not param.grad.is_sparse:
        return param.grad
    if not param.grad.is_coalesced():
        param.grad = param.grad.coalesce()  # rows that are there twice may overflow when they are added
    return param.grad._values()
