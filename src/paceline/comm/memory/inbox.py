"""Which message goes to which receive, wherever it comes from.

What nobody has asked for yet is kept in private memory. So tags may be asked for in any order, and a message never
blocks another.

The invariant: between one pair, messages of one tag are received in the order in which they were sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.explain import different_messages

# In what tells of a message, a dtype is a place in this.
DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@dataclass
class Message:
    """One that has begun to arrive."""

    source: int
    tag: int
    dtype: torch.dtype
    num_bytes: int
    memory: Tensor  # where it goes, as bytes
    is_direct: bool  # whether that is the tensor of a request
    num_arrived: int = 0

    @property
    def is_complete(self) -> bool:
        return self.num_arrived == self.num_bytes


@dataclass(eq=False)
class Request:
    """A receive that has been called."""

    tensor: Tensor
    source: int | None
    tag: int
    message: Message | None = None

    def wants(self, source: int, tag: int) -> bool:
        return self.message is None and self.source in (None, source) and self.tag == tag

    def fits(self, num_bytes: int, dtype: torch.dtype) -> bool:
        """Whether such a message may be written to the tensor."""
        return (num_bytes, dtype) == (self.tensor.nbytes, self.tensor.dtype)


class Inbox:
    """What arrives at one rank, and what it waits for.

    Args:
        rank: the global rank of this one.
        sources: the global rank of each source.
    """

    def __init__(self, rank: int, sources: Sequence[int]) -> None:
        self._rank = rank
        self._sources = list(sources)
        self._requests: list[Request] = []
        self._unasked: list[Message] = []
        self._arriving: dict[int, Message] = {}  # by source

    def also_from(self, sources: Sequence[int]) -> None:
        """Messages come from these too; as sources, they are counted on from those that are known."""
        self._sources += sources

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for a message."""
        return bool(self._requests)

    def ask(self, tensor: Tensor, source: int | None, tag: int) -> Request:
        """Wait for a message from ``source``, or from anybody, until ``stop_asking``."""
        request = Request(tensor, source, tag)
        self._requests.append(request)
        for message in self._unasked:
            if request.wants(message.source, message.tag):
                self._unasked.remove(message)
                request.message = message
                break
        return request

    def stop_asking(self, request: Request) -> None:
        self._requests.remove(request)

    def begin(self, source: int, tag: int, num_bytes: int, dtype: torch.dtype) -> Message:
        """A message begins to arrive; where it goes is told by what is returned."""
        request = next((request for request in self._requests if request.wants(source, tag)), None)
        if request is not None and request.fits(num_bytes, dtype):
            message = Message(source, tag, dtype, num_bytes, request.tensor.view(torch.uint8), is_direct=True)
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            message = Message(source, tag, dtype, num_bytes, memory, is_direct=False)
        if request is None:
            self._unasked.append(message)
        else:
            request.message = message
        self._arriving[source] = message
        return message

    def arriving(self, source: int) -> Message | None:
        """The message of ``source`` that has begun and not ended."""
        return self._arriving.get(source)

    def end(self, source: int) -> None:
        """The message of ``source`` that has begun is all there."""
        message = self._arriving.pop(source)
        message.num_arrived = message.num_bytes

    def deliver(self, request: Request) -> int:
        """Fill the tensor of ``request`` from its message, which is complete; who sent it.

        Raises:
            CollectiveMismatchError: it is of another size or dtype.
        """
        message, tensor = request.message, request.tensor
        assert message is not None
        if not request.fits(message.num_bytes, message.dtype):
            wanted, came = _spell(tensor.nbytes, tensor.dtype), _spell(message.num_bytes, message.dtype)
            raise different_messages(self._rank, wanted, request.tag, self._sources[message.source], came)
        if not message.is_direct:
            tensor.view(torch.uint8).copy_(message.memory)
        return message.source


def _spell(num_bytes: int, dtype: torch.dtype) -> str:
    return f"{num_bytes // dtype.itemsize} elements of {str(dtype).removeprefix('torch.')}"
