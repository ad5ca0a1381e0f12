"""The small message beside the gradients: what each rank must know of all others before a round can end.

A vector of bytes, reduced with MAX, so that one message of any backend carries it:

    used[P]       1 where the rank has a gradient of parameter p
    late[B]       1 where a gradient came after bucket b had been launched
    changed[1]    1 where the rank has seen a parameter that the ranks have not agreed on
    state[8]      a digest that must be the same on all ranks ...
    mirror[8]     ... and 255 minus it: the two maxima add up to 255 exactly where all ranks agree
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Control:
    """What one rank says, or what all of them said.

    Attributes:
        used: by parameter, whether it has a gradient (on any rank).
        late: by bucket, whether it must be reduced once more.
        is_changed: whether parameters must be agreed on anew.
        is_same_state: whether all ranks' ``state`` is the same.
    """

    used: Sequence[bool]
    late: Sequence[bool]
    is_changed: bool
    is_same_state: bool = True


class PendingControl:
    """A control message under way; ``result`` waits for it."""

    def __init__(self, mine: Control, digest: bytes, group: dist.ProcessGroup) -> None:
        message = bytearray(mine.used) + bytearray(mine.late)
        message.append(mine.is_changed)
        message += digest
        message += bytes(255 - byte for byte in digest)
        self._num_used, self._num_late = len(mine.used), len(mine.late)
        self._tensor = torch.frombuffer(message, dtype=torch.uint8)
        self._work = dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> Control:
        assert self._work is not None
        self._work.wait()
        told = self._tensor.numpy().tobytes()
        end_of_used = self._num_used
        end_of_late = end_of_used + self._num_late
        state = told[end_of_late + 1 : -_DIGEST_BYTES]
        mirror = told[-_DIGEST_BYTES:]
        return Control(
            used=list(map(bool, told[:end_of_used])),
            late=list(map(bool, told[end_of_used:end_of_late])),
            is_changed=bool(told[end_of_late]),
            is_same_state=all(a + b == 255 for a, b in zip(state, mirror, strict=True)),
        )


def digest_of(state: object) -> bytes:
    """Of what must be the same on all ranks."""
    return hashlib.blake2b(repr(state).encode(), digest_size=_DIGEST_BYTES).digest()
