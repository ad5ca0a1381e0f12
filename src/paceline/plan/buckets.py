"""Which gradients travel together: the bucket rule.

The invariant: every rank, given the same specs and the same order, makes the same plan; each parameter sits in exactly
one bucket. To change the rule, change ``plan_buckets``: the reducer executes whatever plan it is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PlanError

# torch's, for messages over a network, which cost more to begin than to prolong.
FIRST_CAP_BYTES = 1 << 20
CAP_BYTES = 25 << 20
# Between CPUs those who compute also carry the messages, so more is gained by beginning early.
CPU_CAP_BYTES = 12 << 20
# In shared memory a bucket costs little to begin. A small one is packed while its gradients are still in the cache, and
# ties down few of them until it is.
SHARED_CAP_BYTES = 4 << 20


@dataclass(frozen=True)
class ParamSpec:
    """What a plan needs to know of a parameter.

    Attributes:
        index: the parameter's number in the agreed order of all parameters.
        numel: elements of its gradient.
        itemsize: bytes of one element.
        kind: parameters of one kind may share a bucket: same dtype, same device.
        sparse: its gradient is sparse, and travels alone.
    """

    index: int
    numel: int
    itemsize: int
    kind: str
    sparse: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in launch order, each the parameters' indices in the order in which they lie in it."""

    buckets: tuple[tuple[int, ...], ...]


def plan_buckets(
    params: Sequence[ParamSpec], *, caps_bytes: Sequence[int] = (FIRST_CAP_BYTES, CAP_BYTES)
) -> BucketPlan:
    """Group parameters into buckets in the order in which their gradients become ready.

    Each kind fills a bucket of its own. A bucket is closed by the parameter that fills it, and launched in the order in
    which its last member arrives. The first is small, so that communication starts early.

    Args:
        params: in the order in which gradients arrive (before the first backward: the reverse of the model's).
        caps_bytes: a bucket is closed once it holds this much, so it may exceed this by its last parameter. One cap for
            each bucket of a kind, in turn; the last is that of all further ones.
    Raises:
        PlanError: there is no cap, one is negative, or a parameter appears twice.
    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2.
    """
    if not caps_bytes or min(caps_bytes) < 0:
        raise PlanError(f"caps_bytes={tuple(caps_bytes)}: expected at least one number of bytes, none less than 0.")
    if len({spec.index for spec in params}) != len(params):
        raise PlanError("a parameter appears twice; each must be in exactly one bucket.")
    closed: list[tuple[int, ...]] = []
    filling: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    num_closed: dict[str, int] = {}
    for spec in params:
        if spec.sparse:
            closed.append((spec.index,))
            continue
        filling.setdefault(spec.kind, []).append(spec.index)
        filled_bytes[spec.kind] = filled_bytes.get(spec.kind, 0) + spec.numel * spec.itemsize
        number = num_closed.get(spec.kind, 0)
        if filled_bytes[spec.kind] >= caps_bytes[min(number, len(caps_bytes) - 1)]:
            closed.append(tuple(filling.pop(spec.kind)))
            filled_bytes[spec.kind] = 0
            num_closed[spec.kind] = number + 1
    position = {spec.index: at for at, spec in enumerate(params)}
    leftover = sorted(filling.values(), key=lambda members: position[members[-1]])
    return BucketPlan((*closed, *map(tuple, leftover)))
