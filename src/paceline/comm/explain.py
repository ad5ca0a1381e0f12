"""What is said of other ranks in errors, whatever the transport.

The invariant: ranks are named by their global ranks, and the message says what to do.
"""

from paceline.comm.transport import Call
from paceline.errors import CollectiveMismatchError, PeerError


def different_calls(rank: int, call: Call, peer: int, theirs: str) -> CollectiveMismatchError:
    """Of ``rank``, which has called ``call``, and ``peer``, which has called something else."""
    return CollectiveMismatchError(
        f"rank {rank} called {call}, but rank {peer} called {theirs}. All ranks must call the same collectives in the "
        "same order, with tensors of the same size and dtype."
    )


def different_sizes(call: Call, giver: int, given: int, taker: int, taken: int) -> CollectiveMismatchError:
    """Of ``giver``, which has as many elements as ``given`` for ``taker``, which expects others."""
    return CollectiveMismatchError(
        f"{call.kind}: rank {giver} has {given} elements for rank {taker}, which expects {taken}. Sizes must be the "
        "same on both sides." + (f" This rank's call is at {call.where}." if call.where else "")
    )


def different_messages(rank: int, wanted: str, tag: int, source: int, came: str) -> CollectiveMismatchError:
    """Of ``rank``, which waits for something else than ``source`` has sent."""
    return CollectiveMismatchError(
        f"rank {rank} waits for {wanted} with tag {tag}, but rank {source} sent {came}. Send and receive tensors of "
        "the same size and dtype."
    )


def peer_failed(rank: int, peer: str, words: str) -> PeerError:
    """Of ``peer``, by name, which has given the group up with these last words."""
    return PeerError(f"rank {rank}: {peer} failed, and takes part in this group no more:\n{words}")


def peer_left(rank: int, peer: str) -> PeerError:
    """Of ``peer``, by name, which has ended without any failure."""
    return PeerError(
        f"rank {rank}: {peer} has left the group. All ranks must call collectives equally often before they end."
    )
