"""Sharded state: each rank's part in a file of torch.distributed.checkpoint, in a folder that a small index names.

The invariant: the index is replaced only once all parts are durable, and it holds their checksums. So what there was
before stays whole until then, and parts of different savings never mix.

A folder is locked while it is written. One that is neither locked nor named by the index belongs to nobody, and the
next writer removes it; it looks into the index only once it has the lock, which a writer keeps until the index is his.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from paceline.checkpoint import files, torch_folders
from paceline.checkpoint.atomic import make_durable
from paceline.checkpoint.format import digest_of
from paceline.checkpoint.placing import outline_of, outlined
from paceline.checkpoint.ranks import Ranks, on_first
from paceline.errors import CheckpointDamagedError, CheckpointError

_FOLDER, _SHA256, _OUTLINE = "paceline.shards", "sha256", "outline"
_KINDS = (  # where nobody has imported these, nobody has made one
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor"),  # of FSDP's first version
)
_OF_SHARDS = re.compile(r"(.+)\.shards-[0-9a-f]{16}", re.DOTALL)  # a folder's name: its file's, and one of its own


@dataclass(frozen=True)
class Shards:
    """A folder of parts that are known to be good.

    Attributes:
        outline: the containers of the state that was saved; None for a folder of others.
    """

    folder: str
    outline: Any = None

    def read(self, target: torch_folders.Target = torch_folders.whole, *, weights_only: bool = True) -> Any:
        """What ``target`` asks for; as ``torch_folders.read``."""
        found = torch_folders.read(self.folder, target, weights_only=weights_only)
        return found if self.outline is None else outlined(self.outline, found)


def is_sharded(obj: Any) -> bool:
    """Whether a state holds tensors of which each rank has a part."""
    kinds = tuple(getattr(sys.modules[name], kind) for name, kind in _KINDS if name in sys.modules)
    return bool(kinds) and any(isinstance(leaf, kinds) for leaf in leaves_of(obj, set()))


def leaves_of(obj: Any, seen: set[int]) -> Iterator[Any]:
    """What is in containers, each of which is entered once."""
    if not isinstance(obj, (dict, list, tuple)):
        yield obj
    elif id(obj) not in seen:
        seen.add(id(obj))
        for value in obj.values() if isinstance(obj, dict) else obj:
            yield from leaves_of(value, seen)


def save(state: Any, path: str, ranks: Ranks) -> None:
    """Write every rank's shards, and then the index at ``path``.

    Raises:
        CheckpointError: on all ranks: a rank could not write; or they have no folder in common.
    """
    import torch.distributed.checkpoint as dcp

    path = os.path.realpath(path)
    with contextlib.ExitStack() as held:
        folder = cast(str, on_first(ranks, lambda: _begin(path, held)))
        try:
            writer = dcp.FileSystemWriter(folder, sync_files=True)
            dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.world_size == 1)
            digests = _digests(folder, path, ranks)

            def finish() -> None:
                make_durable(folder)
                index = {_FOLDER: os.path.basename(folder), _SHA256: digests, _OUTLINE: outline_of(state)}
                files.write(index, path)

            on_first(ranks, finish)
        except (Exception, dcp.CheckpointException) as error:
            if ranks.rank == 0:  # nobody will name it
                shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, dcp.CheckpointException):
                causes = "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items())
                raise CheckpointError(f"{path}: the shards could not be written: {causes}") from error
            raise
    on_first(ranks, lambda: remove_unnamed(path))


def is_index(obj: Any) -> bool:
    """Whether what a file holds is an index of shards."""
    return isinstance(obj, dict) and _FOLDER in obj


def verified(path: str, index: dict[str, Any]) -> Shards:
    """The parts that ``index``, which was read from ``path``, names.

    Raises:
        CheckpointDamagedError: a file is missing or is not as it was written.
    """
    folder = os.path.join(os.path.dirname(os.path.realpath(path)), index[_FOLDER])
    parts = {os.path.join(folder, name): expected for name, expected in index[_SHA256].items()}
    with ThreadPoolExecutor(8) as pool:
        for part, digest in zip(parts, pool.map(_digest_of, parts), strict=True):
            if digest != parts[part]:
                raise CheckpointDamagedError(f"{path} is damaged: its part {part} is missing, or has another sha256.")
    return Shards(folder, index.get(_OUTLINE))


def _begin(path: str, held: contextlib.ExitStack) -> str:
    try:
        remove_unnamed(path)
        folder = f"{path}.shards-{secrets.token_hex(8)}"
        os.mkdir(folder)
        fd = os.open(folder, os.O_RDONLY)
        held.callback(os.close, fd)
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        raise CheckpointError(f"{path}: no folder for its shards could be made: {error}") from error
    return folder


def remove_unnamed(path: str) -> None:
    """Remove the folders of a file's earlier savings, and of writers that have died."""
    parent, name = os.path.split(path)
    for folder, of in _folders_in(parent):
        place = os.path.join(parent, folder)
        if of == name:
            with _unlocked(place) as is_unlocked:
                if is_unlocked and folder != _named_by(path):
                    shutil.rmtree(place, ignore_errors=True)


def remove_all_unnamed(parent: str) -> None:
    """``remove_unnamed`` for all files that folders in ``parent`` are of."""
    for name in {of for _, of in _folders_in(parent)}:
        remove_unnamed(os.path.join(parent, name))


def _folders_in(parent: str) -> list[tuple[str, str]]:
    """The names of folders of shards, and of the files that they are of."""
    with os.scandir(parent or ".") as entries:
        return [(entry.name, of[1]) for entry in entries if (of := _OF_SHARDS.fullmatch(entry.name)) and entry.is_dir()]


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
    """Of a file; of one that is not there, none."""
    try:
        with open(path, "rb") as file:
            return digest_of(file, os.path.getsize(path))
    except FileNotFoundError:
        return ""
