"""Replicas that drift apart: found by comparing samples of the weights, a few in each round.

Equal gradients keep equal weights equal, bit by bit. So weights that differ were changed on one rank alone: edited,
loaded, or left out of a step. In each round every rank puts a digest of some of its weights into the control message,
which costs no message of its own. Where there are more than a few, parameters take turns, of which there are at most
eight; of each, 16 to 64 elements at equal distances are sampled, about a thousand in all, others in each fourth turn.
So what changes whole tensors, as optimizers and checkpoints do, is found within eight rounds, mostly in the first. What
changes a part of a tensor is found after about four times as many turns as one over 64 times that part, or 16 times in
a model of many tensors; a single element may take long. More would cost more than it is worth, since most elements lie
in lines of memory that are in no cache.

The invariant: all ranks sample the same elements in the same round, in the order of the parameter's indices, whatever
its strides.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import ReplicaMismatchError
from paceline.parallel.replicas.agreement import all_gather_object
from paceline.parallel.replicas.digests import digest_of

_MOST_TURNS = 8
_AT_ONCE = 16  # parameters that are sampled in each round, at least
_NUM_SAMPLED = 1024  # elements in each round, about
_FEWEST_OF_EACH, _MOST_OF_EACH = 16, 64  # parameters, where they have as many
_STEP = 7919  # a prime: where sampling begins wanders over all elements
_NUM_LOOKS = 4  # at the same elements, in turn
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element; larger ones are several int64
_address_of = operator.methodcaller("data_ptr")


class _Parameters:
    """Some parameters as integers, kept for several rounds: to make these views costs more than to sample them."""

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor]) -> None:
        self.indices = [i for i in indices if params[i].layout == torch.strided and params[i].numel()]
        self._addresses = self._addresses_of(params)
        of_each = min(_MOST_OF_EACH, max(_FEWEST_OF_EACH, _NUM_SAMPLED // max(1, len(self.indices))))
        self._steps = [max(1, params[i].numel() // of_each) for i in self.indices]
        self._elements = [_as_words(params[i]) for i in self.indices]
        self._position = -1  # of what is looked at now
        self._views: list[Tensor | None] = []  # of that, where there can be any
        self._joined: Tensor | None = None  # room for all of them, if they can be joined at once
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._are_alike = len({(params[i].device, params[i].itemsize) for i in self.indices}) <= 1

    def are(self, params: Sequence[Tensor]) -> bool:
        """Whether they lie where ``params`` lie now."""
        return self._addresses == self._addresses_of(params)

    def sample(self, params: Sequence[Tensor], position: int) -> Tensor:
        """Elements of all, on one device, as bytes; valid until the next call."""
        if position != self._position:
            self._turn_to(position)
        if self._joined is not None:
            torch.cat(self._views, out=self._joined)  # type: ignore[arg-type]
            return self._bytes
        samples = [
            _sample(params[index], _start(position, step), step) if view is None else view
            for index, view, step in zip(self.indices, self._views, self._steps, strict=True)
        ]
        if not samples:
            return self._bytes
        return torch.cat([_as_bytes(sample).to(samples[0].device) for sample in samples])

    def sizes(self, params: Sequence[Tensor]) -> list[int]:
        """How many bytes of the last sample are of each."""
        starts = [_start(self._position, step) for step in self._steps]
        return [
            len(range(start, params[index].numel(), step)) * params[index].itemsize
            for index, start, step in zip(self.indices, starts, self._steps, strict=True)
        ]

    def _turn_to(self, position: int) -> None:
        """Sample other elements from now on: as views, and into memory, that serve as long as these are looked at."""
        self._position = position
        self._views = [
            None if elements is None else _each(elements, _start(position, step), step)
            for elements, step in zip(self._elements, self._steps, strict=True)
        ]
        self._joined = None
        views = [view for view in self._views if view is not None and not view.is_cuda]
        if views and len(views) == len(self._views) and self._are_alike:
            self._joined = torch.cat(views)
            self._bytes = _as_bytes(self._joined)

    def _addresses_of(self, params: Sequence[Tensor]) -> list[int]:
        return [_address_of(params[index]) for index in self.indices]


class DriftWatch:
    """Samples of the weights, and what the ranks make of them."""

    def __init__(self) -> None:
        self._num_params = 0
        self._kept: dict[int, _Parameters] = {}  # by the turn
        self._looked_at: _Parameters | None = None
        self._samples = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._arrival: torch.cuda.Event | None = None

    @torch.no_grad()
    def look(self, params: Sequence[Tensor], turn: int) -> None:
        """Take a round's samples, before anything in the round can change a weight.

        Args:
            turn: how many rounds there have been.

        On GPUs they are copied to the host behind the computation, and nobody waits for that here.
        """
        num_turns = max(1, min(_MOST_TURNS, len(params) // _AT_ONCE))
        which, position = turn % num_turns, turn // num_turns // _NUM_LOOKS
        kept = self._kept.get(which)
        if len(params) != self._num_params or (kept is not None and not kept.are(params)):
            self._kept.clear()  # rather than keep alive what the parameters have been
            self._num_params, kept = len(params), None
        if kept is None:
            kept = self._kept[which] = _Parameters(range(which, len(params), num_turns), params)
        samples = kept.sample(params, position)
        self._looked_at, self._arrival = kept, None
        if samples.is_cuda:
            self._samples = torch.empty(samples.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._samples.copy_(samples, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(torch.cuda.current_stream(samples.device))
        else:
            self._samples = samples.cpu()

    def forget(self) -> None:
        """The parameters have become others, maybe where they were: keep no views of what they have been."""
        self._kept.clear()

    def look_away(self) -> None:
        """Have no samples in this round: this rank's weights have been left behind, under ``join``."""
        self._looked_at, self._arrival = None, None
        self._samples = torch.empty(0, dtype=torch.uint8, device="cpu")

    def digest(self) -> bytes:
        """Of the samples taken last. At the end of backward they have long arrived."""
        return digest_of(self._arrived().numpy().data)

    def explain(self, names: Sequence[str], params: Sequence[Tensor], group: dist.ProcessGroup) -> NoReturn:
        """Raise on every rank, naming the first parameter that differs, and the ranks. A collective call."""
        indices = [] if self._looked_at is None else self._looked_at.indices
        sizes = [] if self._looked_at is None else self._looked_at.sizes(params)
        told = all_gather_object((indices, sizes, self._arrived().numpy().tobytes()), group)
        told_by = {
            rank: theirs for rank, theirs in zip(dist.get_process_group_ranks(group), told, strict=True) if theirs[0]
        }
        ranks, everyones = list(told_by), [theirs for _, _, theirs in told_by.values()]
        sampled, sizes, _ = next(iter(told_by.values()))  # alike on all that have looked
        start = 0
        for index, size in zip(sampled, sizes, strict=True):
            samples = [theirs[start : start + size] for theirs in everyones]
            start += size
            usual, num_usual = Counter(samples).most_common(1)[0]
            others = [position for position, sample in enumerate(samples) if sample != usual]
            if not others:
                continue
            dtype = params[index].dtype
            mine = _values(usual, dtype)
            theirs = _values(samples[others[0]], dtype)
            at = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if repr(pair[0]) != repr(pair[1]))
            odd = ", ".join(str(ranks[position]) for position in others)
            rest = ", ".join(str(rank) for position, rank in enumerate(ranks) if position not in others)
            # Of two ranks, either may be the one that was changed.
            where = "there" if 2 * num_usual > len(samples) else "on one side"
            raise ReplicaMismatchError(
                f"the replicas have drifted apart: {names[index]!r} differs on {_name(odd)} from {_name(rest)}. An "
                f"element is {theirs[at]!r} on rank {ranks[others[0]]} and {mine[at]!r} elsewhere. Weights were "
                f"changed {where} alone, by an edit, a checkpoint, or an optimizer step that others did not make. "
                "Change weights on every rank alike; to go on from here, load one checkpoint on all of them."
            )
        raise AssertionError("digests differed, and samples do not")

    def _arrived(self) -> Tensor:
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._samples


def _start(position: int, step: int) -> int:
    """Each element below ``step`` is one, of as many consecutive positions."""
    return position * (_STEP if step % _STEP else 1) % step


def _as_words(param: Tensor) -> Tensor | None:
    """A view of all elements in order, as integers: (elements, words). None where memory holds them in another way."""
    if not param.is_contiguous() or param.is_conj() or param.is_neg():
        return None
    return _in_words(param.detach())


def _each(elements: Tensor, start: int, step: int) -> Tensor:
    """``elements[start::step]``, which takes twice the time."""
    num, words = elements.shape
    offset = elements.storage_offset() + start * words
    return elements.as_strided((len(range(start, num, step)), words), (step * words, 1), offset)


def _sample(param: Tensor, start: int, step: int) -> Tensor:
    """Each ``step``-th element from ``start``, as integers: (elements, words)."""
    at = torch.unravel_index(torch.arange(start, param.numel(), step, device=param.device), param.shape)
    return _in_words(param.detach()[at].resolve_conj().resolve_neg())


def _in_words(tensor: Tensor) -> Tensor:
    return tensor.view(-1, 1).view(_WORDS.get(tensor.itemsize, torch.int64))


def _as_bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(-1).view(torch.uint8)


def _values(sample: bytes, dtype: torch.dtype) -> list[object]:
    values = torch.frombuffer(bytearray(sample), dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:  # of eight bits, which have no numbers of their own
        values = values.float()
    return list(values.tolist())


def _name(ranks: str) -> str:
    return f"rank{'s' if ',' in ranks else ''} {ranks}"
