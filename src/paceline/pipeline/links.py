"""Messages between ranks: what a stage passes on, over any process group that has send and recv.

A message is a header of fixed size, then, if it differs from that of the last message on its way, a description (the
shell and the tensors' shapes, pickled), then the tensors. So shapes may change at any time, and cost nothing as long
as they do not. Tensors travel in the memory of the CPU, whichever device they come from.

The invariant: a way (one sender, one receiver, one tag) is first in, first out, and each end remembers the same
description.
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PipelineError

_SAME = -1


class Links:
    """This rank's messages to and from the others of its group.

    Args:
        group: in which ranks are told by their number there.
        device: to which received tensors are brought.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._sent: dict[tuple[int, int], bytes] = {}
        self._received: dict[tuple[int, int], Any] = {}
        self._under_way: list[tuple[Any, Tensor]] = []

    def send(self, to: int, tag: int, shell: Any, tensors: list[Tensor]) -> None:
        """Begin to send; ``finish`` waits for it.

        Raises:
            PipelineError: the shell holds a tensor where none can be found.
        """
        kinds = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        description = _pickled((shell, kinds))
        is_same = self._sent.get((to, tag)) == description
        self._begin(torch.tensor([_SAME if is_same else len(description)]), to, tag)
        if not is_same:
            self._sent[to, tag] = description
            self._begin(torch.frombuffer(bytearray(description), dtype=torch.uint8), to, tag)
        for tensor in tensors:
            if tensor.numel():
                self._begin(tensor.detach().to("cpu").contiguous(), to, tag)
        self._under_way = [(work, tensor) for work, tensor in self._under_way if not work.is_completed()]

    def receive(self, source: int, tag: int) -> tuple[Any, list[Tensor]]:
        """Wait for the next message."""
        header = torch.empty(1, dtype=torch.int64)
        self._fill(header, source, tag)
        num_bytes = int(header)
        if num_bytes != _SAME:
            description = torch.empty(num_bytes, dtype=torch.uint8)
            self._fill(description, source, tag)
            self._received[source, tag] = pickle.loads(description.numpy().tobytes())
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
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _begin(self, tensor: Tensor, to: int, tag: int) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag)
        self._under_way.append((work, tensor))

    def _fill(self, tensor: Tensor, source: int, tag: int) -> None:
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag)
        assert work is not None
        work.wait()


class _WithoutTensors(pickle.Pickler):
    def persistent_id(self, item: object) -> None:
        if isinstance(item, Tensor):
            raise PipelineError(
                "a stage passes on an object that holds a tensor, which would arrive without its gradient. Pass on "
                "tensors, or lists, tuples, dicts or dataclasses of them."
            )


def _pickled(item: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _WithoutTensors(buffer).dump(item)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PipelineError(f"a stage passes on what cannot be pickled for another rank: {error}") from error
    return buffer.getvalue()
