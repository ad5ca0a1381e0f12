"""Checkpoints: written whole or not at all, read only if they are good, on one rank for all.

The invariant: a crash at any moment leaves the checkpoint before it as it was.
"""

from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.loading import load
from paceline.checkpoint.saving import save

__all__ = ["Checkpointer", "load", "save"]
