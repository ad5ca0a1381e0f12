"""``srun paceline run``: a step of Slurm's as the hosts of a launch, each task of which is a launcher.

Where a host has one task, its launcher has all ranks of that host. Where it has several, each task is one rank: Slurm
binds every task to cores and GPUs of its own, which another task's launcher could not use.

The invariant: only a step's variables count. Neither a batch script nor a rank is a task of a step: what is launched
there is of this host alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.environment import Placement, read_placement
from paceline.errors import LaunchError
from paceline.launch.layout import LOOPBACK
from paceline.launch.spec.nodes import NodesSpec


@dataclass(frozen=True)
class Step:
    """The step of which this process is a task.

    Attributes:
        placement: of this task among all, as ``paceline.init`` reads it.
        num_gpus: that the step has on this host; 0 where it has asked for none.
        sees_one_gpu: this task may use one GPU alone.
    """

    placement: Placement
    num_gpus: int = 0
    sees_one_gpu: bool = False

    @property
    def tasks_are_ranks(self) -> bool:
        """Whether any host has several tasks."""
        return self.placement.world_size > (self.placement.num_nodes or 1)

    @property
    def binds_gpus(self) -> bool:
        """Whether each rank has a GPU of its own, which it sees as device 0."""
        return self.tasks_are_ranks and self.sees_one_gpu

    def num_ranks(self, asked: str | None) -> str:
        """How many ranks this launcher has, as ``-n`` has it, where ``asked`` was given for it.

        Raises:
            LaunchError: another number than there are tasks on this host.
        """
        if not self.tasks_are_ranks:
            return asked or str(max(1, self.num_gpus))
        num_tasks = self.placement.local_world_size or 1
        if asked not in (None, str(num_tasks)):
            raise LaunchError(
                f"-n {asked}, but srun has started {num_tasks} tasks on this host, and each of them is one rank; leave "
                f"-n out, or have one task a host: srun --ntasks-per-node=1 paceline run -n {asked} ..."
            )
        return "1"

    def nodes(self, run_id: str = "", conf: str = "", local_address: str = "") -> NodesSpec:
        """The launchers of all tasks, which meet where ``paceline.init`` would."""
        place = self.placement
        return NodesSpec(
            place.world_size,
            place.world_size,
            node_rank=place.rank,
            run_id=run_id or place.attempt,
            conf=conf,
            address=place.address or LOOPBACK,
            local_address=local_address,
            host=f"node {place.node_rank}" if self.tasks_are_ranks else "",
            shares_output=True,
        )


def read_step(environ: Mapping[str, str]) -> Step | None:
    """The step that ``environ`` tells of, if this process is one of its tasks.

    Raises:
        EnvironmentVariableError: the variables contradict one another.
    """
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    placement = read_placement(environ)
    if placement.launcher != "slurm":
        return None
    num_gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    visible = [gpu for gpu in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return Step(placement, int(num_gpus) if num_gpus.isdecimal() else 0, sees_one_gpu=len(visible) == 1)
