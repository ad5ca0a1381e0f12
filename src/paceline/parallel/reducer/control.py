"""The small message beside the gradients: what each rank must know of all others before a round can end.

A vector of bytes, reduced with MAX, so that one message of any backend carries it:

    used[P]       1 where the rank has a gradient of parameter p
    late[B]       1 where a gradient came after bucket b had been launched
    changed[1]    1 where the rank has seen a parameter that the ranks have not agreed on
    hooked[1]     1 where the rank has a communication hook,
    unhooked[1]   and 1 where it has none
    digests[16]   of what must be the same on all ranks: how parameters train, and samples of the weights ...
    mirrors[16]   ... and 255 minus each byte: the two maxima add up to 255 exactly where all ranks agree

A rank that has run out of data and only keeps the others company has zeros everywhere, which say nothing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.parallel.groups import start_all_reduce
from paceline.parallel.replicas.digests import DIGEST_BYTES

_MIRROR = bytes(range(255, -1, -1))


@dataclass(frozen=True)
class Control:
    """What one rank says, or what all of them said.

    Attributes:
        used: by parameter, 1 where it has a gradient (on any rank).
        late: by bucket, 1 where it must be reduced once more.
        is_changed: whether parameters must be agreed on anew.
        is_hooked: whether it has a communication hook (whether some rank has one).
        is_unhooked: whether it has none (whether some rank has none).
        is_same_state: whether parameters train alike on all ranks.
        is_same_weights: whether the samples of the weights are the same.
    """

    used: bytes
    late: bytes
    is_changed: bool
    is_hooked: bool
    is_unhooked: bool
    is_same_state: bool = True
    is_same_weights: bool = True


class PendingControl:
    """A control message under way; ``result`` waits for it.

    Args:
        digests: of this rank's state and of its weights; None for a rank that only keeps the others company.
    """

    def __init__(self, mine: Control, digests: tuple[bytes, bytes] | None, group: dist.ProcessGroup) -> None:
        both = bytes(2 * DIGEST_BYTES) if digests is None else digests[0] + digests[1]
        mirrors = both if digests is None else both.translate(_MIRROR)
        flags = bytes((mine.is_changed, mine.is_hooked, mine.is_unhooked))
        self._message = bytearray().join((mine.used, mine.late, flags, both, mirrors))
        self._num_used, self._num_late = len(mine.used), len(mine.late)
        tensor = torch.frombuffer(self._message, dtype=torch.uint8)
        self._work = start_all_reduce(tensor, group, dist.ReduceOp.MAX)

    @property
    def size_bytes(self) -> int:
        return len(self._message)

    def result(self) -> Control:
        assert self._work is not None
        self._work.wait()
        told = bytes(self._message)
        end_of_used = self._num_used
        end_of_late = end_of_used + self._num_late
        maxima, mirrors = told[-4 * DIGEST_BYTES : -2 * DIGEST_BYTES], told[-2 * DIGEST_BYTES :]
        expected = maxima.translate(_MIRROR)
        return Control(
            used=told[:end_of_used],
            late=told[end_of_used:end_of_late],
            is_changed=bool(told[end_of_late]),
            is_hooked=bool(told[end_of_late + 1]),
            is_unhooked=bool(told[end_of_late + 2]),
            is_same_state=mirrors[:DIGEST_BYTES] == expected[:DIGEST_BYTES],
            is_same_weights=mirrors[DIGEST_BYTES:] == expected[DIGEST_BYTES:],
        )
