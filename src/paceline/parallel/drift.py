"""Replicas that drift apart: found by comparing samples of the weights, a few in each round.

Equal gradients keep equal weights equal, bit by bit. So weights that differ were changed on one rank alone: edited,
loaded, or left out of a step. In each round every rank puts a digest of some of its weights into the control message,
which costs no message of its own. Where there are more than a few, parameters take turns, of which there are at most
eight; of each, a run of elements is sampled, elsewhere in each turn. So what changes whole tensors, as optimizers and
checkpoints do, is found within eight rounds, mostly in the first; a single element may take long.

The invariant: all ranks sample the same elements in the same round, in the order of the parameter's indices, whatever
its strides.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ReplicaMismatchError
from paceline.parallel.agreement import all_gather_object
from paceline.parallel.control import digest_of

_MOST_TURNS = 8
_AT_ONCE = 16  # parameters that are sampled in each round, at least
_NUM_SAMPLED = 64
_STEP = 7919  # a prime: where sampling begins wanders over all of a tensor


class DriftWatch:
    """Samples of the weights, and what the ranks make of them."""

    def __init__(self) -> None:
        self._sampled: list[int] = []  # indices of parameters
        self._sizes: list[int] = []  # of their samples, in bytes
        self._samples = torch.empty(0, dtype=torch.uint8)
        self._arrival: torch.cuda.Event | None = None

    @torch.no_grad()
    def look(self, params: Sequence[Tensor], turn: int) -> None:
        """Take a round's samples, before anything in the round can change a weight.

        Args:
            turn: how many rounds there have been.

        On GPUs they are copied to the host behind the computation, and nobody waits for that here.
        """
        num_turns = max(1, min(_MOST_TURNS, len(params) // _AT_ONCE))
        self._sampled = [
            index
            for index in range(turn % num_turns, len(params), num_turns)
            if params[index].layout == torch.strided and params[index].numel()
        ]
        samples = [_sample(params[index], turn // num_turns) for index in self._sampled]
        self._sizes = [sample.numel() for sample in samples]
        self._arrival = None
        if not samples:
            self._samples = torch.empty(0, dtype=torch.uint8)
            return
        device = samples[0].device
        joined = torch.cat([sample.to(device) for sample in samples])
        if device.type == "cuda":
            self._samples = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
            self._samples.copy_(joined, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()
        else:
            self._samples = joined.cpu()

    def look_away(self) -> None:
        """Have no samples in this round: this rank's weights have been left behind, under ``join``."""
        self._sampled, self._sizes, self._arrival = [], [], None
        self._samples = torch.empty(0, dtype=torch.uint8)

    def digest(self) -> bytes:
        """Of the samples taken last. At the end of backward they have long arrived."""
        return digest_of(self._bytes())

    def explain(self, names: Sequence[str], params: Sequence[Tensor], group: dist.ProcessGroup) -> NoReturn:
        """Raise on every rank, naming the first parameter that differs, and the ranks. A collective call."""
        told = all_gather_object((self._sampled, self._sizes, self._bytes()), group)
        told_by = {
            rank: theirs for rank, theirs in zip(dist.get_process_group_ranks(group), told, strict=True) if theirs[0]
        }
        ranks, everyones = list(told_by), [theirs for _, _, theirs in told_by.values()]
        sampled, sizes, _ = next(iter(told_by.values()))  # alike on all that have looked
        start = 0
        for index, size in zip(sampled, sizes, strict=True):
            samples = [theirs[start : start + size] for theirs in everyones]
            start += size
            usual = Counter(samples).most_common(1)[0][0]
            others = [position for position, sample in enumerate(samples) if sample != usual]
            if not others:
                continue
            dtype = params[index].dtype
            mine = _values(usual, dtype)
            theirs = _values(samples[others[0]], dtype)
            at = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if repr(pair[0]) != repr(pair[1]))
            odd = ", ".join(str(ranks[position]) for position in others)
            rest = ", ".join(str(rank) for position, rank in enumerate(ranks) if position not in others)
            raise ReplicaMismatchError(
                f"the replicas have drifted apart: {names[index]!r} differs on {_name(odd)} from {_name(rest)}. An "
                f"element is {theirs[at]!r} on rank {ranks[others[0]]} and {mine[at]!r} elsewhere. Its weights were "
                "changed there alone, by an edit, a checkpoint, or an optimizer step that others did not make. Change "
                "weights on every rank alike; to go on from here, load one checkpoint on all of them."
            )
        raise AssertionError("digests differed, and samples do not")

    def _bytes(self) -> bytes:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._samples.numpy().tobytes()


def _sample(param: Tensor, turn: int) -> Tensor:
    """Some consecutive elements of one row, as bytes."""
    row = param.detach()
    row = (row.select(0, turn % row.shape[0]) if row.dim() > 1 else row).reshape(-1)
    start = turn * _STEP % max(1, row.numel() - _NUM_SAMPLED + 1)
    return row[start : start + _NUM_SAMPLED].contiguous().view(torch.uint8)


def _values(sample: bytes, dtype: torch.dtype) -> list[object]:
    values = torch.frombuffer(bytearray(sample), dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:  # of eight bits, which have no numbers of their own
        values = values.float()
    return list(values.tolist())


def _name(ranks: str) -> str:
    return f"rank{'s' if ',' in ranks else ''} {ranks}"
