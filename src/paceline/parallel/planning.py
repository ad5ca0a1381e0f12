"""From a plan to buckets: which kind of bucket carries which gradients.

The invariant: all ranks make the same buckets of the same parameters, since all that counts here is the same on them.
"""

from collections.abc import Sequence
from typing import Any

from paceline.comm.memory.averages import Averages
from paceline.parallel.bucket import Bucket, DenseBucket, Member, SharedBucket, SparseBucket, layout_of
from paceline.parallel.comm_hooks import Hook, HookedBucket
from paceline.parallel.registry import Registry
from paceline.plan import ParamSpec, plan_buckets


def make_buckets(
    registry: Registry,
    indices: Sequence[int],
    *,
    world_size: int,
    caps_bytes: Sequence[int],
    averages: Averages | None,
    hook: tuple[Any, Hook] | None,
) -> list[Bucket]:
    """Buckets for the parameters ``indices``, in the order in which their gradients arrive.

    Args:
        averages: of gradients that lie in memory which the ranks share, if they share any.
        hook: a communication hook and its state, which averages all but sparse gradients.
    """
    specs = []
    for index in indices:
        param = registry.params[index]
        kind, sparse = f"{param.dtype} {param.device}", index in registry.sparse
        specs.append(ParamSpec(index, param.numel(), param.element_size(), kind, sparse))
    plan = plan_buckets(specs, caps_bytes=caps_bytes).buckets

    def make(number: int, members: list[Member]) -> Bucket:
        if members[0].index in registry.sparse:
            return SparseBucket(number, members, world_size)
        if hook is not None:
            return HookedBucket(number, members, world_size, *hook, is_last=number == len(plan) - 1)
        if averages is not None and members[0].param.numel():
            return SharedBucket(number, members, world_size, averages)
        return DenseBucket(number, members, world_size)

    buckets = []
    for number, indices_of in enumerate(plan):
        members = [
            Member(index, registry.params[index], layout_of(registry.params[index], registry.strides[index]))
            for index in indices_of
        ]
        buckets.append(make(number, members))
    return buckets
