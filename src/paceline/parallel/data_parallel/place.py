"""Which replica the running code works for, so that memory can be booked to it.

The invariant: a context variable says it, so each thread has its own answer.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_replica: ContextVar[int | None] = ContextVar("paceline_replica", default=None)


def current_replica() -> int | None:
    """The number of the replica; None outside of any."""
    return _replica.get()


@contextlib.contextmanager
def working_for(index: int) -> Iterator[None]:
    """Work for that replica in this block."""
    token = _replica.set(index)
    try:
        yield
    finally:
        _replica.reset(token)
