"""Copying the first rank's tensors to the others, many in one message."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

_CHUNK_BYTES = 25 << 20


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite ``tensors`` with those of the group's first rank, in place.

    Args:
        tensors: alike in number, shape, dtype and device on every rank; any strides.
    """
    for chunk in _chunks(tensors):
        # As bytes: not every backend knows every dtype, but all of them know bytes.
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in chunk])
        dist.broadcast(flat, group=group, group_src=0)
        start = 0
        for tensor in chunk:
            piece = flat[start : start + tensor.nbytes]
            start += tensor.nbytes
            # A piece may start at an address that its dtype cannot be read from, so it is copied first.
            tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device, up to about ``_CHUNK_BYTES`` at a time."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        chunk: list[torch.Tensor] = []
        for tensor in members:
            chunk.append(tensor)
            if sum(member.nbytes for member in chunk) >= _CHUNK_BYTES:
                yield chunk
                chunk = []
        if chunk:
            yield chunk
