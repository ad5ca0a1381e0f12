"""Where a life's ranks are among all of the job: what a rendezvous finds out, and torchrun's variables tell.

A *life* is the time from the start of all ranks to their end; a restart begins the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Layout:
    """One life's ranks of this host among all.

    Attributes:
        run_id: of the job, the same in all its lives and on all hosts.
        life: 0 for the first.
        num_ranks: of this launcher, which mostly has all ranks of its host.
        first_rank: the lowest of them.
        world_size: ranks on all hosts.
        first_local_rank: the lowest of this launcher's among those of its host.
        local_world_size: ranks on this host.
        node_rank, num_nodes: of this host among all.
        address, port: of the store in which the ranks meet.
    """

    run_id: str
    life: int
    num_ranks: int
    first_rank: int
    world_size: int
    first_local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int

    @property
    def has_hosted_store(self) -> bool:
        """Whether the launcher serves the store in which the ranks meet.

        A single rank serves its own, if it wants one: it may be the parent of others, which it has meet at a port of
        their own, and torch would look for the launcher's store there too.
        """
        return self.world_size > 1

    @classmethod
    def of_one_host(cls, run_id: str, life: int, num_ranks: int, port: int) -> "Layout":
        return cls(run_id, life, num_ranks, 0, num_ranks, 0, num_ranks, 0, 1, LOOPBACK, port)


def name_hosts(hosts: Sequence[str]) -> list[str]:
    """What tells hosts apart, by launcher.

    Args:
        hosts: what the launchers of one host have in common; empty for one that has a host to itself.
    """
    return [host or f"of launcher {number}" for number, host in enumerate(hosts)]


def place_among(counts: Sequence[int], hosts: Sequence[str], position: int) -> dict[str, int]:
    """Where the ranks of one of several launchers are: what the attributes of ``Layout`` of these names say.

    Args:
        counts: of ranks, by launcher.
        hosts: as for ``name_hosts``.
        position: of the launcher that is asked about.
    """
    names = name_hosts(hosts)
    mates = [number for number, name in enumerate(names) if name == names[position]]
    distinct = list(dict.fromkeys(names))
    return {
        "num_ranks": counts[position],
        "first_rank": sum(counts[:position]),
        "world_size": sum(counts),
        "first_local_rank": sum(counts[mate] for mate in mates if mate < position),
        "local_world_size": sum(counts[mate] for mate in mates),
        "node_rank": distinct.index(names[position]),
        "num_nodes": len(distinct),
    }


def shared_environment(current: Mapping[str, str], *, num_ranks: int, num_cores: int, is_alone: bool) -> dict[str, str]:
    """What must be set before torch is imported, and is the same on all ranks.

    Threads: the cores are shared out, so that N ranks do not start N times as many threads as there are cores.
    Gloo: the ranks of one host meet on the loopback, whatever the machine's name resolves to.

    Args:
        current: the launcher's own environment; what the user set there stays.
        num_ranks: ranks on this host.
        num_cores: cores that this process may use.
        is_alone: whether all ranks are on this host.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_ranks)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if is_alone:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: value for name, value in defaults.items() if name not in current}


def rank_environment(layout: Layout, local_rank: int, *, role: str, max_restarts: int) -> dict[str, str]:
    """The variables that torchrun would set for the rank of this number among the launcher's."""
    rank = str(layout.first_rank + local_rank)
    return {
        "RANK": rank,
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_RANK": str(layout.first_local_rank + local_rank),
        "LOCAL_WORLD_SIZE": str(layout.local_world_size),
        "GROUP_RANK": str(layout.node_rank),
        "GROUP_WORLD_SIZE": str(layout.num_nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": str(layout.world_size),
        "ROLE_NAME": role,
        "MASTER_ADDR": layout.address,
        "MASTER_PORT": str(layout.port),
        "TORCHELASTIC_RUN_ID": layout.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(layout.life),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(layout.has_hosted_store),
    }


def virtual_local_rank(environment: Mapping[str, str], local_rank: int, current: Mapping[str, str]) -> dict[str, str]:
    """Have a rank see its own GPU alone, as device 0: what ``--virtual-local-rank`` changes of its ``environment``.

    Args:
        local_rank: its number among the launcher's.
        current: the launcher's own environment, whose CUDA_VISIBLE_DEVICES may name the GPUs in another order.
    """
    visible = [name for name in current.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    mine = visible[local_rank] if local_rank < len(visible) else str(local_rank)
    return {**environment, "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": mine}
