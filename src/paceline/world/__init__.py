"""``init``, ``shutdown`` and the ``World`` between them: who takes part, on which device, over which backend.

A world of one is a world like any other: it has a process group, and every method does what it says.

The invariant: what ``init`` has made, ``shutdown`` ends, and nothing else. A process group that somebody else has made
is used and left; in a forked child, the parent's world and group are the parent's.
"""

from paceline.world.joining import init
from paceline.world.leaving import current, on_leaving, shutdown
from paceline.world.world import World

__all__ = ["World", "current", "init", "on_leaving", "shutdown"]
