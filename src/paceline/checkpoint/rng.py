"""The states of all random generators of a rank: Python's, NumPy's, torch's, and the one of its GPU.

The invariant: states are tensors and plain values, so that loading them needs no trust.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def states() -> dict[str, Any]:
    """This rank's states, for ``restore``."""
    _, keys, *rest = np.random.get_state()
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(of_ranks: Sequence[dict[str, Any]], rank: int) -> None:
    """Go on with the states that this rank had; one that there was not yet gets a seed that follows from another's."""
    if rank >= len(of_ranks):
        known = of_ranks[rank % len(of_ranks)]["torch"].numpy().tobytes()
        seed = int.from_bytes(hashlib.blake2b(known + str(rank).encode(), digest_size=8).digest(), "big") >> 1
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        return
    own = of_ranks[rank]
    keys, *rest = own["numpy"]
    random.setstate(own["python"])
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(own["torch"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
