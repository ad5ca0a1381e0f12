"""What training on several devices would gain: measured here, beside torch, and drawn.

The invariant: all that is compared took turns on the same machine, and what failed is named beside what did not.
"""

from paceline.bench.results import Bench

__all__ = ["Bench"]
