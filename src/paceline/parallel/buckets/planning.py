"""The plan that is in force: in which order gradients are expected, and in which buckets they travel.

The invariant: all ranks make the same buckets of the same parameters, since all that counts here is the same on them:
the order, who trains, what kinds the parameters are.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.memory.averages import Averages
from paceline.parallel.buckets.bucket import Bucket, Member
from paceline.parallel.buckets.dense import DenseBucket
from paceline.parallel.buckets.hooked import Hook, HookedBucket
from paceline.parallel.buckets.shared import SharedBucket
from paceline.parallel.buckets.sparse import SparseBucket
from paceline.parallel.fields import kinds, trainable
from paceline.parallel.replicas.registry import Registry
from paceline.plan import ParamSpec, plan_buckets


class Planner:
    """Makes buckets for the parameters of ``registry``.

    Args:
        caps_bytes: of the buckets, in turn; see ``plan_buckets``.
        averages: of gradients that lie in memory which the ranks share, if they share any.

    Attributes:
        hook: a communication hook and its state, which averages all planned gradients that are not sparse.
        hook_gives_average: over all ranks; else what it gives is left as it is.
        is_learnt: whether the order is that in which gradients have arrived.
        trainable: by parameter, 1 where it trained when the plan was made, so that the plan has it.
        kinds: of the parameters, when the plan was made.
        buckets: in the order of launches.
        place_of: the number and the bucket of each planned parameter, by its id: a hook runs for each parameter in each
            step, and Python's hash of a tensor is slow.
    """

    def __init__(
        self, registry: Registry, world_size: int, caps_bytes: Sequence[int], averages: Averages | None
    ) -> None:
        self.caps_bytes = tuple(caps_bytes)
        self.hook: tuple[Any, Hook] | None = None
        self.hook_gives_average = False
        self._registry = registry
        self._world_size = world_size
        self._averages = averages
        self.forget_order()
        self.plan()

    def plan(self) -> None:
        """For the parameters that train now."""
        params = self._registry.params
        self.trainable, self.kinds = trainable(params), kinds(params)
        self.buckets = self.buckets_of([index for index in self._order if self.trainable[index]], self.hook)
        self.place_of = {id(m.param): (m.index, bucket) for bucket in self.buckets for m in bucket.members}

    def forget_order(self) -> None:
        """Expect gradients last first, which is as far as can be told before any has arrived."""
        self._order = list(range(len(self._registry.params)))[::-1]
        self.is_learnt = False

    def learn_order(self, arrived: Iterable[int], group: dist.ProcessGroup) -> None:
        """Expect gradients as they have arrived on the first rank, given as ids of parameters. A collective call."""
        known = dict.fromkeys(self.place_of[number][0] for number in arrived if number in self.place_of)
        rest = [index for index in self._order if index not in known]
        order = torch.tensor([*known, *rest], dtype=torch.int64, device="cpu")
        dist.broadcast(order, group=group, group_src=0)
        self._order = order.tolist()
        self.is_learnt = True

    def buckets_of(self, indices: Sequence[int], hook: tuple[Any, Hook] | None = None) -> list[Bucket]:
        """For the parameters ``indices``, in the order in which their gradients arrive."""
        registry = self._registry
        specs = []
        for index in indices:
            param = registry.params[index]
            kind, sparse = f"{param.dtype} {param.device}", index in registry.sparse
            specs.append(ParamSpec(index, param.numel(), param.element_size(), kind, sparse))
        plan = plan_buckets(specs, caps_bytes=self.caps_bytes).buckets

        def make(number: int, members: list[Member]) -> Bucket:
            if members[0].index in registry.sparse:
                return SparseBucket(number, members, self._world_size)
            if hook is not None:
                return HookedBucket(
                    number,
                    members,
                    self._world_size,
                    *hook,
                    is_last=number == len(plan) - 1,
                    is_average=self.hook_gives_average,
                )
            if self._averages is not None and members[0].param.numel():
                return SharedBucket(number, members, self._world_size, self._averages)
            return DenseBucket(number, members, self._world_size)

        buckets = []
        for number, indices_of in enumerate(plan):
            members = [
                Member(index, registry.params[index], _layout_of(registry.params[index], registry.strides[index]))
                for index in indices_of
            ]
            buckets.append(make(number, members))
        return buckets


def _layout_of(param: torch.Tensor, stride: tuple[int, ...]) -> tuple[int, ...]:
    """``stride`` where it covers memory densely, as the optimizer's fast paths like it; else row by row."""
    if param.layout == torch.strided and len(stride) == param.dim():
        expected = 1
        for size, step in sorted(zip(param.shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
            if size != 1 and step != expected:
                break
            expected *= size
        else:
            return stride
    return torch.empty(param.shape, device="meta").stride()
