"""Summing the replicas' gradients, bucket by bucket, while their backwards still run.

The replicas form a tree. With seven, replica 0 takes in 1, 2 and 4; replica 2 takes in 3; 4 takes in 5 and 6:

    0 <- 1      2 <- 3      4 <- 5        then 0 <- 2, 4 <- 6        then 0 <- 4

When a replica has all gradients of a bucket, whichever thread completes a pair adds it up: there and then, so nobody
waits, and no thread is needed for it. A device holds its own gradients and, for as long as an addition takes, one
bucket of another's; what it has passed on it holds no longer.

The invariant: sums are made in an order that depends on the number of replicas only, not on who comes first.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from paceline.parallel.data_parallel.place import working_for
from paceline.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, SHARED_CAP_BYTES, ParamSpec, plan_buckets

_Grads = dict[int, Tensor]


def plan_for(sources: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """Buckets of the sources that need gradients, those expected first in front."""
    specs = [
        ParamSpec(number, source.numel(), source.element_size(), str(source.dtype))
        for number, source in reversed(list(enumerate(sources)))
        if source.requires_grad
    ]
    is_near = all(source.device.type == "cpu" for source in sources)
    caps_bytes = (FIRST_CAP_BYTES, SHARED_CAP_BYTES if is_near else CAP_BYTES)
    return plan_buckets(specs, caps_bytes=caps_bytes).buckets if specs else ()


class TreeReduction:
    """One backward in each replica, and the sum of their gradients."""

    def __init__(self, rows: Sequence[Sequence[Tensor]], buckets: Sequence[Sequence[int]]) -> None:
        """Begin. ``rows`` are the replicas' leaves, all in the same order; ``buckets`` numbers of those with gradients.

        Whoever begins must ``close``.
        """
        self._rows = rows
        self._nodes = [_Node(index, len(rows), len(buckets), _device_of(row)) for index, row in enumerate(rows)]
        self._buckets = buckets
        self._missing = [[len(bucket) for bucket in buckets] for _ in rows]
        self._arrived: list[set[int]] = [set() for _ in rows]
        self._late: list[_Grads] = [{} for _ in rows]
        self._lock = threading.Lock()
        self._hooks = [
            row[number].register_post_accumulate_grad_hook(partial(self._arrive, index, at, number))  # type: ignore[no-untyped-call]
            for index, row in enumerate(rows)
            for at, bucket in enumerate(buckets)
            for number in bucket
        ]

    def end_backward(self, index: int) -> None:
        """Replica ``index`` has run its backward: what has not arrived will not come."""
        for at in range(len(self._buckets)):
            if self._missing[index][at] > 0:
                self._missing[index][at] = 0
                self._offer(index, at)
        # A gradient that autograd brings in two pieces, as reentrant checkpointing does, has left its second here.
        self._late[index] = _take(self._rows[index], (number for bucket in self._buckets for number in bucket))

    def total(self) -> _Grads:
        """The sums, by number; a source that no replica used has none. After all replicas have ended."""
        totals: _Grads = {}
        root = self._nodes[0]
        for at in range(len(self._buckets)):
            totals.update(root.take(at))
        for late in self._late:
            _add(totals, late, root.device)
        return totals

    def close(self) -> None:
        """Let go of the leaves."""
        for hook in self._hooks:
            hook.remove()
        self._rows, self._hooks = (), []

    def _arrive(self, index: int, at: int, number: int, _leaf: Tensor) -> None:
        if number in self._arrived[index]:
            return
        self._arrived[index].add(number)
        self._missing[index][at] -= 1
        if self._missing[index][at] == 0:
            self._offer(index, at)

    def _offer(self, index: int, at: int) -> None:
        """Replica ``index`` has its gradients of a bucket: add up what can be."""
        node = self._nodes[index]
        node.put(at, _take(self._rows[index], self._buckets[at]))
        while True:
            with self._lock:
                child = node.next_child(at, self._nodes)
                if child is None:
                    if not node.is_whole(at) or node.parent is None:
                        return
                    node = self._nodes[node.parent]
                    continue
                node.is_busy[at] = True
            with working_for(node.index):
                node.add(at, child)
            with self._lock:
                node.is_busy[at] = False
                node.num_taken[at] += 1


class _Node:
    """A replica's place in the tree, and what it has summed so far, for each bucket."""

    def __init__(self, index: int, num_replicas: int, num_buckets: int, device: torch.device) -> None:
        self.index, self.device = index, device
        lowest_bit = index & -index
        self.parent = index - lowest_bit if index else None
        steps = (1 << level for level in range(num_replicas.bit_length()))
        self.children = [
            index + step for step in steps if (not index or step < lowest_bit) and index + step < num_replicas
        ]
        self.num_taken = [0] * num_buckets
        self.is_busy = [False] * num_buckets
        self._sums: list[_Grads | None] = [None] * num_buckets
        self._events: list[Any] = [None] * num_buckets

    def put(self, at: int, grads: _Grads) -> None:
        """Its own gradients."""
        self._sums[at] = grads
        self._mark(at)

    def is_whole(self, at: int) -> bool:
        """Whether it has taken in all its children, and not been taken itself."""
        return self._sums[at] is not None and self.num_taken[at] == len(self.children)

    def next_child(self, at: int, nodes: Sequence["_Node"]) -> "_Node | None":
        """The child to take in now, if it has come; in order, and one at a time."""
        if self._sums[at] is None or self.is_busy[at] or self.num_taken[at] == len(self.children):
            return None
        child = nodes[self.children[self.num_taken[at]]]
        return child if child.is_whole(at) else None

    def add(self, at: int, child: "_Node") -> None:
        """Take in a child's sum. On accelerators after those that made the two, whatever their streams."""
        mine = self._sums[at]
        assert mine is not None
        for node in (self, child):
            node._wait(at)
        _add(mine, child._take(at), self.device)
        self._mark(at)

    def take(self, at: int) -> _Grads:
        """The sum, for the caller's stream."""
        self._wait(at)
        return self._take(at)

    def _take(self, at: int) -> _Grads:
        grads, self._sums[at] = self._sums[at], {}
        return grads or {}

    def _mark(self, at: int) -> None:
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            self._events[at] = module.current_stream(self.device).record_event()

    def _wait(self, at: int) -> None:
        if self._events[at] is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self._events[at])


def _device_of(row: Sequence[Tensor]) -> torch.device:
    return row[0].device if row else torch.device("cpu")


def _take(row: Sequence[Tensor], numbers: Any) -> _Grads:
    taken = {number: row[number].grad for number in numbers}
    for number, grad in taken.items():
        if grad is not None:
            row[number].grad = None
    return {number: grad for number, grad in taken.items() if grad is not None}


def _add(mine: _Grads, theirs: _Grads, device: torch.device) -> None:
    """Add ``theirs`` into ``mine``, which is on ``device``. Empties ``theirs``, whose memory is free then."""
    if theirs and device.type != "cpu":
        theirs = _moved(theirs, device)
    in_place = [n for n in theirs if n in mine and not mine[n].is_sparse and not theirs[n].is_sparse]
    if in_place:
        torch._foreach_add_([mine[n] for n in in_place], [theirs[n] for n in in_place])
    for number in theirs.keys() - set(in_place):
        if number not in mine:
            mine[number] = theirs[number]
        else:
            dense, other = sorted((mine[number], theirs[number]), key=lambda grad: grad.is_sparse)
            mine[number] = dense + other


def _moved(grads: _Grads, device: torch.device) -> _Grads:
    """On another accelerator: the dense ones of a bucket, which are of one dtype, in one message."""
    for grad in grads.values():
        grad.record_stream(torch.get_device_module(grad.device).current_stream(grad.device))
    dense = [number for number, grad in grads.items() if not grad.is_sparse]
    moved = {number: grad.to(device, non_blocking=True) for number, grad in grads.items() if grad.is_sparse}
    if dense:
        originals = [grads[number] for number in dense]
        flat = _flatten_dense_tensors(originals).to(device, non_blocking=True)  # type: ignore[no-untyped-call]
        moved.update(zip(dense, _unflatten_dense_tensors(flat, originals), strict=True))  # type: ignore[no-untyped-call]
    return moved
