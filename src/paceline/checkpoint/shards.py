"""Sharded state: each rank's part in a file of torch.distributed.checkpoint, in a folder that a small index names.

The invariant: the index is replaced only once all parts are durable, and it holds their checksums. So what there was
before stays whole until then, and parts of different savings never mix.

A folder is locked while it is written. One that is neither locked nor named by the index belongs to nobody, and the
next writer removes it; it looks into the index only once it has the lock, which a writer keeps until the index is his.
"""

import contextlib
import fcntl
import os
import pickle
import secrets
import shutil
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch

from paceline.checkpoint import files
from paceline.checkpoint.atomic import make_durable
from paceline.checkpoint.format import digest_of
from paceline.checkpoint.ranks import Ranks, on_first
from paceline.errors import CheckpointDamagedError, CheckpointError

_FOLDER, _SHA256 = "paceline.shards", "sha256"
_METADATA = ".metadata"  # torch's name, in each of its folders

# All that torch's description of a folder is made of.
_OF_METADATA = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
}
_OF_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13's name of it
}


def is_sharded(obj: Any) -> bool:
    """Whether a state holds tensors of which each rank has a part."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:  # then nobody has made one
        return False
    if isinstance(obj, tensors.DTensor):
        return any(not placement.is_replicate() for placement in obj.placements)
    if isinstance(obj, dict):
        return any(map(is_sharded, obj.values()))
    return isinstance(obj, (list, tuple)) and any(map(is_sharded, obj))


def save(state: Any, path: str, ranks: Ranks) -> None:
    """Write every rank's shards, and then the index at ``path``.

    Raises:
        CheckpointError: on all ranks: a rank could not write; or they have no folder in common.
    """
    import torch.distributed.checkpoint as dcp

    with contextlib.ExitStack() as held:
        folder = cast(str, on_first(ranks, lambda: _begin(path, held)))
        try:
            writer = dcp.FileSystemWriter(folder, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=ranks.group)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{path}: the shards could not be written: {error}") from error
        digests = _digests(folder, path, ranks)

        def finish() -> None:
            make_durable(folder)
            files.write({_FOLDER: os.path.basename(folder), _SHA256: digests}, path)
            _remove_unnamed(path)

        on_first(ranks, finish)


def is_index(obj: Any) -> bool:
    """Whether what a file holds is an index of shards."""
    return isinstance(obj, dict) and _FOLDER in obj


def is_folder(path: str) -> bool:
    """Whether this is a folder of torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(path, _METADATA))


def read(path: str, index: dict[str, Any]) -> Any:
    """The whole of a state, of which ``index`` was read from ``path``.

    Raises:
        CheckpointDamagedError: a file is missing or is not as it was written.
    """
    folder = os.path.join(os.path.dirname(path), index[_FOLDER])
    for name, expected in index[_SHA256].items():
        part = os.path.join(folder, name)
        if not os.path.exists(part) or _digest_of(part) != expected:
            raise CheckpointDamagedError(f"{path} is damaged: its part {part} is missing, or has another sha256.")
    return read_folder(folder)


def read_folder(folder: str) -> Any:
    """The whole of a state from a folder of torch.distributed.checkpoint; nothing but tensors and plain values.

    Raises:
        CheckpointError: it holds something else; or it cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Reader(FileSystemReader):
        """torch's own, which would unpickle whatever the file says."""

        def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
            return metadata

    class Planner(_EmptyStateDictLoadPlanner):
        """torch's own, which would do so with whatever is no tensor."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            found = torch.load(value, weights_only=True)
            name = read_item.dest_index.fqn
            if self.flatten_state_dict:
                torch.distributed.checkpoint._nested_dict.set_element(
                    self.original_state_dict, self.mappings[name], found
                )
            else:
                self.state_dict[name] = found

    state: dict[str, Any] = {}
    try:
        with open(os.path.join(folder, _METADATA), "rb") as file:
            metadata = cast(Metadata, _OfMetadata(file).load())
        _load_state_dict(state, storage_reader=Reader(folder), planner=Planner(), no_dist=True)  # type: ignore[no-untyped-call]
    # torch's readers let through whatever a file makes them raise, some of it in an exception that is no Exception.
    except (Exception, dcp.CheckpointException) as error:
        raise CheckpointError(f"{folder} could not be read: {type(error).__name__}: {error}") from error
    return state


class _OfMetadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_known = module.startswith("torch.distributed.checkpoint.") and name in _OF_METADATA
        if is_known or (module, name) in _OF_OTHERS:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it holds an object of {module}.{name}, which a description of shards does not need. Making it would run "
            "code of whoever wrote the file; torch.distributed.checkpoint.load does that, if you trust it."
        )


def _begin(path: str, held: contextlib.ExitStack) -> str:
    try:
        _remove_unnamed(path)
        folder = f"{path}.shards-{secrets.token_hex(8)}"
        os.mkdir(folder)
        fd = os.open(folder, os.O_RDONLY)
        held.callback(os.close, fd)
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise CheckpointError(f"{path}: no folder for its shards could be made: {error}") from error
    return folder


def _remove_unnamed(path: str) -> None:
    parent, name = os.path.split(path)
    with os.scandir(parent or ".") as entries:
        folders = [entry.name for entry in entries if entry.name.startswith(f"{name}.shards-") and entry.is_dir()]
    for folder in folders:
        place = os.path.join(parent, folder)
        with _unlocked(place) as is_unlocked:
            if is_unlocked and folder != _named_by(path):
                shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _unlocked(folder: str) -> Iterator[bool]:
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:  # removed meanwhile
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)


def _named_by(path: str) -> str | None:
    try:
        index = files.read(path, weights_only=True)
    except CheckpointError:
        return None
    return index[_FOLDER] if is_index(index) else None


def _digests(folder: str, path: str, ranks: Ranks) -> dict[str, str]:
    """The sha256 of each file, by name; each rank computes its share of them."""
    try:
        names = sorted(os.listdir(folder))
        own = {name: _digest_of(os.path.join(folder, name)) for name in names[ranks.rank :: ranks.world_size]}
        answers = ranks.all(("", names, own))
    except OSError as error:
        answers = ranks.all((str(error), [], {}))
    for rank, (problem, found, _) in enumerate(answers):
        if problem or found != answers[0][1]:
            raise CheckpointError(
                f"{path}: rank {rank} does not see the shards that rank 0 sees: {problem or folder}. Save sharded "
                "state to a file system that all hosts share."
            )
    return {name: digest for _, _, found in answers for name, digest in found.items()}


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return digest_of(file, os.path.getsize(path))
