"""The world that there is, and its end: in order, at exit, or when the script has failed.

The invariant: the other ranks learn that this one leaves, and why, before its sockets close.
"""

import atexit
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from paceline.rendezvous.forks import forget_group_of_parent, make_immortal

if TYPE_CHECKING:
    from paceline.world.world import World

# Told of this process's leaving, before anything is taken down.
_listeners: "list[weakref.WeakMethod[Callable[[str], None]]]" = []

_current: "World | None" = None


def current() -> "World | None":
    """The world that ``init`` made, until ``shutdown``; in a forked child, the parent's."""
    return _current


def enter(world: "World") -> "World":
    """Make ``world`` the one that there is."""
    global _current
    _current = world
    return world


def shutdown() -> None:
    """Leave the job: wait for the other ranks to leave too, then give back sockets and groups. Twice does no harm.

    It waits no longer than ten seconds, and not for ranks that have died. A process group that ``init`` found and took
    over stays.
    """
    end(wait=True)


def on_leaving(listener: Callable[[str], None]) -> None:
    """When this process leaves its job, or ends, call ``listener`` first, with its last words if it failed.

    Args:
        listener: a method, whose object is not kept alive.
    """
    _listeners[:] = [known for known in _listeners if known() is not None]
    _listeners.append(weakref.WeakMethod(listener))


def _tell_listeners(last_words: str) -> None:
    for reference in _listeners:
        listener = reference()
        if listener is not None:
            listener(last_words)


def end(*, wait: bool, last_words: str = "") -> None:
    """Leave the world that there is, if there is one."""
    global _current
    world, _current = _current, None
    if world is None:
        return
    if world._pid != os.getpid():
        make_immortal(world)
        return
    world._stopping.end(world._meeting)
    if world._hooks is not None:  # else the groups outlive the world
        _tell_listeners(last_words)
    try:
        # Whoever is first through the last collective must not close its sockets under the others.
        world._meeting.part(wait=wait, last_words=last_words)
    finally:
        if world._hooks is not None:
            before, torchs = world._hooks  # torch writes [rank0] before each line of a traceback, once for each life
            if sys.excepthook is torchs:
                sys.excepthook = before
            if dist.GroupMember.WORLD is world._group:
                dist.destroy_process_group()
        world._meeting.dismiss()


@atexit.register
def _end_at_exit() -> None:
    error = getattr(sys, "last_value", None)  # set once an exception has ended the script
    _tell_listeners(last_words_of(error))
    end(wait=not _is_failure(error), last_words=last_words_of(error))
    forget_group_of_parent()


def leave(world: "World", error: BaseException | None) -> None:
    """At the end of a ``with`` block over ``world``, which may have been left already."""
    if _current is world:
        end(wait=not _is_failure(error), last_words=last_words_of(error))


def _is_failure(error: BaseException | None) -> bool:
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def last_words_of(error: BaseException | None) -> str:
    """What the other ranks are told: the traceback, if the script failed."""
    return "".join(traceback.format_exception(error)) if error is not None and _is_failure(error) else ""
