"""torch's ``mixed_precision=`` of DistributedDataParallel: forward and backward in fewer bits, weights in all.

The module is called with copies of its parameters in ``param_dtype``. The copies are made within autograd, so gradients
come back through them in the parameters' own dtype, to the same hooks as ever, on any device.

The invariant: the module's own parameters, what an optimizer sees and what a checkpoint holds keep their dtype.
"""

import functools
from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _cast_forward_inputs
from torch.func import functional_call
from torch.nn import Module

from paceline.parallel.buckets.hooked import GradBucket, Hook


class LowPrecision:
    """Calls a module in the dtypes of ``config``.

    Args:
        config: torch's ``_MixedPrecision``: ``param_dtype``, ``reduce_dtype``, ``buffer_dtype``; each may be None.
        ignored: names of parameters and buffers to leave alone.
    """

    def __init__(self, config: Any, ignored: Set[str]) -> None:
        self._param_dtype: torch.dtype | None = config.param_dtype
        self._buffer_dtype: torch.dtype | None = config.buffer_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype
        self._ignored = ignored

    def cast_buffers(self, module: Module) -> None:
        """For good, as torch does."""
        for name, buffer in module.named_buffers():
            if self._buffer_dtype is not None and buffer.is_floating_point() and name not in self._ignored:
                buffer.data = buffer.to(self._buffer_dtype)

    def call(self, module: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``module(*inputs, **kwargs)``, with floating-point inputs cast too."""
        dtype = self._param_dtype
        if dtype is None:
            return module(*inputs, **kwargs)
        cast = {
            name: param.to(dtype)
            for name, param in module.named_parameters()
            if param.is_floating_point() and name not in self._ignored
        }
        inputs, kwargs = _cast_forward_inputs(dtype, *inputs, **kwargs)
        return functional_call(module, cast, inputs, kwargs)


def reduce_in(dtype: torch.dtype, group: dist.ProcessGroup) -> Hook:
    """A communication hook that averages in ``dtype``."""
    return functools.partial(_average, dtype, group)


def _average(
    dtype: torch.dtype, group: dist.ProcessGroup, _: object, bucket: GradBucket
) -> "torch.futures.Future[torch.Tensor]":
    # Divided before it is summed: a sum in few bits could overflow.
    narrow = bucket.buffer().div(dist.get_world_size(group)).to(dtype)
    future: torch.futures.Future[Any] = dist.all_reduce(narrow, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
