"""A model's forward with casts around it.

The forward is replaced on the instance, as Apex does, so that ``model.forward(x)`` is cast too. It calls the class's
forward on the module that it belongs to: copies of the model, pickled models and DataParallel's replicas get their own.

The invariant: nothing but the forwards of the models given is changed, and ``unwrap`` leaves no trace.
"""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from paceline.amp.casts import casting
from paceline.amp.convert import HALF
from paceline.parallel.data_parallel.containers import parts_of, with_parts


@dataclass(frozen=True)
class Casts:
    """What to cast around a forward.

    Attributes:
        inputs: the dtype of floating-point inputs; None leaves them alone.
        functions: the dtype of functions within, as under O1; None leaves them alone.
        outputs: the dtype of floating-point outputs; None makes float32 of half-precision ones.
    """

    inputs: torch.dtype | None = None
    functions: torch.dtype | None = None
    outputs: torch.dtype | None = None


class Forward:
    """The forward of one module, with casts around it."""

    def __init__(self, module: Module, casts: Casts, inner: Callable[..., Any] | None = None) -> None:
        self._module, self._casts, self.inner = module, casts, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        casts = self._casts
        if casts.inputs is not None:
            args, kwargs = cast_inputs(args, casts.inputs), cast_inputs(kwargs, casts.inputs)
        with contextlib.nullcontext() if casts.functions is None else casting(self._module, casts.functions):
            output = self._original(*args, **kwargs)
        return cast_outputs(output, casts.outputs)

    @property
    def _original(self) -> Callable[..., Any]:
        return self.inner or type(self._module).forward.__get__(self._module)

    @property
    def __signature__(self) -> inspect.Signature:  # libraries choose a batch's columns by it
        return inspect.signature(self._original)

    def replicate(self) -> Module:
        """A replica of the module, for DataParallel, with a forward of its own."""
        replica: Module = type(self._module)._replicate_for_data_parallel(self._module)  # type: ignore[no-untyped-call]
        replica.__dict__["forward"] = Forward(replica, self._casts, self.inner)
        return replica


def wrap(module: Module, casts: Casts) -> None:
    """Put ``casts`` around the module's forward, in the place of any that were there."""
    unwrap(module)
    forward = Forward(module, casts, module.__dict__.get("forward"))
    module.__dict__["forward"] = forward
    module.__dict__["_replicate_for_data_parallel"] = forward.replicate


def unwrap(module: Module) -> None:
    """Give the module back the forward that it had."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, Forward):
        del module.__dict__["forward"], module.__dict__["_replicate_for_data_parallel"]
        if forward.inner is not None:
            module.__dict__["forward"] = forward.inner


def cast_inputs(item: Any, dtype: torch.dtype) -> Any:
    """``item`` with all floating-point tensors cast: in containers too, and in batches with a ``to`` of their own."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        has_to = callable(getattr(leaf, "to", None)) and not isinstance(leaf, (Module, type))
        return leaf.to(dtype) if has_to else leaf

    return _map(item, cast)


def cast_outputs(item: Any, dtype: torch.dtype | None) -> Any:
    """``item`` with floating-point tensors in ``dtype``; with None, those of half precision in float32."""

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if dtype is None:
            return leaf.float() if leaf.dtype in HALF else leaf
        return leaf.to(dtype)

    return _map(item, cast)


def _map(item: Any, cast: Callable[[Any], Any]) -> Any:
    """``item`` itself where ``cast`` changes none of its leaves."""
    parts = None if isinstance(item, Tensor) else parts_of(item)
    if not parts:
        return cast(item)
    values = [_map(value, cast) for _, value in parts]
    is_same = all(new is old for new, (_, old) in zip(values, parts, strict=True))
    return item if is_same else with_parts(item, values)
