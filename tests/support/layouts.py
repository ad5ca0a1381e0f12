"""Worlds over several hosts on one machine: ranks are told that they are on some host, and talk over the loopback.

A layout has the host of each rank. Those of one host share memory.
"""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import paceline
from support.ranks import expect_errors, run_ranks


def on_hosts(layout: Sequence[int], fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``fn(world, *args)`` on a rank for each entry of ``layout``: what it returned, by rank."""
    return run_ranks(len(layout), _live, layout, fn, args, join=False, timeout_s=timeout_s)


def errors_on_hosts(layout: Sequence[int], fn: Callable[..., Any], *args: Any) -> list[str]:
    """What ``fn`` raises on each rank, as ``Type: message``."""
    return expect_errors(len(layout), _live, layout, fn, args, join=False)


def run_on(where: "str | Sequence[int]", fn: Callable[..., Any], *args: Any, size: int = 3) -> list[Any]:
    """Call ``fn(world, *args)`` on ``size`` ranks of a backend, or over the hosts of a layout."""
    return run_ranks(size, fn, *args, backend=where) if isinstance(where, str) else on_hosts(where, fn, *args)


def _live(
    rank: int, size: int, directory: str, layout: Sequence[int], fn: Callable[..., Any], args: Sequence[Any]
) -> Any:
    host = layout[rank]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(layout[:rank].count(host)),
        "LOCAL_WORLD_SIZE": str(layout.count(host)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(max(layout) + 1),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with paceline.init("hier", pathlib.Path(directory, "rendezvous").as_uri(), timeout=20) as world:
        return fn(world, *args)
