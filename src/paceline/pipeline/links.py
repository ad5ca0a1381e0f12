"""Messages between the ranks of a column: what a stage passes on, over any process group that has send and recv.

A message is a header of fixed size, then, if it differs from that of the last message on its way, a description (the
shell and the tensors' shapes, pickled), then the tensors. So shapes may change at any time, and cost nothing as long
as they do not. Tensors travel in the memory of the CPU, whichever device they come from.

In the place of a message may come word that its sender has failed. Whoever hears of it fails too, and passes it on.

The invariant: a way (one sender, one receiver, one tag) is first in, first out, and each end remembers the same
description.
"""

import contextlib
import pickle
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import world
from paceline.errors import PacelineError, PeerError
from paceline.pipeline.values import pickled

_SAME, _FAILED = -1, -2  # in the place of a description's length; a failure's is subtracted from the latter
_last_words: list[Any] = []  # messages that must outlive a pipeline that has failed: gloo forgets what nobody holds


class Way(NamedTuple):
    """Where messages go: to a lane, with a tag."""

    to: int
    tag: int


class Links:
    """This rank's messages to and from the other lanes of its column.

    Args:
        group: of the column.
        ranks: for each lane, the global rank that runs it.
        device: to which received tensors are brought.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], device: torch.device) -> None:
        self._group = group
        self._ranks = ranks
        self._device = device
        self._sent: dict[Way, bytes] = {}
        self._received: dict[tuple[int, int], Any] = {}
        self._under_way: list[tuple[Any, Tensor, int]] = []
        self._heard: str | None = None  # of the failure of another

    def send(self, to: int, tag: int, shell: Any, tensors: list[Tensor]) -> None:
        """Begin to send; ``finish`` waits for it.

        Raises:
            PipelineError: the shell holds a tensor where none can be found, or what cannot be pickled.
            PeerError: the other has gone.
        """
        kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        description, way = pickled((shell, kinds)), Way(to, tag)
        is_same = self._sent.get(way) == description
        self._begin(torch.tensor([_SAME if is_same else len(description)]), way)
        if not is_same:
            self._sent[way] = description
            self._begin(_bytes_of(description), way)
        for tensor in tensors:
            if tensor.numel():
                self._begin(tensor.detach().to("cpu").contiguous(), way)
        self._under_way = [item for item in self._under_way if not item[0].is_completed()]

    def receive(self, source: int, tag: int) -> tuple[Any, list[Tensor]]:
        """Wait for the next message.

        Raises:
            PeerError: the sender has failed, or gone.
        """
        header = torch.empty(1, dtype=torch.int64)
        self._fill(header, source, tag)
        num_bytes = int(header)
        if num_bytes <= _FAILED:
            self._heard = self._read(_FAILED - num_bytes, source, tag).decode()
            raise PeerError(f"rank {dist.get_rank()}: {self._heard}")
        if num_bytes != _SAME:
            self._received[source, tag] = pickle.loads(self._read(num_bytes, source, tag))
        shell, kinds = self._received[source, tag]
        tensors = []
        for dtype, shape in kinds:
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                self._fill(tensor, source, tag)
            tensors.append(tensor.to(self._device))
        return shell, tensors

    def finish(self) -> None:
        """Wait until all that was sent is out of this rank's hands."""
        for work, _, to in self._under_way:
            with self._explained(to):
                work.wait()
        self._under_way.clear()

    def fail(self, failure: BaseException, ways: Iterable[Way]) -> None:
        """Tell those who may wait for this rank that it has failed, and why: that another has, if it heard so."""
        told = self._heard or f"rank {dist.get_rank()} has failed: {type(failure).__name__}: {failure}"
        text = told.encode()
        for way in ways:
            with contextlib.suppress(RuntimeError):  # who has gone need not be told
                self._isend(torch.tensor([_FAILED - len(text)]), way)
                self._isend(_bytes_of(text), way)
        _last_words.extend(self._under_way)

    def _begin(self, tensor: Tensor, way: Way) -> None:
        with self._explained(way.to):
            self._isend(tensor, way)

    def _isend(self, tensor: Tensor, way: Way) -> None:
        to = dist.get_group_rank(self._group, self._ranks[way.to])
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=way.tag)
        self._under_way.append((work, tensor, way.to))

    def _fill(self, tensor: Tensor, source: int, tag: int) -> None:
        with self._explained(source):
            group_source = dist.get_group_rank(self._group, self._ranks[source])
            work = dist.irecv(tensor, group=self._group, group_src=group_source, tag=tag)
            assert work is not None
            work.wait()

    def _read(self, num_bytes: int, source: int, tag: int) -> bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self._fill(buffer, source, tag)
        return buffer.numpy().tobytes()

    @contextlib.contextmanager
    def _explained(self, other: int) -> Iterator[None]:
        """Make of a backend's own error one that says who is missing."""
        try:
            yield
        except PacelineError:
            raise
        except RuntimeError as error:
            gone = "" if (here := world.current()) is None else here.who_is_gone()
            raise PeerError(
                f"rank {dist.get_rank()}: rank {self._ranks[other]}, which runs lane {other} of the pipeline, cannot "
                f"be reached. {gone or 'Most often it has ended; its own output says why.'}\nThe backend reports: "
                f"{error}"
            ) from error


def _bytes_of(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)
