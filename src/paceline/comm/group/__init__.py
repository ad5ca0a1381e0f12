"""What torch sees of a process group: c10d's many spellings of each collective, brought to one, over any transport."""

from paceline.comm.group.collectives import CollectiveGroup

__all__ = ["CollectiveGroup"]
