"""The environment of the ranks, as pure functions: torchrun's variables, so that scripts written for it just run."""

from collections.abc import Mapping

from paceline.launch.spec import LaunchSpec

MASTER_ADDR = "127.0.0.1"


def shared_environment(current: Mapping[str, str], *, num_ranks: int, num_cores: int) -> dict[str, str]:
    """What must be set before torch is imported, and is the same on all ranks.

    Threads: the cores are shared out, so that N ranks do not start N times as many threads as there are cores.
    Gloo: the ranks of one host meet on the loopback, whatever the machine's name resolves to.

    Args:
        current: the launcher's own environment; what the user set there stays.
        num_ranks: ranks on this host.
        num_cores: cores that this process may use.
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_ranks)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return {name: value for name, value in defaults.items() if name not in current}


def rank_environment(spec: LaunchSpec, rank: int, *, port: int, run_id: str) -> dict[str, str]:
    """The variables that torchrun would set for ``rank``, on one host and without restarts."""
    num_ranks = str(spec.num_ranks)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": num_ranks,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": num_ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": MASTER_ADDR,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
