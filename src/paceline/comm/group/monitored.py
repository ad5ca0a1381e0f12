"""``monitored_barrier``: the barrier that tells who did not come.

All other ranks report to the first and wait for its answer. It is made of messages, not of a collective: a rank that
never comes leaves the group as usable as it was, and rank 0 can tell of each rank by itself.

The invariant: reports and answers carry the number of the barrier that they are of. Of one that was given up, some may
arrive long after it; they are never taken for those of another.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.comm.engine import Engine, Operation
from paceline.comm.transport import Call, Transport
from paceline.errors import CollectiveTimeoutError, PeerError

_TAG = 1 << 40  # beyond those that c10d has, 32 bits
_PASSED, _FAILED = 1, 0
_ANSWER_S = 1.0  # for a rank that waits for it


@dataclass
class _Past:
    """The barriers of one group.

    Attributes:
        number: of the last one that this rank has called.
        reported: on the first rank, the number of each other one's last report.
    """

    number: int = 0
    reported: dict[int, int] = field(default_factory=dict)


_past: "weakref.WeakKeyDictionary[Engine, _Past]" = weakref.WeakKeyDictionary()


def pass_monitored_barrier(
    engine: Engine, transport: Transport, ranks: Sequence[int], timeout_s: float, wait_all_ranks: bool, where: str
) -> None:
    """Return when all ranks have come.

    Args:
        wait_all_ranks: whether rank 0 names all ranks that did not come, not the first alone.
    Raises:
        CollectiveTimeoutError: on rank 0, which names who did not come.
        PeerError: on the others, when rank 0 gave up or did not answer.
    """
    past = _past.setdefault(engine, _Past())
    past.number += 1
    barrier = _Barrier(engine, transport, ranks, timeout_s, where, past)
    if transport.rank == 0:
        barrier.hear_all(wait_all_ranks)
    else:
        barrier.report()


@dataclass
class _Barrier:
    """One call of it, on one rank."""

    engine: Engine
    transport: Transport
    ranks: Sequence[int]
    timeout_s: float
    where: str
    past: _Past

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout_s

    def report(self) -> None:
        """On all ranks but the first."""
        answer = torch.zeros(2, dtype=torch.int64)  # a barrier's number, and how it ended
        try:
            self._exchange("send", 0, torch.tensor([self.past.number, 0]), self.deadline)
            while int(answer[0]) < self.past.number:
                # Rank 0 may need all of its time before it answers.
                self._exchange("recv", 0, answer, self.deadline + self.timeout_s)
            reason = "it gave up, since not all ranks came in time"
        except (CollectiveTimeoutError, PeerError) as error:
            answer[1], reason = _FAILED, str(error)
        if int(answer[1]) != _PASSED:
            me, first = self.ranks[self.transport.rank], self.ranks[0]
            raise PeerError(
                f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank {first}: {reason}. Rank {first}'s error names the ranks that did not come."
            )

    def hear_all(self, wait_all_ranks: bool) -> None:
        """On the first rank."""
        me, milliseconds = self.ranks[0], round(self.timeout_s * 1000)
        late: list[int] = []
        fates: list[str] = []
        for peer in range(1, self.transport.size):
            if time.monotonic() >= self.deadline and not late:
                raise CollectiveTimeoutError(f"Rank {me} timed out in monitoredBarrier after {milliseconds} ms.")
            try:
                self._hear(peer)
            except CollectiveTimeoutError:
                late.append(peer)
            except PeerError as error:
                late.append(peer)
                fates.append(f" {error}")
            if late and not wait_all_ranks:
                break
        for peer in range(1, self.transport.size):
            if peer not in late:
                self._answer(peer, self.past.number, _FAILED if late else _PASSED)
        if late:
            names = ", ".join(str(self.ranks[peer]) for peer in late)
            raise CollectiveTimeoutError(
                f"Rank{'s' if len(late) > 1 else ''} {names} failed to pass monitoredBarrier in {milliseconds} ms. "
                f"Look where they are; all ranks must call it.{''.join(fates)}"
            )

    def _hear(self, peer: int) -> None:
        """Until a rank has reported to this barrier, or to a later one: it gave this one up then, but it had come."""
        reported = self.past.reported
        while reported.get(peer, 0) < self.past.number:
            report = torch.zeros(2, dtype=torch.int64)
            self._exchange("recv", peer, report, self.deadline)
            reported[peer] = int(report[0])
            if reported[peer] < self.past.number:
                self._answer(peer, reported[peer], _FAILED)  # it may wait for that still

    def _answer(self, peer: int, number: int, verdict: int) -> None:
        with contextlib.suppress(CollectiveTimeoutError, PeerError):
            self._exchange("send", peer, torch.tensor([number, verdict]), time.monotonic() + _ANSWER_S)

    def _exchange(self, kind: str, peer: int, tensor: torch.Tensor, until: float) -> None:
        start: Callable[..., object] = self.transport.send if kind == "send" else self.transport.receive
        call = Call(kind, tensor.dtype, tensor.numel(), f"of a monitored barrier, rank {self.ranks[peer]}", self.where)
        operation = Operation(
            call,
            start(tensor, peer, _TAG),  # type: ignore[arg-type]
            timeout_s=self.timeout_s,
            is_message=True,
            awaited=lambda: [peer],
        )
        operation.deadline = float("inf")  # [Note: failing alone] in lookout.py
        self.engine.submit(operation)
        try:
            self.engine.wait(operation, max(0.0, until - time.monotonic()))
        finally:
            self.engine.cancel(operation)
