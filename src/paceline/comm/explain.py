"""What is said of other ranks in errors, and of the system where it refuses something, whatever the transport.

The invariant: ranks are named by their global ranks, and the message says what to do.
"""

import errno

from paceline.comm.transport import Call
from paceline.errors import CollectiveMismatchError, CommunicationError, PeerError


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


def peer_left(rank: int, peer: str, how: str = "") -> PeerError:
    """Of ``peer``, by name, which has ended without any failure, or as ``how`` tells, such as `` and exited``."""
    return PeerError(
        f"rank {rank}: {peer} has left the group{how}. All ranks must call collectives equally often before they end."
    )


def system_refuses(rank: int, what: str, error: OSError, hint: str = "") -> CommunicationError:
    """Of ``rank``, which was refused ``what`` by the system."""
    if is_for_descriptors(error):
        hint = "This process has as many files and sockets open as it may. Close some, or raise the limit: `ulimit -n`."
    return CommunicationError(f"rank {rank}: cannot {what} ({error.strerror or error}). {hint}".strip())


def is_for_descriptors(error: OSError) -> bool:
    """Whether that was for want of descriptors, which files, sockets and mappings need."""
    return error.errno in (errno.EMFILE, errno.ENFILE)
