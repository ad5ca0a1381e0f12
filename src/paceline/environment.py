"""Where this process stands in its job, read from the variables that launchers set.

This is the only place that reads RANK, WORLD_SIZE and their kin, and what paceline's own variables tell a rank. It is
pure: a mapping goes in, a frozen ``Placement`` comes out, or an error that names the variable, its value and what would
be right.

Launchers that are recognised: torchrun and everything that speaks its variables (``paceline run`` too), Slurm's
``srun``, Open MPI's and MPICH's ``mpirun``. Where RANK and WORLD_SIZE are both set, torchrun's variables count alone,
so that ``srun torchrun ...`` does what it says. Otherwise a scheduler's count, none of torchrun's may contradict them,
and MASTER_ADDR and MASTER_PORT, which batch scripts like to export, overrule what is derived from the job.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.errors import EnvironmentVariableError

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_CLAIMS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # who sets one of these means to start several processes

# Under torchrun's names, those of others; the first that is set counts. In Slurm only the variables of a *step* count:
# a batch script carries SLURM_PROCID=0 and SLURM_NTASKS too, and a plain `python script.py` in it is one process.
_SCHEDULERS: dict[str, dict[str, tuple[str, ...]]] = {
    "open mpi": {
        "RANK": ("OMPI_COMM_WORLD_RANK",),
        "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE",),
        "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    "slurm": {
        "RANK": ("SLURM_PROCID",),
        "WORLD_SIZE": ("SLURM_STEP_NUM_TASKS",),
        "LOCAL_RANK": ("SLURM_LOCALID",),
        "GROUP_RANK": ("SLURM_NODEID",),
        "GROUP_WORLD_SIZE": ("SLURM_STEP_NUM_NODES",),
    },
    "mpich": {
        "RANK": ("PMI_RANK",),
        "WORLD_SIZE": ("PMI_SIZE",),
        "LOCAL_RANK": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    },
}
# What tells one mpirun's job from another's, the same in all its processes. (PMI_FD differs between them.)
_MPI_JOB = ("PMIX_NAMESPACE", "PMI_JOBID", "PMI_PORT", "PBS_JOBID", "LSB_JOBID", "SLURM_JOB_ID")


@dataclass(frozen=True)
class Placement:
    """A process's place among the processes of its job.

    ``None`` where the launcher does not say. ``world_size`` counts processes, not machines.

    Attributes:
        store_is_hosted: a launcher already serves the rendezvous at ``address:port``; otherwise rank 0 does.
        attempt: tells this start of the job from earlier ones that met at the same place.
        launcher: ``torchrun``, ``slurm``, ``open mpi``, ``mpich`` or ``none``.
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


@dataclass(frozen=True)
class _Variable:
    """A value and the name under which it was found, which errors must tell."""

    name: str
    value: str

    def number(self, minimum: int = 0, maximum: int | None = None) -> int:
        wanted = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
        number = int(self.value) if re.fullmatch(r"[0-9]{1,18}", self.value.strip()) else minimum - 1
        if number < minimum or (maximum is not None and number > maximum):
            raise EnvironmentVariableError(f"{self.name}={self.value!r}: expected {wanted}. Correct or unset it.")
        return number


def read_placement(environ: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None) -> Placement:
    """Read this process's place from its environment; without a launcher, a world of one.

    Args:
        environ: usually ``os.environ``.
        rank, world_size: stand in for RANK or WORLD_SIZE where only the other one is set.
    Raises:
        EnvironmentVariableError: a variable is missing while its companions are set, is not a number in range, or
            contradicts another.
    """
    own = {name: _Variable(name, environ[name]) for name in _PLACE if name in environ}
    if "RANK" in own and "WORLD_SIZE" not in own and world_size is not None:
        own["WORLD_SIZE"] = _Variable("world_size", str(world_size))
    elif "WORLD_SIZE" in own and "RANK" not in own and rank is not None:
        own["RANK"] = _Variable("rank", str(rank))
    launcher, found = _scheduler_variables(environ)
    if "RANK" in own and "WORLD_SIZE" in own:
        launcher, chosen = "torchrun", own
    elif found:
        _check_agreement(own, found, launcher)
        chosen = {**own, **found}
    else:
        _check_complete(own)
        chosen = {}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name in environ:
            chosen[name] = _Variable(name, environ[name])
    by_torchrun = launcher == "torchrun"
    return _placement_of(
        chosen,
        launcher=launcher,
        store_is_hosted=by_torchrun and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_attempt_of(environ, launcher),
    )


def shares_memory(environ: Mapping[str, str]) -> bool:
    """Whether this process may use memory that the ranks of a host share, where nobody has named a backend for it.

    Args:
        environ: usually ``os.environ``; PACELINE_SHARED_MEMORY is 1, as by default, or 0.
    Raises:
        EnvironmentVariableError: it is something else.
    """
    return _Variable("PACELINE_SHARED_MEMORY", environ.get("PACELINE_SHARED_MEMORY", "1")).number(0, 1) == 1


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


def expand_nodelist(text: str, variable: str = "node list") -> list[str]:
    """The hosts of a Slurm node list: ``"n[01-03,7],gpu"`` is ``["n01", "n02", "n03", "n7", "gpu"]``.

    Raises:
        EnvironmentVariableError: ``text``, the value of ``variable``, is not such a list.
    """
    range_ = r"[0-9]+(?:-[0-9]+)?"
    name = rf"(?:[^\s,\[\]]|\[{range_}(?:,{range_})*\])+"
    if not re.fullmatch(rf"{name}(?:,{name})*", text):
        raise EnvironmentVariableError(
            f"{variable}={text!r}: expected a list of hosts as Slurm writes it, such as 'n[01-03,7],gpu'."
        )
    return [host for part in re.findall(name, text) for host in _expand(part)]


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


def _placement_of(chosen: Mapping[str, _Variable], *, launcher: str, store_is_hosted: bool, attempt: str) -> Placement:
    """Numbers out of text, each within its bounds."""

    def number(name: str, minimum: int = 0, maximum: int | None = None) -> int | None:
        return chosen[name].number(minimum, maximum) if name in chosen else None

    placement = Placement(
        rank=number("RANK") or 0,
        world_size=number("WORLD_SIZE", minimum=1) or 1,
        local_rank=number("LOCAL_RANK"),
        local_world_size=number("LOCAL_WORLD_SIZE", minimum=1),
        node_rank=number("GROUP_RANK"),
        num_nodes=number("GROUP_WORLD_SIZE", minimum=1),
        address=chosen["MASTER_ADDR"].value if "MASTER_ADDR" in chosen else None,
        port=number("MASTER_PORT", minimum=1, maximum=65535),
        store_is_hosted=store_is_hosted,
        attempt=attempt,
        launcher=launcher,
    )
    for name, bound_name in zip(_PLACE[::2], _PLACE[1::2], strict=True):
        if name in chosen and bound_name in chosen:
            bound = chosen[bound_name].number(minimum=1)
            if chosen[name].number() >= bound:
                raise EnvironmentVariableError(
                    f"{_listed([chosen[name]])} is out of range: {chosen[bound_name].name} is {bound}, so expected "
                    f"0 to {bound - 1}."
                )
    return placement


def _scheduler_variables(environ: Mapping[str, str]) -> tuple[str, dict[str, _Variable]]:
    """What Slurm or MPI says, under torchrun's names."""
    told: dict[str, dict[str, _Variable]] = {}
    for launcher, names in _SCHEDULERS.items():
        found = {
            ours: next(_Variable(name, environ[name]) for name in theirs if name in environ)
            for ours, theirs in names.items()
            if any(name in environ for name in theirs)
        }
        if "RANK" in found and "WORLD_SIZE" in found:
            told[launcher] = found
    # mpirun in a Slurm job starts its daemons with srun, and their variables leak into the ranks; srun itself may set
    # PMI's variables, which then say the same as its own. Sizes decide: they are the same on all ranks.
    if {"slurm", "mpich"} <= told.keys() and told["slurm"]["WORLD_SIZE"].value != told["mpich"]["WORLD_SIZE"].value:
        del told["slurm"]
    for launcher, found in told.items():
        derived = _slurm_place(environ, found) if launcher == "slurm" else _mpi_meeting_point(environ, found)
        return launcher, {**found, **derived}
    return "none", {}


def _attempt_of(environ: Mapping[str, str], launcher: str) -> str:
    """What tells this start from others that might meet at the same place: in Slurm, where ports are derived, the step.

    A job that was requeued keeps its number, and its steps are counted from 0 again.
    """
    if launcher == "slurm" and "MASTER_PORT" not in environ:
        return f"{_slurm_step(environ)}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    return environ.get("TORCHELASTIC_RESTART_COUNT", "0") if launcher == "torchrun" else "0"


def _slurm_step(environ: Mapping[str, str]) -> str:
    return f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"


def _slurm_place(environ: Mapping[str, str], found: Mapping[str, _Variable]) -> dict[str, _Variable]:
    """Where a step's ranks meet: on its first host, at a port derived from its number. And how many are on this one."""
    derived = {"MASTER_PORT": _port_of(_slurm_step(environ))}
    variable = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if environ.get(name)), None)
    if variable is not None:
        hosts = expand_nodelist(environ[variable], variable)
        derived["MASTER_ADDR"] = _Variable(variable, "127.0.0.1" if len(hosts) == 1 else hosts[0])
    if "SLURM_STEP_TASKS_PER_NODE" in environ and "GROUP_RANK" in found:
        text = environ["SLURM_STEP_TASKS_PER_NODE"]
        counts = _expand_counts(text)
        node = found["GROUP_RANK"].number()
        if node >= len(counts):
            raise EnvironmentVariableError(
                f"{_listed([found['GROUP_RANK']])} is out of range: SLURM_STEP_TASKS_PER_NODE={text!r} lists "
                f"{len(counts)} hosts."
            )
        derived["LOCAL_WORLD_SIZE"] = _Variable("SLURM_STEP_TASKS_PER_NODE", str(counts[node]))
    return derived


def _expand_counts(text: str) -> list[int]:
    """``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    item = r"([0-9]+)(?:\(x([0-9]+)\))?"
    parts = [re.fullmatch(item, part) for part in text.split(",")]
    if not all(parts):
        raise EnvironmentVariableError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected counts as Slurm writes them, such as '2(x3),1'."
        )
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def _mpi_meeting_point(environ: Mapping[str, str], found: Mapping[str, _Variable]) -> dict[str, _Variable]:
    """On one host, a port derived from the job's name; on several, MASTER_ADDR must say which of them has rank 0."""
    local_size = found.get("LOCAL_WORLD_SIZE")
    if local_size is None or local_size.value != found["WORLD_SIZE"].value:
        return {}
    job = next((environ[name] for name in _MPI_JOB if name in environ), "")
    return {"MASTER_ADDR": _Variable("MASTER_ADDR", "127.0.0.1"), "MASTER_PORT": _port_of(job)}


def _port_of(job: str) -> _Variable:
    """A port between 20000 and 29999, below the range from which kernels take ports for outgoing connections."""
    return _Variable("MASTER_PORT", str(20000 + zlib.crc32(job.encode()) % 10000))


def _check_complete(own: Mapping[str, _Variable]) -> None:
    """Without a scheduler: both of RANK and WORLD_SIZE, or nothing."""
    claims = [own[name] for name in _CLAIMS if name in own]
    if claims:
        absent = "RANK" if "RANK" not in own else "WORLD_SIZE"
        raise EnvironmentVariableError(
            f"{absent} is not set, but {_listed(claims)} is. Start the script with `paceline run`, torchrun, srun or "
            f"mpirun, which set RANK and WORLD_SIZE together; or unset {', '.join(v.name for v in claims)} to run as "
            "one process."
        )


def _check_agreement(own: Mapping[str, _Variable], found: Mapping[str, _Variable], launcher: str) -> None:
    for name, variable in own.items():
        if name in found and found[name].value != variable.value:
            raise EnvironmentVariableError(
                f"{_listed([variable])} contradicts {_listed([found[name]])}, which {launcher} has set. Unset {name}, "
                "or set RANK and WORLD_SIZE both to overrule the scheduler."
            )


def _listed(variables: list[_Variable]) -> str:
    return ", ".join(f"{variable.name}={variable.value!r}" for variable in variables)
