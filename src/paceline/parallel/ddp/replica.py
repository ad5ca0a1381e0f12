"""A replica: this rank's copy of a module, and what ties it to those of the other ranks.

The invariant: registry, channels and reducer are made together, by all ranks, for one module over one process group. A
wrapper for which either becomes another one makes a new replica.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn import Module

from paceline.parallel.buckets.hooked import Hook
from paceline.parallel.ddp.arguments import Caps
from paceline.parallel.ddp.mixed_precision import reduce_in
from paceline.parallel.reducer.channels import Channels, make_offer, open_channels
from paceline.parallel.reducer.reducer import Reducer, collect_abandoned
from paceline.parallel.replicas.broadcast import broadcast_tensors
from paceline.parallel.replicas.registry import Registry


@dataclass(frozen=True)
class Terms:
    """What a wrapper's arguments say of its replicas.

    Attributes:
        ignored: names of parameters and buffers to leave alone.
        is_fixed: whether the parameters are those of the beginning, whatever becomes of the module.
        device_type: on which the parameters are.
        detects_drift: whether weights are to be compared; they are where all ranks want it.
        copies_params, copies_buffers: whether the first rank's are copied to all in the beginning.
        reduce_dtype: in which gradients are averaged; None for their own.
    """

    ignored: set[str]
    is_fixed: bool
    device_type: str
    caps: Caps
    detects_drift: bool
    copies_params: bool
    copies_buffers: bool
    reduce_dtype: torch.dtype | None


class Replica:
    """Of ``module``, among the ranks of ``group``. A collective call, in which they agree on its parameters.

    Args:
        with_buffers: whether buffers are copied before forwards, and so must agree.
        hook: the user's own way to average, and its state.
        copies: whether the first rank's parameters and buffers are copied to all, if the terms say so.

    Attributes:
        reducer: None in a world of one, unless it has a hook: there is nothing to agree on, and nothing to average.
    """

    def __init__(
        self,
        module: Module,
        group: dist.ProcessGroup,
        terms: Terms,
        *,
        with_buffers: bool,
        hook: tuple[object, Hook] | None,
        copies: bool,
    ) -> None:
        copies_buffers = terms.copies_params and terms.copies_buffers
        with_buffers = with_buffers or copies_buffers
        self.registry = Registry(module, terms.ignored, with_buffers=with_buffers, is_fixed=terms.is_fixed)
        self.reducer: Reducer | None = None
        if dist.get_world_size(group) == 1 and hook is None:
            return
        collect_abandoned(module.parameters())
        told = self.registry.agree(group, extra=(make_offer(group), terms.detects_drift))
        offers = [offer for offer, _ in told]
        self.channels: Channels = open_channels(group, terms.device_type, offers, owner=self.registry)
        caps_bytes = terms.caps.in_bytes(terms.device_type, is_shared=self.channels.averages is not None)
        detects_drift = all(wanted for _, wanted in told)
        self.reducer = Reducer(self.registry, self.channels, caps_bytes, detects_drift=detects_drift)
        if hook is not None:
            self.reducer.use_hook(*hook, keeps_replicas_equal=False)
        elif terms.reduce_dtype is not None:
            narrow = reduce_in(terms.reduce_dtype, self.channels.gradients)
            self.reducer.use_hook(None, narrow, keeps_replicas_equal=True)
        if copies and terms.copies_params:
            buffers = self.registry.buffers() if copies_buffers else []
            broadcast_tensors([*self.registry.params, *buffers], group)
