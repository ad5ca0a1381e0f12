"""A bucket, as the reducer handles it: gradients that travel together.

The invariant: autograd never accumulates into memory that a reduction is writing. When a gradient has been taken into
its bucket, ``param.grad`` becomes None; what autograd brings after that is *late*, arrives alone in fresh memory, and
is averaged by itself and added, since averaging is linear.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.parallel.fields import any_has_grad


@dataclass
class Member:
    """A parameter in a bucket, as it was when the bucket was planned.

    Attributes:
        index: its number in the agreed order.
        stride: the first rank's.
    """

    index: int
    param: torch.nn.Parameter
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        self.shape, self.dtype, self.device = self.param.shape, self.param.dtype, self.param.device
        self.numel = self.param.numel()

    def fits(self) -> bool:
        """Whether the parameter is still of that shape and dtype, and on that device."""
        param = self.param
        return (param.shape, param.dtype, param.device) == (self.shape, self.dtype, self.device)


class Bucket(ABC):
    """Gradients that travel together, as the reducer handles them: prepared, packed, sent, waited for, given."""

    kind: ClassVar[str]  # what a report calls it

    def __init__(self, number: int, members: Sequence[Member], world_size: int) -> None:
        self.number = number
        self.members = list(members)
        self.indices = [member.index for member in members]
        self._params = [member.param for member in members]
        self.world_size = world_size
        self.expected: Set[int] = frozenset()  # ids of members whose gradients are waited for
        self.is_launched = False
        self.contributors: Sequence[int] = ()  # members whose gradient this rank has put in
        self.misfits: set[int] = set()  # positions of members that are not what they were, so none of this bucket's
        self._used = b""  # of which ``expected`` was made
        self._streams: set[torch.cuda.Stream] = set()

    def prepare(self, used: bytes) -> None:
        """Begin a round, in which the gradients of those are expected that were used in the last one."""
        if used is not self._used:  # it is the same object as long as nothing changes
            self._used, self.expected = used, {id(member.param) for member in self.members if used[member.index]}
        self.is_launched = False
        self.contributors = ()

    def is_complete(self, arrived: Set[int]) -> bool:
        """Whether all expected gradients are among those that have arrived, given as ids of parameters."""
        return self.expected <= arrived

    def note_misfits(self) -> None:
        """Leave out members that were cast, moved or resized since. Their gradients are left where they are."""
        self.misfits = {position for position, member in enumerate(self.members) if not member.fits()}

    def note_stream(self, param: Tensor) -> None:
        """Remember the CUDA stream on which a gradient came, if it is one."""
        if param.is_cuda:
            self._streams.add(torch.cuda.current_stream(param.device))

    def at_once(self) -> list[torch.nn.Parameter]:
        """The members whose gradients are best taken as soon as they arrive."""
        return []

    def take(self, index: int, preexisting: Collection[int]) -> None:  # noqa: B027
        """Take the gradient of one member that has just arrived, if it is one of those."""

    def give_back(self) -> None:  # noqa: B027
        """A backward has failed before this was packed: what was taken is this rank's gradient again."""

    @abstractmethod
    def pack(self, preexisting: Collection[int]) -> None:
        """Take the members' gradients; those that have not arrived count as zero.

        Args:
            preexisting: parameters that had a gradient before the backward.
        """

    @abstractmethod
    def send(self, group: dist.ProcessGroup) -> None:
        """Start averaging what was packed."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for what was sent."""

    def when_ended(self, tell: Callable[[object], None]) -> None:  # noqa: B027
        """Have ``tell`` called when what was sent is the average, in any thread, where the backend can do that."""

    def has_ended(self) -> bool:
        """Whether what was sent is known to be the average; never waits."""
        return False

    def is_late(self) -> bool:
        """Whether a member's gradient came after the launch."""
        if self.misfits:
            return any(param.grad is not None for at, param in enumerate(self._params) if at not in self.misfits)
        return any_has_grad(self._params)

    @abstractmethod
    def reduce_late(self, group: dist.ProcessGroup) -> None:
        """Average the late gradients of all ranks and add them. A collective call, after ``wait``."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply the average, after ``wait``."""

    @abstractmethod
    def give(self, used: bytes) -> None:
        """End the round: the average becomes ``param.grad`` of the parameters that some rank used, as ``used`` says.

        Where a gradient is there already, another wrapper of the same parameter has given it, of what it had taken. On
        another rank the two may have shared the parameter's gradient otherwise; the sum is the same on all.
        """

    def _join_streams(self) -> None:
        """Let the current CUDA stream wait for those on which gradients came."""
        if not self._streams:
            return
        current = torch.cuda.current_stream(self.members[0].param.device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
                for member in self.members:
                    if member.param.grad is not None:
                        member.param.grad.record_stream(current)
        self._streams.clear()
