"""Casting a model's parameters and buffers, for good.

The invariant: parameters stay the objects they are, so an optimizer of them stays right.
"""

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import AmpError

HALF = (torch.float16, torch.bfloat16)


def cast_model(model: Module, dtype: torch.dtype, *, keeps_batchnorm: bool) -> None:
    """Cast all floating-point parameters and buffers of ``model``, batch normalisation left out if so told."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for module in model.modules():
        if not (keeps_batchnorm and isinstance(module, _BatchNorm)):
            module._apply(cast, recurse=False)  # type: ignore[no-untyped-call]


def check_is_whole(model: Module) -> None:
    """Raise an AmpError if the caller has cast a parameter or a buffer to half precision himself."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.dtype in HALF:
                raise AmpError(
                    f"{kind} {name!r} of {type(model).__name__} has dtype {tensor.dtype}, expected torch.float32. Do "
                    "not call .half() or .bfloat16() before amp.initialize: the opt level casts what is to be cast."
                )
