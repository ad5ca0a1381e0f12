"""Copying one rank's tensors to the others, many in one message."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

_CHUNK_BYTES = 25 << 20


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Overwrite ``tensors`` with those of the group's rank ``source``, in place.

    Args:
        tensors: alike in number, shape, dtype and device on every rank; any strides.
    """
    is_source = dist.get_group_rank(group, dist.get_rank()) == source
    for chunk in _chunks(tensors):
        # As bytes: not every backend knows every dtype, but all of them know bytes.
        pieces = [
            tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for tensor in chunk
        ]
        flat = torch.cat(pieces)
        dist.broadcast(flat, group=group, group_src=source)
        if is_source:
            continue
        received = torch.split(flat, [piece.numel() for piece in pieces])
        for tensor, piece in zip(chunk, received, strict=True):
            # Through .data, which leaves the version alone: a graph that saved the buffer, of a forward before this
            # one, can still run backward. A piece that starts where its dtype cannot be read is copied first.
            is_aligned = piece.storage_offset() % tensor.element_size() == 0
            tensor.data.copy_((piece if is_aligned else piece.clone()).view(tensor.dtype).view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device, up to about ``_CHUNK_BYTES`` at a time."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for members in by_device.values():
        chunk: list[torch.Tensor] = []
        num_bytes = 0
        for tensor in members:
            chunk.append(tensor)
            num_bytes += tensor.nbytes
            if num_bytes >= _CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
        if chunk:
            yield chunk
