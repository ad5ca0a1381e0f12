"""Folders of torch.distributed.checkpoint: read without running code that they name.

The invariant: nothing but tensors and plain values comes out of a folder, unless the caller trusts it.
"""

import os
import pickle
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from paceline.errors import CheckpointError

METADATA = ".metadata"  # torch's name, in each of its folders
LEFT_OUT = object()

# What to read an entry into: a tensor, or shards of one; None for a new tensor; LEFT_OUT. It is asked with the keys
# that lead to the entry, strings but for positions in lists, and a tensor without data, or None for what is no tensor.
Target = Callable[[tuple[Any, ...], Tensor | None], Any]

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


def is_folder(path: str) -> bool:
    """Whether this is a folder of torch.distributed.checkpoint."""
    return os.path.isfile(os.path.join(path, METADATA))


def whole(path: tuple[Any, ...], tensor: Tensor | None) -> None:
    """A ``Target``: all of it, in new tensors."""


def read(folder: str, target: Target = whole, *, weights_only: bool = True) -> dict[str, Any]:
    """A state, of which each process reads what it needs, without the others. Keys of dicts are strings.

    Raises:
        CheckpointError: it holds something else than tensors and plain values; or it cannot be read.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import set_element
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Reader(FileSystemReader):
        """torch's own, which would unpickle whatever the file says."""

        def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        """torch's own, which would do so with whatever is no tensor."""

        def load_bytes(self, read_item: Any, value: Any) -> None:
            found = torch.load(value, weights_only=weights_only)
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)

    state: dict[str, Any] = {}
    try:
        with open(os.path.join(folder, METADATA), "rb") as file:
            metadata = cast(Metadata, _OfMetadata(file).load())
        for name, stored in metadata.state_dict_metadata.items():
            path = (metadata.planner_data or {}).get(name, (name,))
            if isinstance(stored, TensorStorageMetadata):
                tensor = torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
                place = target(path, tensor)
                entry = torch.empty_like(tensor, device="cpu") if place is None else place
            else:
                entry = LEFT_OUT if target(path, None) is LEFT_OUT else stored
            if entry is not LEFT_OUT:
                set_element(state, path, entry)
        planner = Planner(allow_partial_load=True)  # what is left out is no error
        _load_state_dict(state, storage_reader=Reader(folder), planner=planner, no_dist=True)
    except CheckpointError:
        raise
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
