"""What drives the operations of a process group, and the one place where anything waits."""

from paceline.comm.engine.engine import Engine
from paceline.comm.engine.operation import Operation

__all__ = ["Engine", "Operation"]
