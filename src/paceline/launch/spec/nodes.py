"""Which hosts take part, and how they meet."""

from dataclasses import dataclass

from paceline.errors import LaunchError
from paceline.launch.layout import LOOPBACK


@dataclass(frozen=True)
class NodesSpec:
    """The hosts of a job, each of which has a launcher of its own.

    Args:
        least, most: how many there are.
        node_rank: of this one, where the rendezvous is static.
        backend: of the rendezvous: static, c10d, or any other that torch.distributed.elastic knows.
        endpoint: where the launchers meet, as HOST:PORT; where it is empty, at ``address``.
        run_id: what tells this job from others at the same endpoint; empty for one of its own.
        conf: of the rendezvous, as torch.distributed.elastic takes it.
        address: of the first host, where the rendezvous is static.
        local_address: of this host, as the others reach it; empty to find out.
        host: what the launchers of one host have in common; empty where no host has several.
        shares_output: all launchers write to one place, so that what all of them know is said by one.
    """

    least: int = 1
    most: int = 1
    node_rank: int = 0
    backend: str = "static"
    endpoint: str = ""
    run_id: str = ""
    conf: str = ""
    address: str = LOOPBACK
    local_address: str = ""
    host: str = ""
    shares_output: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise LaunchError(
                f"expected --nnodes N, or LEAST:MOST with 1 <= LEAST <= MOST, but got {self.least}:{self.most}"
            )
        if self.backend == "static" and not 0 <= self.node_rank < self.most:
            raise LaunchError(f"expected --node-rank from 0 to {self.most - 1}, but got {self.node_rank}")
        if self.backend == "static" and self.least != self.most:
            raise LaunchError(
                f"--nnodes {self.least}:{self.most} lets hosts come and go, which a static rendezvous cannot; "
                "add --rdzv-backend c10d and --rdzv-endpoint HOST:PORT"
            )

    @property
    def is_alone(self) -> bool:
        """Whether there is no other host."""
        return self.most == 1
