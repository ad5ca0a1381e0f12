"""Apex's parallel package: its wrapper, its Reducer, its conversion to SyncBatchNorm, and LARC.

The invariant: with equal weights at the start, ranks get the same gradients out of each of them, bit by bit.
"""

import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from paceline.errors import ReductionError
from paceline.parallel.buckets.hooked import GradBucket
from paceline.parallel.ddp.wrapper import DistributedDataParallel as _DistributedDataParallel
from paceline.parallel.replicas.broadcast import broadcast_tensors
from paceline.parallel.sync_batchnorm import SyncBatchNorm

_MIB = 1 << 20
_UNLIMITED_MIB = 1 << 40


class DistributedDataParallel(_DistributedDataParallel):
    """Average gradients over all ranks, with Apex's arguments; otherwise ``paceline.DistributedDataParallel``.

    Args:
        module: the model, alike on all ranks, which get the first rank's weights.
        message_size: elements of gradients that travel together.
        delay_allreduce: have all gradients travel together, when backward has ended.
        shared_param: no longer an argument in Apex: give None.
        allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams, allreduce_communicators, prof:
            accepted and not needed; they are about how Apex overlaps, and profiles itself.
        allreduce_always_fp32: sum half-precision gradients in float32.
        gradient_average: divide the sum by the number of ranks.
        gradient_predivide_factor: divide by it before summing, against overflows; the average is then made from that
            sum. Without ``gradient_average`` the result stays divided by it.
        gradient_average_split_factor: Apex's older name of it: give None.
        process_group: the ranks that take part; by default all.
    Raises:
        ValueError: ``shared_param`` or ``gradient_average_split_factor`` is given; or as torch's wrapper.
    """

    def __init__(
        self,
        module: Module,
        message_size: int = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: object = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        del allreduce_trigger_params, retain_allreduce_buffers, num_allreduce_streams, allreduce_communicators, prof
        if shared_param is not None:
            raise ValueError("shared_param is no longer an argument: shared parameters are always right. Leave it out.")
        if gradient_average_split_factor is not None:
            raise ValueError("gradient_average_split_factor has become gradient_predivide_factor. Use that.")
        widest = max((param.element_size() for param in module.parameters()), default=1)
        cap = _UNLIMITED_MIB if delay_allreduce else message_size * widest / _MIB
        super().__init__(module, process_group=process_group, bucket_cap_mb=cap)
        if allreduce_always_fp32 or not gradient_average or gradient_predivide_factor != 1.0:
            world_size = dist.get_world_size(self.process_group)
            hook = functools.partial(
                _reduce,
                self.process_group,
                allreduce_always_fp32,
                gradient_predivide_factor,
                gradient_predivide_factor / world_size if gradient_average else 1.0,
            )
            self.register_comm_hook(None, hook)

    def disable_allreduce(self) -> None:
        """Leave gradients local in the backwards to come, as in ``no_sync``."""
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Average in the backwards to come, and what has been accumulated with them."""
        self.require_backward_grad_sync = True


def _reduce(
    group: dist.ProcessGroup, in_float: bool, before: float, after: float, _: object, bucket: GradBucket
) -> "torch.futures.Future[torch.Tensor]":
    """A communication hook: divide by ``before``, sum, multiply by ``after``."""
    buffer = bucket.buffer()
    wire = (buffer.float() if in_float else buffer).div(before)
    future: torch.futures.Future[Any] = dist.all_reduce(wire, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].mul_(after).to(buffer.dtype))


_reducers: "weakref.WeakKeyDictionary[Reducer, int]" = weakref.WeakKeyDictionary()  # in the order of this number
_numbers = itertools.count()


class Reducer:
    """Averages gradients when it is told to, and not before; Apex's class of that name.

        reducer = Reducer(model)  # every rank gets the first rank's weights
        loss.backward()
        reducer.reduce()

    Args:
        module_or_grads_list: a module, whose weights are copied from the first rank; or the gradients to average.
        process_group: the ranks that take part; by default all.
    Attributes:
        module: whose gradients are averaged; an empty one for a list of gradients.
    """

    def __init__(
        self, module_or_grads_list: Module | Iterable[Tensor], *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.process_group = process_group
        self._grads: list[Tensor] | None = None
        if isinstance(module_or_grads_list, Module):
            self.module = module_or_grads_list
            broadcast_tensors(list(self.module.parameters()), self._group)
        else:
            self.module = Module()
            self._grads = list(module_or_grads_list)
        _reducers[self] = next(_numbers)

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.process_group or dist.distributed_c10d._get_default_group()

    @torch.no_grad()
    def reduce(self) -> None:
        """Replace each gradient by its average over the ranks. A collective call.

        A parameter of the module that only some ranks have used counts as zero on the others; of a list, ranks must
        have the same gradients.

        Raises:
            ReductionError: a gradient is sparse.
        """
        grads = self._grads or self._grads_of_module()
        if any(grad.is_sparse for grad in grads):
            raise ReductionError(
                "a Reducer averages dense gradients, and one of these is sparse. Use DistributedDataParallel, or an "
                "embedding with sparse=False."
            )
        world_size = dist.get_world_size(self._group)
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for grad in grads:
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
        for members in kinds.values():
            flat = torch.cat([grad.reshape(-1) for grad in members]).div_(world_size)
            dist.all_reduce(flat, group=self._group)
            for grad, part in zip(members, torch.split(flat, [grad.numel() for grad in members]), strict=True):
                grad.copy_(part.view_as(grad))

    def _grads_of_module(self) -> list[Tensor]:
        """The gradients that any rank has, zeros where this one has not. A collective call."""
        params = list(self.module.parameters())
        if not params:
            return []
        is_used = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8, device=params[0].device)
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self._group)
        for param, used in zip(params, is_used.tolist(), strict=True):
            if used and param.grad is None:
                param.grad = torch.zeros_like(param)
        return [param.grad for param in params if param.grad is not None]


def reducers() -> list[Reducer]:
    """Those that there are, the latest for each module, in the order in which they were made."""
    return list({id(each.module): each for each in sorted(_reducers, key=_reducers.__getitem__)}.values())


def numbers_of_reducers() -> tuple[int, ...]:
    """It changes when there are other ones."""
    return tuple(_reducers.values())


def convert_syncbn_model(
    module: Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> Module:
    """Replace every batch normalisation by one over all ranks; ``SyncBatchNorm.convert_sync_batchnorm`` by Apex's name.

    Args:
        channel_last: accepted, not needed: memory formats are kept.
    """
    del channel_last
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


class LARC(Optimizer):
    """An optimizer whose learning rate for each parameter follows the ratio of weight to gradient; Apex's wrapper.

    With w the weight, g its gradient and d the weight decay, the local rate is
    trust_coefficient * |w| / (|g| + d * |w| + eps).

    Args:
        optimizer: what takes the steps.
        trust_coefficient: how much a step may change a weight.
        clip: the local rate is the most that a parameter gets; False multiplies the optimizer's rate by it.
        eps: against a division by zero.
    Source: You, Gitman and Ginsburg 2017, "Large Batch Training of Convolutional Networks".
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer  # torch's constructor would make groups of its own
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps
        self.defaults = optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The optimizer's."""
        return self.optim.state

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the optimizer."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the optimizer."""
        self.optim.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optim", "trust_coefficient", "clip", "eps")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state.pop("optim"), **state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def step(self, closure: Any = None) -> Any:
        """Scale gradients by the local rates, weight decay included, and take the optimizer's step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay", 0) for group in self.param_groups]
        try:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = 0  # it is in the gradients
                self._scale(group, decay)
            self.optim.step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                if "weight_decay" in group:
                    group["weight_decay"] = decay
        return loss

    @torch.no_grad()
    def _scale(self, group: dict[str, Any], decay: float) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            weight, grad = param.norm(), param.grad.norm()
            rate = self.trust_coefficient * weight / (grad + weight * decay + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            is_moved = (weight != 0) & (grad != 0)
            param.grad.add_(param * torch.where(is_moved, decay, 0.0)).mul_(torch.where(is_moved, rate, 1.0))
