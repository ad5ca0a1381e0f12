"""``monitored_barrier``: the barrier that tells who did not come.

All other ranks report to the first and wait for its answer. It is made of messages, not of a collective: a rank that
never comes leaves the group as usable as it was, and rank 0 can tell of each rank by itself.
"""

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from paceline.comm.engine import Engine, Operation
from paceline.comm.transport import Call, Transport
from paceline.errors import CollectiveTimeoutError, PeerError

_TAG = 1 << 40  # beyond those that c10d has, 32 bits
_PASSED, _FAILED = 1, 0


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
    deadline = time.monotonic() + timeout_s

    def exchange(kind: str, peer: int, tensor: torch.Tensor, until: float) -> None:
        start: Callable[..., object] = transport.send if kind == "send" else transport.receive
        call = Call(kind, tensor.dtype, 1, f"of a monitored barrier, rank {ranks[peer]}", where)
        steps = start(tensor, peer, _TAG)
        operation = Operation(call, steps, timeout_s=timeout_s, is_message=True, awaited=lambda: [peer])  # type: ignore[arg-type]
        operation.deadline = float("inf")  # it fails by itself, not the group
        engine.submit(operation)
        try:
            engine.wait(operation, max(0.0, until - time.monotonic()))
        finally:
            engine.cancel(operation)

    me, milliseconds = ranks[transport.rank], round(timeout_s * 1000)
    if transport.rank != 0:
        answer = torch.zeros(1, dtype=torch.int64)
        try:
            exchange("send", 0, torch.tensor([transport.rank]), deadline)
            # Rank 0 may need all of its time before it answers.
            exchange("recv", 0, answer, deadline + timeout_s)
            reason = "it gave up, since others did not come"
        except (CollectiveTimeoutError, PeerError) as error:
            reason = str(error)
        if int(answer) != _PASSED:
            raise PeerError(
                f"Rank {me} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank {ranks[0]}: {reason}. Rank {ranks[0]}'s error names the ranks that did not come."
            )
        return

    late: list[int] = []
    for peer in range(1, transport.size):
        if time.monotonic() >= deadline and not late:
            raise CollectiveTimeoutError(f"Rank {me} timed out in monitoredBarrier after {milliseconds} ms.")
        try:
            exchange("recv", peer, torch.zeros(1, dtype=torch.int64), deadline)
        except (CollectiveTimeoutError, PeerError):
            late.append(peer)
            if not wait_all_ranks:
                break
    for peer in range(1, transport.size):
        if peer not in late:
            with contextlib.suppress(CollectiveTimeoutError, PeerError):
                exchange("send", peer, torch.tensor([_FAILED if late else _PASSED]), time.monotonic() + 1.0)
    if late:
        names = ", ".join(str(ranks[peer]) for peer in late)
        raise CollectiveTimeoutError(
            f"Rank{'s' if len(late) > 1 else ''} {names} failed to pass monitoredBarrier in {milliseconds} ms. Look "
            "where they are; all ranks must call it."
        )
