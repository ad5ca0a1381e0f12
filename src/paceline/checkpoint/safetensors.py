"""Weights alone, in the format of safetensors: what other programs read, and what cannot hold code.

A file is the length of a header, the header, which is JSON, and the tensors' bytes. It is written here, and not by the
package of that name, which puts a file of its own into the place of the one that it is given: that one would be neither
locked nor durable.

The invariant: every name of a state dict is there after loading, also where several names mean one tensor, which the
format would keep once only; and a file that was changed in any byte of its tensors is not taken for a good one.
"""

import hashlib
import json
import os
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from paceline.checkpoint.atomic import Draft
from paceline.checkpoint.format import compare, digest_of
from paceline.errors import CheckpointError

_HEADER_LIMIT_BYTES = 100_000_000  # the format's own
_SHA256 = "paceline sha256"  # of the file, with zeros in the place of the checksum itself
_MARK = f'"{_SHA256}":"'.encode()
_BLANK = b"0" * 64
_OF_FILE = {_SHA256: _BLANK.decode(), "format": "pt"}

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
        CheckpointError: it is something else, or holds a tensor that the format does not know.
        OSError: of the disk.
    """
    if not isinstance(state, dict) or not all(_is_fit(*item) for item in state.items()):
        raise CheckpointError(
            f"a file of safetensors holds a dict of dense tensors by name, and this is {_in_words(state)}. Give it "
            "model.state_dict(), or save to a name that ends in .pt."
        )
    first_of: dict[Any, str] = {}
    same_as: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        known = first_of.setdefault(_identity(tensor), name)
        if known == name or name in _OF_FILE:
            tensors[name] = tensor
        else:
            same_as[name] = known
    # Wide ones first, so that each starts at a multiple of its size; as the package does.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _header(ordered, same_as)
    digest = hashlib.sha256(header)
    draft.write(header)
    for _, tensor in ordered:
        data = _bytes_of(tensor)
        digest.update(data)
        draft.write(data)
    draft.write_at(header.index(_MARK) + len(_MARK), digest.hexdigest().encode())


def is_sealed(file: BinaryIO) -> bool:
    """Whether a file has a checksum."""
    return _MARK in _read_header(file)


def find_damage(file: BinaryIO) -> str:
    """What is wrong with a file's bytes, in words; empty where nothing is, or where there is no checksum."""
    header = _read_header(file)
    start = header.find(_MARK) + len(_MARK)
    if start < len(_MARK):
        return ""
    expected = header[start : start + len(_BLANK)]
    blank = header[:start] + _BLANK + header[start + len(_BLANK) :]
    return compare(expected, digest_of(file, file.seek(0, os.SEEK_END), after=blank))


def read(path: str) -> dict[str, Tensor]:
    """The tensors, on the CPU; names that meant one tensor when it was written by ``write`` share it.

    Raises:
        CheckpointError: the package is not installed.
        Exception: the library's own, where the file is damaged.
    """
    with _library().safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        metadata = file.metadata() or {}
    aliases = {name: same for name, same in metadata.items() if same in state and name not in _OF_FILE}
    return {name: state[same] for name, same in aliases.items()} | state


def _header(tensors: list[tuple[str, Tensor]], same_as: dict[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": _OF_FILE | same_as}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        described[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: BinaryIO) -> bytes:
    file.seek(0)
    start = file.read(8)
    return start + file.read(int.from_bytes(start, "little"))


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _library() -> ModuleType:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise CheckpointError(
            "files of safetensors need the package of that name: pip install 'paceline[safetensors]'."
        ) from None
    return safetensors


def _is_fit(name: Any, value: Any) -> bool:
    is_tensor = isinstance(name, str) and name != "__metadata__" and isinstance(value, Tensor)
    return is_tensor and value.layout == torch.strided and not value.is_meta and value.dtype in _KINDS


def _identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return object()
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (tensor.device, *place, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _in_words(state: Any) -> str:
    if not isinstance(state, dict):
        return f"a {type(state).__name__}"
    name, value = next(item for item in state.items() if not _is_fit(*item))
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind += f" of {value.dtype}, {value.layout}, on {value.device}"
    return f"a dict in which {name!r} is a {kind}"
