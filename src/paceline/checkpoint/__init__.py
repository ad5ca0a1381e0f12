"""Checkpoints: written whole or not at all, read only if they are good, on one rank for all.

The invariant: a crash at any moment leaves the checkpoint before it as it was.
"""

from paceline.checkpoint.load import load
from paceline.checkpoint.save import save

__all__ = ["load", "save"]
