"""Weights alone, in the format of safetensors: what other programs read, and what cannot hold code.

The invariant: every name of a state dict is there after loading, also where several names mean one tensor, which the
format would keep once only.
"""

import os
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from paceline.checkpoint.atomic import Draft
from paceline.errors import CheckpointError

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether a file is to be written in this format: by its name."""
    return os.fspath(path).endswith(".safetensors")


def looks_like_safetensors(file: BinaryIO) -> bool:
    """Whether a file has this format: a length, then a header in JSON."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    return start[8:] == b"{" and length <= _HEADER_LIMIT_BYTES and 8 + length <= size


def write(state: Any, draft: Draft) -> None:
    """Write a dict of tensors by name.

    Raises:
        CheckpointError: it is something else; or the package is not installed.
        OSError: of the disk.
    """
    safetensors = _library()
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(
            f"a file of safetensors holds a dict of tensors by name, and this is {_in_words(state)}. Give it "
            "model.state_dict(), or save to a name that ends in .pt."
        )
    first_of: dict[Any, str] = {}
    same_as: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        known = first_of.setdefault(_identity(tensor), name)
        if known == name:
            # In memory of its own: the library refuses tensors that overlap, though they are no two names of one.
            is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            tensors[name] = tensor.detach() if is_whole else tensor.detach().clone().contiguous()
        else:
            same_as[name] = known
    try:
        safetensors.torch.save_file(tensors, draft.path, metadata={"format": "pt", **same_as})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error  # what it makes of an error of the disk


def read(path: str) -> dict[str, Tensor]:
    """The tensors, on the CPU; names that meant one tensor when it was written by ``write`` share it.

    Raises:
        CheckpointError: the package is not installed.
        Exception: the library's own, where the file is damaged.
    """
    with _library().safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        metadata = file.metadata() or {}
    return state | {name: state[same] for name, same in metadata.items() if same in state and name not in state}


def _library() -> ModuleType:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise CheckpointError(
            "files of safetensors need the package of that name: pip install 'paceline[safetensors]'."
        ) from None
    return safetensors


def _identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return object()
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (tensor.device, *place, tensor.dtype, tensor.shape, tensor.stride())


def _in_words(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    name, value = next((name, value) for name, value in state.items() if not isinstance(value, torch.Tensor))
    return f"a dict in which {name!r} is a {type(value).__name__}"
