"""The place that this process has in the job: what the launcher and the caller say, and what the ranks tell each other.

The invariant: a place is checked against all that is known before any other rank is involved.
"""

import dataclasses
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.devices import choose_device
from paceline.environment import Placement, read_placement
from paceline.errors import WorldError
from paceline.rendezvous import Meeting, Method, Peer
from paceline.world.world import World


def placed(method: Method, world_size: int | None, rank: int | None) -> Placement:
    """The environment's placement with the caller's arguments over it, checked."""
    arguments = {"rank": rank, "world_size": world_size}
    given = method.given | {name: value for name, value in arguments.items() if value is not None}
    placement = read_placement(os.environ, **given)
    if placement.launcher == "none" and (given or not method.is_env):
        for name in ("rank", "world_size"):
            if name not in given:
                raise WorldError(
                    f"init(init_method={method.text!r}{''.join(f', {k}={v}' for k, v in given.items())}) needs {name} "
                    "too, and no launcher has set it. Pass init(..., rank=r, world_size=n); or start the script with "
                    "`paceline run`, which sets both."
                )
    if given.items() <= vars(placement).items():
        return placement
    # The launcher spoke of another rank's place on its host.
    placed = dataclasses.replace(
        placement,
        rank=given.get("rank", placement.rank),
        world_size=given.get("world_size", placement.world_size),
        local_rank=None,
        local_world_size=None,
        node_rank=None,
        num_nodes=None,
    )
    if placed.world_size < 1 or not 0 <= placed.rank < placed.world_size:
        raise WorldError(
            f"rank={placed.rank}, world_size={placed.world_size}: expected a world_size of at least 1 and a rank from "
            "0 to world_size - 1."
        )
    return placed


def world_of(
    placement: Placement, meeting: Meeting, timeout_s: float, backend: str, device: str | torch.device
) -> World:
    """Complete what the launcher left open from what the ranks told one another."""
    nodes = [peer.node for peer in meeting.peers]
    mine = nodes[placement.rank]
    order = list(dict.fromkeys(nodes))
    local_rank = placement.local_rank
    if local_rank is None:
        local_rank = nodes[: placement.rank].count(mine)
    # Slurm's --gpus-per-task and --gpu-bind show each task its own GPU alone.
    chosen = choose_device(device, placement.rank, local_rank, may_be_bound=placement.launcher == "slurm")
    if backend == "auto":
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else choose_cpu_backend(meeting.peers)
    return World(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=local_rank,
        local_world_size=placement.local_world_size or nodes.count(mine),
        node_rank=order.index(mine) if placement.node_rank is None else placement.node_rank,
        num_nodes=placement.num_nodes or len(order),
        device=chosen,
        backend=backend,
        _meeting=meeting,
        _timeout_s=timeout_s,
    )


def choose_cpu_backend(peers: Sequence[Peer]) -> str:
    """Shared memory within a host, a hierarchy across hosts; Gloo where a host's ranks cannot, or may not, share it."""
    views = {(peer.node, peer.pid_namespace) for peer in peers}
    nodes = {peer.node for peer in peers}
    if not all(peer.shares_memory for peer in peers):
        return "gloo"
    if not {"shm", "hier"} <= set(dist.Backend.backend_list) or len(views) > len(nodes):
        return "gloo"
    return "shm" if len(nodes) == 1 else "hier"
