"""The copies of a module's parameters on the other devices, which stay from one call to the next.

[Note: what has changed] torch counts what is written into a tensor, but not what is written through ``.data``, as old
optimizers, weight clipping and moving averages do. So where the count has not moved, original and copy are still
compared: on the CPU bit by bit, which reads memory where a copy reads and writes it, and on accelerators by digests,
sums of their bits in 251 columns and in 257, or the bits themselves of a small tensor, so that a device sends four
kilobytes instead of the tensor. What changes places, and meets the same columns both times, is missed.

The invariant: when ``fetch`` returns, every copy has the bits of its original, but for what digests miss.
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import comm

from paceline.parallel.data_parallel.place import working_for

_NUM_COLUMNS = (251, 257)  # primes: rows of a matrix don't line up with them
_SMALL_WORDS = 1024
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_Stamp = tuple[int, int, int]


@dataclass
class _Copy:
    tensor: Tensor
    kind: tuple[Any, ...]  # of the original, when memory was taken
    stamp: _Stamp | None = None  # None: never filled, or not to be trusted


class Mirror:
    """Copies of tensors on several devices, refreshed where they differ from the original.

    Attributes:
        copied_bytes: how much the last ``fetch`` has copied, over all devices.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], dict[int, _Copy]]] = {}
        self._lock = threading.Lock()
        self.copied_bytes = 0

    def __reduce__(self) -> Any:
        return Mirror, ()  # a copied or loaded wrapper makes its own copies

    def fetch(self, sources: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
        """Copies of ``sources`` on all devices but the first, where they lie themselves.

        Returns:
            For each device but the first, a copy of each source, without gradient. Whoever writes into one loses it.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self.copied_bytes = 0
            self._forget_others(sources)
            per_device = [self._rows(sources, index, device) for index, device in enumerate(devices) if index]
            stale = [self._find_stale(sources, row) for row in per_device]
            for index, (row, numbers) in enumerate(zip(per_device, stale, strict=True), start=1):
                with working_for(index):
                    self._copy_here([(sources[n], row[n]) for n in numbers if _is_near(sources[n], devices[index])])
            self._copy_far(sources, per_device, stale, devices)
            return [[copy.tensor for copy in row] for row in per_device]

    def tensors(self) -> list[tuple[int, Tensor]]:
        """All copies, each with the number of its replica."""
        return [(index, copy.tensor) for _, copies in self._copies.values() for index, copy in copies.items()]

    def _forget_others(self, sources: Sequence[Tensor]) -> None:
        """Drop copies of what the module no longer has; ids of tensors that are gone may come again."""
        now = {id(source): source for source in sources}
        kept = {key: entry for key, entry in self._copies.items() if key in now and entry[0]() is now[key]}
        for key, source in now.items():
            kept.setdefault(key, (weakref.ref(source), {}))
        self._copies = kept

    def _rows(self, sources: Sequence[Tensor], index: int, device: torch.device) -> list[_Copy]:
        row = []
        with working_for(index):
            for source in sources:
                copies = self._copies[id(source)][1]
                kind = (device, *_kind_of(source))
                if index not in copies or copies[index].kind != kind:
                    is_near = _is_near(source, device)
                    memory = torch.empty_like(source, device=device, requires_grad=False) if is_near else None
                    copies[index] = _Copy(_nothing_on(device) if memory is None else memory, kind)
                row.append(copies[index])
        return row

    def _find_stale(self, sources: Sequence[Tensor], row: list[_Copy]) -> list[int]:
        stale, unsure = [], []
        for number, (source, copy) in enumerate(zip(sources, row, strict=True)):
            if source.layout is torch.strided and copy.stamp == _stamp_of(source, copy.tensor):
                unsure.append(number)
            else:
                stale.append(number)
        differing = differ([sources[n] for n in unsure], [row[n].tensor for n in unsure])
        return sorted([*stale, *(unsure[at] for at in differing)])

    def _copy_here(self, pairs: list[tuple[Tensor, _Copy]]) -> None:
        for source, copy in pairs:
            copy.tensor.copy_(source)
            self._note(source, copy)

    def _copy_far(
        self,
        sources: Sequence[Tensor],
        rows: list[list[_Copy]],
        stale: list[list[int]],
        devices: Sequence[torch.device],
    ) -> None:
        """Copies on other accelerators: many at once, over NCCL where torch has it. They take new memory."""
        wanted = [
            {number for number in numbers if not _is_near(sources[number], device)}
            for numbers, device in zip(stale, devices[1:], strict=True)
        ]
        numbers = sorted(set().union(*wanted))
        far = [at for at, some in enumerate(wanted) if some]
        for at in far:
            for number in numbers:
                rows[at][number].tensor = _nothing_on(devices[at + 1])  # before the new memory is taken
        if not far:
            return
        originals = [sources[number].detach() for number in numbers]
        indices = [devices[0].index, *(devices[at + 1].index for at in far)]
        copies = comm.broadcast_coalesced(originals, indices)[1:]  # type: ignore[no-untyped-call]
        for at, tensors in zip(far, copies, strict=True):
            for number, original, tensor in zip(numbers, originals, tensors, strict=True):
                rows[at][number].tensor = torch.view_as_complex(tensor) if original.is_complex() else tensor
                self._note(sources[number], rows[at][number])

    def _note(self, source: Tensor, copy: _Copy) -> None:
        copy.stamp = _stamp_of(source, copy.tensor) if source.layout is torch.strided else None
        self.copied_bytes += _bytes_of(source)


def differ(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[int]:
    """The numbers of the pairs whose bits differ. [Note: what has changed]

    Args:
        ones, others: strided tensors, alike in shape, dtype and strides, each list on one device.
    """
    if not ones:
        return []
    pairs = [_words_of(one.detach(), other.detach()) for one, other in zip(ones, others, strict=True)]
    if ones[0].is_cpu and others[0].is_cpu:
        return [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
    digests = [[_digest(words) for words in side] for side in zip(*pairs, strict=True)]
    mine, theirs = (torch.cat(row).cpu() for row in digests)
    if torch.equal(mine, theirs):
        return []
    sizes = [digest.numel() for digest in digests[0]]
    told = zip(torch.split(mine, sizes), torch.split(theirs, sizes), strict=True)
    return [number for number, (one, other) in enumerate(told) if not torch.equal(one, other)]


def _digest(words: Tensor) -> Tensor:
    if words.numel() <= _SMALL_WORDS:
        return words.to(torch.int64)
    sums = []
    for num_columns in _NUM_COLUMNS:
        whole = words[: words.numel() // num_columns * num_columns]
        sums += [whole.view(-1, num_columns).sum(0, dtype=torch.int64), words[whole.numel() :].to(torch.int64)]
    return torch.cat(sums)


def _words_of(*tensors: Tensor) -> list[Tensor]:
    """The bits of tensors that are alike, as integers of one size, in the order in which they lie in memory."""
    flats = [_flat(tensor) for tensor in tensors]
    size = flats[0].element_size()
    is_wide = all(flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0 for flat in flats)
    return [flat.view(torch.int64 if is_wide else _WORDS.get(size, torch.int64)) for flat in flats]


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and tensor.stride() != torch.empty_like(tensor, device="meta").stride():
        tensor = tensor.contiguous()  # it does not fill its memory
    return tensor.as_strided((tensor.numel(),), (1,))


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else ()
    return tensor.shape, tensor.dtype, tensor.layout, stride


def _stamp_of(source: Tensor, copy: Tensor) -> _Stamp:
    return source.data_ptr(), _version_of(source), _version_of(copy)


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _nothing_on(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


def _is_near(source: Tensor, device: torch.device) -> bool:
    return device.type == "cpu" or source.device == device or source.layout is not torch.strided
