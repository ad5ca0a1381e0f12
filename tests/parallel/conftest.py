"""The two ways in which gradients travel; what depends on the way is tested over both."""

import pytest

from paceline.parallel.buckets import dense
from support.ranks import run_ranks


@pytest.fixture(params=["shared memory, together", "gloo, at once"])
def both_ways(request, monkeypatch):
    """Over shared memory, where a gradient waits for its bucket, and over Gloo, with every gradient taken at once.

    Ranks are forked, so what is set here holds in them. Tests without this fixture run over shared memory.
    """
    if request.param == "gloo, at once":
        monkeypatch.setattr(dense, "_HUGE_NUMEL", 0)
        monkeypatch.setitem(run_ranks.__kwdefaults__, "backend", "gloo")
