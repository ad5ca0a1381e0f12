"""A job on several hosts as its user typed it, before any of them has been asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.launch.conductor.hostfile import HostSpec


@dataclass(frozen=True)
class Job:
    """One launch on ``hosts``, all from this command.

    Args:
        hosts: in the order of their numbers.
        script, args: as typed; a path is looked for on each host.
        options: of ``paceline run``, which each host reads for itself.
        python: the interpreter and its flags.
        folder: where the script runs.
        environment: variables that the hosts get.
        signals: the names of further ones that are passed on.
        has_streams_apart: stdout and stderr are to be told apart.
        max_restarts: how often all ranks are started again after one has failed.
        report_path: where the verdict is written here, as JSON; empty for nowhere.
    """

    hosts: tuple[HostSpec, ...]
    script: str
    args: tuple[str, ...]
    options: Mapping[str, Any]
    python: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    signals: tuple[str, ...] = ()
    has_streams_apart: bool = False
    max_restarts: int = 0
    report_path: str = ""

    def options_of(self, node_rank: int, run_id: str) -> dict[str, Any]:
        """What the host of that number is to read."""
        own = {"nnodes": str(len(self.hosts)), "node_rank": node_rank, "rdzv_id": run_id}
        num_ranks = self.hosts[node_rank].num_ranks
        return {**self.options, **own, **({} if num_ranks is None else {"num_ranks": str(num_ranks)})}
