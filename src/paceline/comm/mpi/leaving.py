"""Groups that this rank has left, and not all others.

The invariant: what belongs to a group is freed only when all its ranks have left, so no notice is lost with it.
"""

import threading
import time
from collections.abc import Callable

from paceline.comm.mpi.wire import LONGEST_NAP_S

_leaving: list[Callable[[], bool]] = []  # each frees what belongs to a group, if all its ranks have left
_seeing_off = threading.Lock()


def leave(try_to_free: Callable[[], bool]) -> None:
    """Call ``try_to_free``, now and later, until it returns true."""
    _leaving.append(try_to_free)
    see_off()


def see_off() -> None:
    """Free what belonged to groups that all their ranks have left."""
    if _seeing_off.acquire(blocking=False):  # a group that is garbage may end in the middle of this
        try:
            for try_to_free in list(_leaving):
                if try_to_free():
                    _leaving.remove(try_to_free)
        finally:
            _seeing_off.release()


def see_off_until(deadline: float) -> None:
    """``see_off`` until nothing is left to free, or it is ``deadline``, of ``time.monotonic``."""
    while _leaving and time.monotonic() < deadline:
        see_off()
        time.sleep(LONGEST_NAP_S)
