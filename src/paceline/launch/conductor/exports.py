"""Which variables of the user's environment the other hosts get: those of the libraries that ranks talk through.

Neither secrets by accident nor what describes this machine: PATH, HOME or CUDA_VISIBLE_DEVICES are each host's own.
"""

from collections.abc import Mapping, Sequence

from paceline.errors import LaunchError

_FORWARDED = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "PACELINE_", "PYTHON", "OMP_", "MKL_", "CUDA_", "HF_", "WANDB_")
_KEPT = {"PACELINE_LAUNCHER", "PACELINE_SSH", "CUDA_VISIBLE_DEVICES"}
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")  # at the end of a name: HF_TOKEN, WANDB_API_KEY


def exported(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """What the hosts get of ``environ``.

    Args:
        asked: further ones, each as NAME or NAME=VALUE.
    Raises:
        LaunchError: a NAME is not set here, or is none.
    """
    chosen = {
        name: value
        for name, value in environ.items()
        if name.startswith(_FORWARDED) and not name.endswith(_SECRETS) and name not in _KEPT
    }
    for text in asked:
        name, equals, value = text.partition("=")
        if not name:
            raise LaunchError(f"expected --export NAME or NAME=VALUE, but got {text!r}")
        if not equals and name not in environ:
            raise LaunchError(f"--export {name}: it is not set here; set it, or write --export {name}=VALUE")
        chosen[name] = value if equals else environ[name]
    return chosen


def of_interpreter(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that an interpreter reads before it runs anything."""
    return {name: value for name, value in variables.items() if name.startswith("PYTHON")}
