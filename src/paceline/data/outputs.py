"""What a rank's results look like, told in a few words that ranks can compare before they exchange the results.

The invariant: ``agree`` is a pure function of what all ranks sent, so it returns or raises the same on each of them.
"""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from paceline.errors import DataError

Path: TypeAlias = tuple[str, ...]
Leaves: TypeAlias = "dict[Path, Tensor | list[Any]]"


_ADVICE_FOR_SINGLES = (
    "Its tensors have no dimensions, as a batch's mean has none: give one value a sample, from a whole pass."
)


@dataclass(frozen=True)
class Shape:
    """The structure of one rank's results, without the results.

    ``empty`` is an empty list, which fits whatever the other ranks have.
    """

    kind: Literal["empty", "tensor", "objects", "dict", "namedtuple"]
    num_rows: int = 0
    dtype: torch.dtype | None = None
    row_shape: tuple[int, ...] = ()
    name: str = ""
    advice: str = "Give one result a sample, from a pass that ran to its end."
    children: dict[str, "Shape"] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind == "tensor":
            return f"a tensor of {self.dtype} with rows of shape {self.row_shape}"
        if self.kind == "dict":
            return f"a dict of {sorted(self.children)}"
        if self.kind == "namedtuple":
            return f"a namedtuple {self.name}({', '.join(self.children)})"
        return "a list of objects" if self.kind == "objects" else "an empty list"


def describe(outputs: Any, path: Path = ()) -> tuple[Shape, Leaves]:
    """Take one rank's results apart.

    Args:
        outputs: a tensor (n, ...); a list or tuple of tensors, batches to be joined along dimension 0, or n tensors
            without dimensions; a list or tuple of n other objects; or a dict with str keys or a namedtuple of any of
            these.
        path: the keys that lead here.
    Returns:
        The structure, and its tensors and lists by path: tensors detached, of shape (num_rows, *row_shape).
    Raises:
        DataError: ``outputs`` is none of these, or its batches do not fit together.
    """
    if isinstance(outputs, Tensor):
        return _describe_batches([outputs], path)
    if isinstance(outputs, Mapping):
        if not all(isinstance(key, str) for key in outputs):
            raise DataError(f"{spell(path)} is a dict whose keys should all be str, got {list(outputs)!r}")
        return _describe_branch("dict", "", dict(outputs), path)
    if _is_namedtuple(outputs):
        return _describe_branch("namedtuple", type(outputs).__name__, outputs._asdict(), path)
    if not isinstance(outputs, (list, tuple)):
        raise DataError(
            f"{spell(path)} should be a tensor, a list of tensors or of one object a sample, or a dict or namedtuple "
            f"of these; got {type(outputs).__name__}"
        )
    if not outputs:
        return Shape("empty"), {path: []}
    num_tensors = sum(isinstance(item, Tensor) for item in outputs)
    if num_tensors == len(outputs) and all(item.dim() == 0 for item in outputs):
        shape, leaves = _describe_batches([item.reshape(1) for item in outputs], path)
        return replace(shape, advice=_ADVICE_FOR_SINGLES), leaves
    if num_tensors == len(outputs):
        return _describe_batches(outputs, path)
    if num_tensors:
        raise DataError(
            f"{spell(path)} mixes {num_tensors} tensors with {len(outputs) - num_tensors} other objects; it should "
            "hold batches, all tensors, or one object a sample, none of them a tensor"
        )
    return Shape("objects", len(outputs), advice=_advice_for(outputs)), {path: list(outputs)}


def agree(shapes: Mapping[int, Shape], path: Path = ()) -> Shape:
    """Merge the structures of all ranks into the one that the gathered result has.

    Args:
        shapes: by rank.
        path: the keys that lead here.
    Returns:
        The common structure; its ``num_rows`` mean nothing.
    Raises:
        DataError: two ranks differ in structure, dtype or shape of a row.
    """
    known = {rank: shape for rank, shape in shapes.items() if shape.kind != "empty"}
    if not known:
        return Shape("empty")
    first_rank, first = next(iter(known.items()))
    for rank, shape in known.items():
        if str(shape) != str(first):
            raise DataError(
                f"rank {rank}: {spell(path)} is {shape}, but rank {first_rank} has {first}. "
                "Give every rank's results the same structure, dtype and trailing shape."
            )
    children = {
        key: agree({rank: shape.children[key] for rank, shape in known.items()}, (*path, key)) for key in first.children
    }
    return Shape(first.kind, first.num_rows, first.dtype, first.row_shape, first.name, children=children)


def leaves_of(shape: Shape, path: Path = ()) -> dict[Path, Shape]:
    """The tensors and lists in a structure, by path, in an order that is the same on all ranks that agreed."""
    if shape.kind not in ("dict", "namedtuple"):
        return {path: shape}
    found: dict[Path, Shape] = {}
    for key, child in shape.children.items():
        found |= leaves_of(child, (*path, key))
    return found


def rebuild(shape: Shape, values: Mapping[Path, Any], like: Any, path: Path = ()) -> Any:
    """Put gathered values back into the structure.

    Args:
        shape: what the ranks agreed on.
        values: by path, as ``leaves_of`` gives them.
        like: this rank's own outputs, whose namedtuple class is used again; a rank that had none gets a new class.
        path: the keys that lead here.
    Returns:
        A value, a dict or a namedtuple.
    """
    if shape.kind not in ("dict", "namedtuple"):
        return values[path]
    own = like if isinstance(like, Mapping) else like._asdict() if _is_namedtuple(like) else {}
    parts = {key: rebuild(child, values, own.get(key), (*path, key)) for key, child in shape.children.items()}
    if shape.kind == "dict":
        return parts
    make = type(like) if _is_namedtuple(like) else namedtuple(shape.name, tuple(parts))
    return make(**parts)


def spell(path: Path) -> str:
    """A path as a caller would write it."""
    return "outputs" + "".join(f"[{key!r}]" for key in path)


def _advice_for(objects: Sequence[Any]) -> str:
    """What to do where there are not as many objects as samples: most often they are one a batch."""
    item = objects[0]
    if isinstance(item, Mapping):
        keys = ", ".join(f"{key!r}: [batch[{key!r}] for batch in outputs]" for key in list(item)[:2])
        return f"Its items are dicts, it seems one a batch: pass one dict of lists of batches, {{{keys}}}."
    if isinstance(item, (list, tuple)) and not any(isinstance(part, (Tensor, list, tuple, Mapping)) for part in item):
        return (
            f"Its items are of type {type(item).__name__}, it seems one a batch: join them, as in [result for batch in "
            "outputs for result in batch]."
        )
    if isinstance(item, (list, tuple)):
        return (
            f"Its items are of type {type(item).__name__}, it seems one a batch or one a result: pass a dict with a "
            "name for each result, whose values are tensors or lists of batches."
        )
    return Shape.advice


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _describe_branch(
    kind: Literal["dict", "namedtuple"], name: str, parts: dict[str, Any], path: Path
) -> tuple[Shape, Leaves]:
    children: dict[str, Shape] = {}
    leaves: Leaves = {}
    for key, part in parts.items():
        children[key], below = describe(part, (*path, key))
        leaves |= below
    return Shape(kind, name=name, children=children), leaves


def _describe_batches(batches: Sequence[Tensor], path: Path) -> tuple[Shape, Leaves]:
    first = batches[0]
    for number, batch in enumerate(batches):
        if batch.layout != torch.strided or batch.is_quantized:
            raise DataError(f"{spell(path)} holds a sparse or quantised tensor; make it dense before gathering")
        if batch.dim() == 0:
            raise DataError(
                f"{spell(path)} holds a tensor without dimensions, such as a batch's mean; a tensor should have one "
                "row a sample, so compute one value a sample"
            )
        if (batch.dtype, batch.shape[1:], batch.device) != (first.dtype, first.shape[1:], first.device):
            raise DataError(
                f"{spell(path)}: batch {number} is {batch.dtype} with rows of shape {tuple(batch.shape[1:])} on "
                f"{batch.device}, but batch 0 is {first.dtype} with rows of shape {tuple(first.shape[1:])} on "
                f"{first.device}"
            )
    rows = torch.cat([batch.detach() for batch in batches]) if len(batches) > 1 else first.detach()
    return Shape("tensor", len(rows), rows.dtype, tuple(rows.shape[1:])), {path: rows}
