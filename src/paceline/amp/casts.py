"""Each function in the dtype that suits it, within a model's forward: what O1 does.

torch.autocast does it. On CPUs its list of functions that want float32 is short: half-precision sums, powers and
softmaxes stay in half precision. A function mode adds what torch.autocast has on GPUs, and Apex has everywhere.

The invariant: nothing is cast where autocast is off, so a module outside of the block, and one within that switches
autocast off, compute as ever.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from paceline.amp.convert import HALF
from paceline.parallel.data_parallel.containers import parts_of, with_parts

_FLOAT = """
    acos asin cosh cumprod cumsum dist erfinv exp expm1 log log10 log1p log2 logsumexp norm pow __pow__ __rpow__ prod
    reciprocal renorm rsqrt sinh std sum tan var
    cosine_similarity group_norm interpolate layer_norm local_response_norm log_softmax normalize pairwise_distance
    softmax softmin softplus
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy hinge_embedding_loss
    huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_HALF = "addmv addr mv"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot tensordot"


def to_float(item: Any) -> Any:
    """``item`` with half-precision tensors in float32, in lists, tuples and dicts too."""
    return _map(item, lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)


def to_half(item: Any, dtype: torch.dtype) -> Any:
    """``item`` with float32 tensors, and those of the other half precision, in ``dtype``."""
    return _map(item, lambda tensor: tensor.to(dtype) if tensor.dtype in (torch.float32, *HALF) else tensor)


def to_widest(item: Any) -> Any:
    """``item`` with all floating-point tensors in the widest dtype among them."""
    dtypes = {tensor.dtype for tensor in _tensors_in(item) if tensor.is_floating_point()}
    if len(dtypes) < 2:
        return item
    widest = dtypes.pop()
    for dtype in dtypes:
        widest = torch.promote_types(widest, dtype)
    return _map(item, lambda tensor: tensor.to(widest) if tensor.is_floating_point() else tensor)


@contextlib.contextmanager
def casting(module: Module, dtype: torch.dtype) -> Iterator[None]:
    """Have torch choose between ``dtype`` and float32 for each function, on the module's device."""
    kind = device_type_of(module)
    with torch.autocast(kind, dtype=dtype), CpuCasts() if kind == "cpu" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Compute in the dtypes that tensors have, in a block within the forward of a model under O1; Apex's call.

    It is ``torch.autocast(..., enabled=False)`` for all devices there are.
    """
    with contextlib.ExitStack() as stack:
        for kind in {"cpu", _accelerator()}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def device_type_of(module: Module) -> str:
    """Of its first parameter or buffer; without any, of the accelerator, if there is one."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device.type
    return _accelerator()


def _accelerator() -> str:
    """The type of the accelerator that is here; "cpu" without one."""
    here = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if here is None else here.type


def autocast_dtype_of(item: Any) -> torch.dtype | None:
    """To what autocast casts the tensors in ``item`` now; None where it is off for their device."""
    for tensor in _tensors_in(item):
        kind = tensor.device.type
        is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if is_on else None
    return None


class CpuCasts(TorchFunctionMode):
    """What torch.autocast leaves undone on CPUs.

    [Note: backward] Checkpointed layers compute once more in backward, where torch brings autocast back, but no mode.
    So ``scale_loss`` has this mode in its block as well, and the mode sees to it that it is there in ``backward()`` of
    a scalar, too.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].numel() == 1 and not any(map(kwargs.get, _RARE)):
            with self:  # what torch calls itself would run with this mode switched off
                return _backward(args[0], bool(kwargs.get("retain_graph")))
        if torch.is_autocast_enabled("cpu"):
            if func is torch.lstm and torch.get_autocast_dtype("cpu") == torch.float16:  # torch has no kernel for it
                with torch.autocast("cpu", enabled=False):
                    return func(*to_float(args), **to_float(kwargs))
            if (cast := _CASTS.get(func)) is not None and kwargs.get("out") is None:  # a cast ``out`` would be a copy
                args, kwargs = cast((args, kwargs))
        return func(*args, **kwargs)


_RARE = ("gradient", "create_graph", "inputs")  # arguments of backward


def _backward(loss: Tensor, keep_graph: bool) -> None:
    """``loss.backward(retain_graph=keep_graph)``, past the checks that switch function modes off."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), keep_graph, False, (), True, True)


def _find(names: str) -> Iterator[Any]:
    """The functions of these names, wherever torch has them."""
    for name in names.split():
        for place in (torch, torch.Tensor, F):
            if callable(function := getattr(place, name, None)):
                yield function


def _to_half_of_cpu(item: Any) -> Any:
    return to_half(item, torch.get_autocast_dtype("cpu"))


_CASTS: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys(_find(_WIDEST), to_widest),
    **dict.fromkeys(_find(_HALF), _to_half_of_cpu),
    **dict.fromkeys(_find(_FLOAT), to_float),
}


def _tensors_in(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    for _, part in parts_of(item) or ():
        yield from _tensors_in(part)


def _map(item: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return cast(item)
    parts = parts_of(item)
    if not parts:
        return item
    values = [_map(value, cast) for _, value in parts]
    is_same = all(new is old for new, (_, old) in zip(values, parts, strict=True))
    return item if is_same else with_parts(item, values)
