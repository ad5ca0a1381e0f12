"""On which device a rank works and over which backend the ranks talk: what was asked for, if this machine has it."""

import torch
import torch.distributed as dist

from paceline.errors import WorldError


def check_backend(backend: str) -> str:
    """``backend`` in c10d's spelling, or ``auto``.

    Raises:
        WorldError: this torch, or this machine, lacks it.
    """
    backend = backend.lower()
    available = {
        "gloo": dist.is_gloo_available(),
        "mpi": hasattr(dist.distributed_c10d, "ProcessGroupMPI"),  # torch's own, or ours in its place
        "nccl": dist.is_nccl_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
        "undefined": False,
    }
    available |= {name: True for name in dist.Backend.backend_list if name not in available}
    for name in ["gloo"] if backend == "auto" else [part.rpartition(":")[2] for part in backend.split(",")]:
        if name == "mpi" and not available["mpi"]:
            raise WorldError(
                f"backend={backend!r}: mpi4py is not installed. `pip install 'paceline[mpi]'` installs it and Open "
                "MPI; where the system has an MPI of its own, `pip install mpi4py` suffices."
            )
        if not available.get(name):
            offered = ", ".join(sorted(name for name, here in available.items() if here))
            raise WorldError(f"backend={backend!r}: {name!r} is not available here; this torch offers {offered}.")
    if "nccl" in backend and not torch.cuda.is_available():
        raise WorldError(f"backend={backend!r}: NCCL needs a CUDA device, and torch sees none. Use 'gloo' or 'auto'.")
    return backend


def check_device(device: str | torch.device) -> None:
    """Refuse a device that this machine lacks, as far as can be told before the ranks have met.

    Raises:
        WorldError: there is no such device.
    """
    if device == "auto":
        return
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise WorldError(f"device={device!r}: {str(error).splitlines()[0]}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise WorldError(f"device={str(device)!r}: torch sees no CUDA device here. Use 'cpu' or 'auto'.")


def choose_device(
    device: str | torch.device, rank: int, local_rank: int, *, may_be_bound: bool = False
) -> torch.device:
    """This rank's device, made the current one if it is a GPU.

    Args:
        device: ``auto`` is ``cuda:local_rank`` where there is CUDA, else ``cpu``; a GPU without an index, likewise.
        may_be_bound: whoever started this rank may show it its own GPU alone, which then is ``cuda:0`` for each.
    Raises:
        WorldError: this host has too few devices.
    """
    check_device(device)
    chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if chosen.type == "cuda":
        own = 0 if may_be_bound and torch.cuda.device_count() == 1 else local_rank
        index = own if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise WorldError(
                f"rank {rank}: its device would be cuda:{index}, but this host shows "
                f"{torch.cuda.device_count()} CUDA devices. Start fewer ranks per host, or pass device='cpu'."
            )
        chosen = torch.device("cuda", index)
        torch.cuda.set_device(chosen)
    return chosen
