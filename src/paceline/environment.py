"""Where this process stands in its job, read from the variables that launchers set.

This is the only place that reads RANK, WORLD_SIZE and their kin. It is pure: a mapping goes in, a frozen
``Placement`` comes out, or an error that names the variable, its value and what would be right.

Launchers that are recognised: torchrun and everything that speaks its variables (``paceline run`` too), Slurm's
``srun``, Open MPI's and MPICH's ``mpirun``. A variable of torchrun's overrides a scheduler's of the same meaning, so
that ``srun torchrun ...`` and a batch script that exports MASTER_ADDR both do what they say.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import EnvironmentVariableError

_NEEDED = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Placement:
    """A process's place among the processes of its job.

    ``None`` where the launcher does not say. ``world_size`` counts processes, not machines.

    Attributes:
        store_is_hosted: a launcher already serves the rendezvous at ``address:port``; otherwise rank 0 does.
        attempt: tells this start of the job from earlier ones that met at the same place.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    num_nodes: int | None = None
    address: str | None = None
    port: int | None = None
    store_is_hosted: bool = False
    attempt: str = "0"
    launcher: str = "none"


def read_placement(environ: Mapping[str, str]) -> Placement:
    """Read this process's place from its environment; without a launcher, a world of one.

    Args:
        environ: usually ``os.environ``.
    Raises:
        EnvironmentVariableError: a variable is missing while its companions are set, is not a number in range, or
            contradicts another.
    """
    launcher, found = _scheduler_variables(environ)
    own = {name: environ[name] for name in (*_NEEDED, "LOCAL_RANK") if name in environ}
    if not own and not found:
        return Placement()
    if found and "RANK" not in own:
        _check_agreement(own, found, launcher)
    merged = {**environ, **found, **own}
    if all(name in own for name in _NEEDED):
        launcher, merged = "torchrun", dict(environ)  # a launcher within the scheduler's job has the last word
    merged.update({name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environ})
    for name in _NEEDED:
        if name not in merged:
            raise EnvironmentVariableError(
                f"{name} is not set, but {_listed(own)} is. Start the script with `paceline run`, torchrun, srun or "
                f"mpirun, which set RANK and WORLD_SIZE together; or unset {', '.join(own)} to run as one process."
            )
    rank, world_size = _number(merged, "RANK"), _number(merged, "WORLD_SIZE", minimum=1)
    _check_below(merged, "RANK", rank, "WORLD_SIZE", world_size)
    local_rank, local_world_size = _optional(merged, "LOCAL_RANK"), _optional(merged, "LOCAL_WORLD_SIZE", minimum=1)
    if local_rank is not None and local_world_size is not None:
        _check_below(merged, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_optional(merged, "GROUP_RANK"),
        num_nodes=_optional(merged, "GROUP_WORLD_SIZE", minimum=1),
        address=merged.get("MASTER_ADDR"),
        port=_optional(merged, "MASTER_PORT", minimum=1, maximum=65535),
        store_is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        launcher=launcher,
    )


def meeting_point(placement: Placement) -> tuple[str, int]:
    """The address and port at which the ranks meet, or an error that names what is missing."""
    for name, value, example in (
        ("MASTER_ADDR", placement.address, "the address of rank 0's host, such as 127.0.0.1 on one machine"),
        ("MASTER_PORT", placement.port, "a port that is free on rank 0's host, such as 29500"),
    ):
        if value is None or value == "":
            raise EnvironmentVariableError(
                f"rank {placement.rank}: {name} is {'empty' if value == '' else 'not set'}, but the world has "
                f"{placement.world_size} processes, which must meet somewhere. Set it to {example}; "
                "`paceline run` and torchrun do that by themselves."
            )
    assert placement.address is not None
    assert placement.port is not None
    return placement.address, placement.port


def _scheduler_variables(environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """What Slurm or MPI says, under torchrun's names."""
    for launcher, names in _SCHEDULERS.items():
        if names["RANK"] in environ and names["WORLD_SIZE"] in environ:
            found = {ours: environ[theirs] for ours, theirs in names.items() if theirs in environ}
            return launcher, {**found, **_meeting_point_of(launcher, environ, found)}
    return "none", {}


# In Slurm only the variables of a *step* count: a batch script carries SLURM_PROCID=0 and SLURM_NTASKS too, and
# a plain `python script.py` in it is one process. Only srun starts a step.
_SCHEDULERS: dict[str, dict[str, str]] = {
    "slurm": {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "GROUP_RANK": "SLURM_NODEID",
        "GROUP_WORLD_SIZE": "SLURM_STEP_NUM_NODES",
    },
    "open mpi": {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "mpich": {
        "RANK": "PMI_RANK",
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
}


def _meeting_point_of(launcher: str, environ: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Where a scheduler's ranks meet: a host they all know, and a port derived from the job's identity."""
    if launcher == "slurm":
        hosts = expand_nodelist(environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "")))
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        point = {"MASTER_PORT": str(_port_of(job))}
        if hosts:
            alone = len(hosts) == 1
            point["MASTER_ADDR"] = "127.0.0.1" if alone else hosts[0]
        return point
    if found.get("LOCAL_WORLD_SIZE") != found["WORLD_SIZE"]:
        return {}  # several hosts: MASTER_ADDR must say which of them has rank 0
    job = environ.get("PMIX_NAMESPACE", environ.get("PMI_FD", environ.get("PMI_PORT", "")))
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_port_of(job))}


def _port_of(job: str) -> int:
    """A port between 20000 and 29999, below the range from which kernels take ports for outgoing connections."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a Slurm node list: ``"n[01-03,7],gpu"`` is ``["n01", "n02", "n03", "n7", "gpu"]``."""
    return [name for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for name in _expand(part)]


def _expand(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expand(after):
                yield f"{before}{number:0{len(first)}d}{tail}"


def _check_agreement(own: Mapping[str, str], found: Mapping[str, str], launcher: str) -> None:
    for name, value in own.items():
        if name in found and found[name] != value:
            theirs = _SCHEDULERS[launcher][name]
            raise EnvironmentVariableError(
                f"{name}={value!r} contradicts {theirs}={found[name]!r}, which {launcher} has set. Unset {name}, or "
                "set RANK and WORLD_SIZE both to overrule the scheduler."
            )


def _number(environ: Mapping[str, str], name: str, minimum: int = 0, maximum: int | None = None) -> int:
    value = environ[name]
    wanted = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum or (maximum is not None and number > maximum):
        raise EnvironmentVariableError(f"{name}={value!r}: expected {wanted}. Correct or unset it.")
    return number


def _optional(environ: Mapping[str, str], name: str, minimum: int = 0, maximum: int | None = None) -> int | None:
    return _number(environ, name, minimum, maximum) if name in environ else None


def _check_below(environ: Mapping[str, str], name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        raise EnvironmentVariableError(
            f"{name}={environ[name]!r} is out of range: {bound_name} is {bound}, so expected 0 to {bound - 1}."
        )


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in names.items())
