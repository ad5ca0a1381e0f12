"""Which part of a tensor each of several ranks works on.

The invariant: it follows from sizes alone, so ranks agree on it without a word; and no two write to one cache line.
"""

import functools
import itertools

_ALIGNED_NUMEL = 64  # where a share may begin


@functools.lru_cache(maxsize=1024)
def shares_of(numel: int, num_shares: int) -> tuple[tuple[int, int], ...]:
    """Split ``numel`` elements into shares (start, end); equal but for the last ones, and aligned."""
    length = -(-numel // num_shares)
    length = -(-length // _ALIGNED_NUMEL) * _ALIGNED_NUMEL
    edges = [min(share * length, numel) for share in range(num_shares + 1)]
    return tuple(itertools.pairwise(edges))
