"""The small message beside the gradients: what each rank must know of all others before a round can end.

A vector of bytes, reduced with MAX, so that one message of any backend carries it:

    used[P]       1 where the rank has a gradient of parameter p
    late[B]       1 where a gradient came after bucket b had been launched
    changed[1]    1 where the rank has seen a parameter that the ranks have not agreed on
    digests[16]   of what must be the same on all ranks: how parameters train, and samples of the weights ...
    mirrors[16]   ... and 255 minus each byte: the two maxima add up to 255 exactly where all ranks agree

A rank that has run out of data and only keeps the others company has zeros everywhere, which say nothing.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

DIGEST_BYTES = 8
NO_DIGEST = bytes(DIGEST_BYTES)


@dataclass(frozen=True)
class Control:
    """What one rank says, or what all of them said.

    Attributes:
        used: by parameter, whether it has a gradient (on any rank).
        late: by bucket, whether it must be reduced once more.
        is_changed: whether parameters must be agreed on anew.
        is_same_state: whether parameters train alike on all ranks.
        is_same_weights: whether the samples of the weights are the same.
    """

    used: Sequence[bool]
    late: Sequence[bool]
    is_changed: bool
    is_same_state: bool = True
    is_same_weights: bool = True


class PendingControl:
    """A control message under way; ``result`` waits for it.

    Args:
        digests: of this rank's state and of its weights; None for a rank that only keeps the others company.
    """

    def __init__(self, mine: Control, digests: tuple[bytes, bytes] | None, group: dist.ProcessGroup) -> None:
        message = bytearray(mine.used) + bytearray(mine.late)
        message.append(mine.is_changed)
        if digests is None:
            message += bytes(4 * DIGEST_BYTES)
        else:
            both = digests[0] + digests[1]
            message += both + bytes(255 - byte for byte in both)
        self._num_used, self._num_late = len(mine.used), len(mine.late)
        self._tensor = torch.frombuffer(message, dtype=torch.uint8)
        self._work = dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)

    @property
    def size_bytes(self) -> int:
        return self._tensor.numel()

    def result(self) -> Control:
        assert self._work is not None
        self._work.wait()
        told = self._tensor.numpy().tobytes()
        end_of_used = self._num_used
        end_of_late = end_of_used + self._num_late
        maxima, mirrors = told[-4 * DIGEST_BYTES : -2 * DIGEST_BYTES], told[-2 * DIGEST_BYTES :]
        agrees = [a + b == 255 for a, b in zip(maxima, mirrors, strict=True)]
        return Control(
            used=list(map(bool, told[:end_of_used])),
            late=list(map(bool, told[end_of_used:end_of_late])),
            is_changed=bool(told[end_of_late]),
            is_same_state=all(agrees[:DIGEST_BYTES]),
            is_same_weights=all(agrees[DIGEST_BYTES:]),
        )


def digest_of(content: bytes) -> bytes:
    """Of what must be the same on all ranks."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
