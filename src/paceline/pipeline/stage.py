"""One stage: its part of the model, and what it keeps of each microbatch between forward and backward.

What comes from the stage before enters the graph through ``_Entry``, so that it is no leaf: the part may write into it,
as it may in the whole model, and its gradient is caught without being stored in a tensor.

The invariant: a stage's graph never reaches into another stage's, and is kept from F to B only. Of outputs only their
place in the graph is kept, not their memory.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Module

from paceline.errors import PipelineError
from paceline.pipeline.shadows import Shadows
from paceline.pipeline.values import put_together, refuse_hidden, take_apart

Grads: TypeAlias = list[Tensor | None]
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Parcel:
    """What a stage passes on.

    Attributes:
        shell: the value without its tensors.
        tensors: detached, unless backward is to be autograd's own.
        wanted: for each, whether the sender wants its gradient.
    """

    shell: Any
    tensors: list[Tensor]
    wanted: tuple[bool, ...]

    def opened(self) -> Any:
        return put_together(self.shell, self.tensors)


@dataclass
class _Kept:
    """Of one microbatch, from F to B."""

    entry: "_Crossing"
    wanted: tuple[bool, ...]
    exits: list[GradientEdge | None]


@dataclass
class _Crossing:
    """Tensors on their way into a stage's graph, and their gradients on the way back."""

    tensors: list[Tensor]
    grads: Grads = field(default_factory=list)


class Stage:
    """A part of the model, run for one microbatch after another.

    Args:
        number: among all stages.
        part: takes what the stage before returned, as its only argument; the first stage's, the model's arguments.
        device: where it lies.
        root: the model of which it is a part.
    """

    def __init__(self, number: int, part: Module, device: torch.device, root: Module | None = None) -> None:
        self.number = number
        self.part = part
        self.device = device
        self.call: Callable[..., Any] = part  # or a wrapper that calls it
        self.overrides: dict[str, Tensor] = {}  # parameters that live elsewhere, copied for this step
        self.meter: Callable[[Tensor], None] | None = None  # told of each tensor that autograd keeps for backward
        self._shadows = Shadows(part, part if root is None else root)
        self._kept: dict[int, _Kept] = {}

    def begin(self) -> None:
        """Before each step: take over what has been replaced in the model."""
        self._shadows.renew(self.device)

    def first(self, microbatch: int, call: Call) -> Parcel:
        """Forward of the first stage, keeping what backward will need."""
        return self._leave(microbatch, _Crossing([]), (), self._run(*call))

    def forward(self, microbatch: int, parcel: Parcel) -> Parcel:
        """Forward of a later stage, keeping what backward will need."""
        crossing, value = _enter(parcel)
        return self._leave(microbatch, crossing, parcel.wanted, self._run((value,), {}))

    def last(self, microbatch: int, given: Parcel | Call, loss_of: Callable[[Any], Tensor] | None) -> Tensor:
        """Forward of the last stage, and of the loss.

        Args:
            loss_of: None where this microbatch counts for nothing: its loss may be 0 / 0, whose gradient would be NaN.
        Returns:
            The loss, detached.
        Raises:
            PipelineError: it is no scalar, or depends on nothing that is trained.
        """
        if isinstance(given, Parcel):
            crossing, value = _enter(given)
            wanted, output = given.wanted, self._run((value,), {})
        else:
            crossing, wanted, output = _Crossing([]), (), self._run(*given)
        loss = _nothing_of(output) if loss_of is None else loss_of(output)
        _check_loss(loss)
        self._leave(microbatch, crossing, wanted, loss)
        return loss.detach()

    def backward(self, microbatch: int, grads: Sequence[Tensor | None]) -> Grads:
        """Backward from the gradients of what was passed on.

        Returns:
            For each tensor that came in, its gradient; None where it had no part in it, or none is wanted.
        """
        kept = self._kept.pop(microbatch)
        pairs = [(edge, grad) for edge, grad in zip(kept.exits, grads, strict=True) if edge is not None]
        pairs = [(edge, grad) for edge, grad in pairs if grad is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        caught = iter(kept.entry.grads or [None] * sum(kept.wanted))
        return [next(caught) if wanted else None for wanted in kept.wanted]

    def evaluate(self, given: Parcel | Call) -> Parcel:
        """Forward that keeps nothing: without gradients, or with a graph that reaches through all stages."""
        call = ((given.opened(),), {}) if isinstance(given, Parcel) else given
        shell, tensors = take_apart(self._run(*call))
        return Parcel(shell, tensors, ())

    def forget(self) -> None:
        """Drop what a step that failed has left."""
        self._kept.clear()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _metered(self.meter):
            if self.overrides:
                return torch.func.functional_call(self.part, self.overrides, args, kwargs)
            return self.call(*args, **kwargs)

    def _leave(self, microbatch: int, entry: _Crossing, wanted: tuple[bool, ...], value: Any) -> Parcel:
        shell, tensors = take_apart(value)
        refuse_hidden(shell)
        exits = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
        entry.tensors.clear()
        self._kept[microbatch] = _Kept(entry, wanted, exits)
        return Parcel(shell, [tensor.detach() for tensor in tensors], tuple(edge is not None for edge in exits))


def _enter(parcel: Parcel) -> tuple[_Crossing, Any]:
    """What is in the parcel, as the beginning of a graph."""
    wanted = [tensor for tensor, is_wanted in zip(parcel.tensors, parcel.wanted, strict=True) if is_wanted]
    crossing = _Crossing(wanted)
    if not wanted:
        return crossing, parcel.opened()
    anchor = torch.empty(0, requires_grad=True)
    entered = iter(_Entry.apply(anchor, crossing))  # type: ignore[no-untyped-call]
    tensors = [
        next(entered) if is_wanted else tensor for tensor, is_wanted in zip(parcel.tensors, parcel.wanted, strict=True)
    ]
    return crossing, put_together(parcel.shell, tensors)


def _metered(meter: Callable[[Tensor], None] | None) -> contextlib.AbstractContextManager[Any]:
    if meter is None:
        return contextlib.nullcontext()

    def keep(tensor: Tensor) -> Tensor:
        meter(tensor)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


def _nothing_of(output: Any) -> Tensor:
    """0, with gradients of 0 for all that the output depends on."""
    _, tensors = take_apart(output)
    return torch.stack([(tensor * 0).sum().real.float() for tensor in tensors if tensor.requires_grad]).sum()


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        given = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PipelineError(
            f"expected the loss to be a floating-point scalar, got {given}. Pass `loss`, which makes one of the "
            "model's output and the target."
        )
    if not loss.requires_grad:
        raise PipelineError("the loss depends on no parameter that is trained; there is nothing to differentiate.")


class _Entry(Function):
    """From nothing to tensors that want gradients, and are no views: they may be written into."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, crossing: _Crossing) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in crossing.tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.crossing.grads = list(grads)
        return None, None


def retold(error: Exception, where: str) -> Exception:
    """The exception, of its own type, with its place in the pipeline."""
    message = f"{where}: {error}"
    try:
        return type(error)(message)
    except Exception:  # it wants other arguments
        return PipelineError(f"{message}\n({type(error).__name__})")
