"""One file on this process's disk: written whole or not at all, and read only if it is good.

The invariant: whatever goes wrong becomes an error that names the file, says what is the matter and what can be done.
"""

import contextlib
import errno
import os
import pickle
import shutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any, BinaryIO

import torch

from paceline.checkpoint import format, safetensors
from paceline.checkpoint.atomic import replacing
from paceline.errors import CheckpointDamagedError, CheckpointError, CheckpointMissingError

_OLD_FORMAT = pickle.dumps(torch.serialization.MAGIC_NUMBER, protocol=2)  # how such files begin


def write(obj: Any, path: str) -> None:
    """Put ``obj`` into the place of the file ``path``.

    Raises:
        CheckpointError: the disk is full, or refuses; or the object does not fit the format that the name asks for.
        Exception: whatever pickling an object raises.
    """
    try:
        with replacing(path) as draft:
            (safetensors if safetensors.is_safetensors(path) else format).write(obj, draft)
    except OSError as error:
        raise CheckpointError(_about_disk(path, error)) from error


def read(path: str, *, weights_only: bool) -> Any:
    """What the file holds, with all tensors on the CPU.

    Raises:
        CheckpointMissingError: there is no such file.
        CheckpointDamagedError: it is not as it was written; the message names the newest good one beside it.
        CheckpointError: it cannot be read; or it holds what only running its code could make.
    """
    try:
        with open(path, "rb") as file:
            kind = _kind_of(file)
            if problem := kind.find_damage(file):
                raise _damaged(path, problem)
            try:
                return _parsed(file, path, weights_only)
            except CheckpointError:
                raise
            except Exception as error:  # of bytes that are no checkpoint, anything may be raised
                if isinstance(error, pickle.UnpicklingError) and weights_only:
                    if names := unsafe_in(file):
                        raise CheckpointError(_about_code(path, names)) from None
                    raise _damaged(path, "it is no archive, nor a pickle of tensors and plain values") from None
                problem = f"{type(error).__name__}: {error}"
                if kind.is_sealed(file):
                    raise CheckpointError(_about_reading(path, problem)) from error
                raise _damaged(path, problem) from error
    except FileNotFoundError:
        newest = next(_newest_first(path), None)
        beside = f"The newest file of this kind beside it is {newest}" if newest else "None of this kind is beside it"
        raise CheckpointMissingError(f"{path}: there is no such file. {beside}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror or error}.") from error


def unsafe_in(file: BinaryIO | str) -> list[str]:
    """What a file of torch.save holds that ``weights_only`` refuses, by its names in Python."""
    if not isinstance(file, str):
        file.seek(0)
        if file.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
            return ["classes that this old format of torch.save does not list"]
        file.seek(0)
    with contextlib.suppress(Exception):  # no file of this kind
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return []


def is_good(path: str) -> bool:
    """Whether a file's bytes are as they were written, as far as it lets one know."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return not _kind_of(file).find_damage(file)
    return False


def _kind_of(file: BinaryIO) -> ModuleType:
    return safetensors if safetensors.looks_like_safetensors(file) else format


def _parsed(file: BinaryIO, path: str, weights_only: bool) -> Any:
    if _kind_of(file) is safetensors:
        return safetensors.read(path)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=weights_only)


def _damaged(path: str, problem: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(f"{path} is damaged: {problem}.{_advice(path)}")


def _advice(path: str) -> str:
    good = next((other for other in _newest_first(path) if is_good(other)), None)
    return f" The newest good file beside it is {good}." if good else " There is no good file of this kind beside it."


def _newest_first(path: str) -> Iterator[str]:
    """The other files of the same kind in the same folder."""
    folder, name = os.path.split(path)
    suffix = os.path.splitext(name)[1]
    entries: list[os.DirEntry[str]] = []
    with contextlib.suppress(OSError), os.scandir(folder or ".") as scanned:
        entries = [entry for entry in scanned if entry.name.endswith(suffix) and entry.name != name and entry.is_file()]
    found = [(entry.stat().st_mtime_ns, os.path.join(folder, entry.name)) for entry in entries]
    yield from (other for _, other in sorted(found, reverse=True))


def _about_disk(path: str, error: OSError) -> str:
    free = "."
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{path} could not be written: {error.strerror or error}. What was there before is unchanged."
    with contextlib.suppress(OSError):
        free = f", where {shutil.disk_usage(os.path.dirname(os.path.realpath(path))).free:,} bytes are free."
    return f"{path} could not be written: {error.strerror or error}{free} What was there before is unchanged."


def _about_reading(path: str, problem: str) -> str:
    return (
        f"{path} is as it was written, but could not be read: {problem}. Look for too little memory, or for an older "
        "torch than the one that has written it."
    )


def _about_code(path: str, names: list[str]) -> str:
    return (
        f"{path} holds objects of {', '.join(names)}. To make them, code of whoever wrote the file would run, so they "
        "are not made. If you trust it, say paceline.load(path, weights_only=False); or trust only these with "
        "torch.serialization.add_safe_globals."
    )
