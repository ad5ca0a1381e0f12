"""The life that there is, and what the launcher can do with it."""

from dataclasses import dataclass

from paceline.launch.hangs.telling import Whereabouts
from paceline.launch.lives.life import Life
from paceline.launch.supervisor.stopping import Stopping


@dataclass(frozen=True)
class Current:
    """A life of the ranks, from their birth until all have ended.

    Attributes:
        stopping: ends them.
        whereabouts: says where they are.
    """

    life: Life
    stopping: Stopping
    whereabouts: Whereabouts
