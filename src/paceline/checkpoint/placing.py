"""Tensors where a run has them: whole, or a shard of each on every rank.

The invariant: on whatever number of ranks a state was saved, each rank of this run gets its own part of it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.torch_folders import LEFT_OUT, Target
from paceline.errors import CheckpointError

_ABSENT = object()


def into_tensors_of(state: dict[str, Any]) -> Target:
    """A ``Target``: what ``state`` has, read into its own tensors; all there is, where it has an empty dict."""

    def target(path: tuple[Any, ...], tensor: Tensor | None) -> Any:
        own: Any = state
        for key in path:
            if isinstance(own, dict):
                if not own:
                    return None
                own = {str(k): value for k, value in own.items()}.get(key, LEFT_OUT)
            elif isinstance(own, (list, tuple)):
                own = own[key] if isinstance(key, int) and key < len(own) else LEFT_OUT
            if own is LEFT_OUT:
                return LEFT_OUT
        return own if isinstance(own, Tensor) and tensor is not None and own.shape == tensor.shape else None

    return target


def like_parts(states: Mapping[str, Any], parts: Mapping[str, Any]) -> Target:
    """A ``Target`` for the parts of a run: sharded as theirs; an optimizer's state as the weights that it is of.

    Args:
        states: what the parts' ``state_dict`` returns, models' under plain names.
    """
    of = dict(_sharded(dict(states), ()))
    params = {
        name: [param for group in part.param_groups for param in group["params"]]
        for name, part in parts.items()
        if isinstance(part, Optimizer)
    }

    def target(path: tuple[Any, ...], tensor: Tensor | None) -> Any:
        own: Any = of.get(path[1:])  # the first key is that of the parts
        if (
            own is None and len(path) == 5 and path[2] == "state" and path[1] in params
        ):  # a fresh optimizer has none yet
            own = dict(enumerate(params[path[1]])).get(int(path[3]))
        if tensor is None or not is_sharded_tensor(own) or own.shape != tensor.shape:
            return None
        return torch.empty_like(own, dtype=tensor.dtype, requires_grad=False)

    return target


def placed(found: Any, target: Target, path: tuple[Any, ...] = ()) -> Any:
    """What one rank has read whole, with the tensors in it sharded as ``target`` has them."""
    if isinstance(found, Tensor):
        place = target(path, found)
        return found if place is None else _fill(place, found)
    if isinstance(found, dict):
        changed = {key: placed(value, target, (*path, str(key))) for key, value in found.items()}
        return changed if any(changed[key] is not found[key] for key in found) else found
    if isinstance(found, (list, tuple)):
        values = [placed(value, target, (*path, n)) for n, value in enumerate(found)]
        return type(found)(values) if any(a is not b for a, b in zip(values, found, strict=True)) else found
    return found


def merge(into: Any, found: Any, about: Callable[[str], str], path: str = "") -> Any:
    """``into`` with what was found: its tensors are filled, all else is replaced.

    Args:
        about: makes an error's message of a problem.
    Raises:
        CheckpointError: an entry is missing, or a tensor has another shape.
    """
    if isinstance(into, Tensor):
        if not isinstance(found, Tensor) or found.shape != into.shape:
            kind = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise CheckpointError(about(f"{path} is a tensor of shape {tuple(into.shape)} here, and there {kind}"))
        return into if found is into else _fill(into, found)
    if isinstance(into, dict) and isinstance(found, dict):
        if missing := [f"{path}.{key}".lstrip(".") for key in into if key not in found]:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CheckpointError(about(f"it has no {shown}"))
        if not into:  # as a fresh optimizer's state
            into.update(found)
            return into
        for key in into:
            into[key] = merge(into[key], found[key], about, f"{path}.{key}".lstrip("."))
        return into
    if isinstance(into, (list, tuple)) and isinstance(found, (list, tuple)) and len(into) == len(found):
        pairs = zip(into, found, strict=True)
        return type(into)([merge(own, new, about, f"{path}.{n}") for n, (own, new) in enumerate(pairs)])
    return found


def gathered(state: Any) -> Any:
    """A dict of tensors with sharded ones whole, on the CPU. A collective call."""
    if not isinstance(state, dict):
        return state
    return {name: value.full_tensor().cpu() if is_sharded_tensor(value) else value for name, value in state.items()}


def outline_of(state: Any) -> Any:
    """The containers of a state alone, with None for all else."""
    if isinstance(state, dict):
        return {key: outline_of(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return (tuple if isinstance(state, tuple) else list)(map(outline_of, state))
    return None


def outlined(outline: Any, found: Any) -> Any:
    """What was read from a folder, in the containers that were saved: there, keys are strings and tuples are lists."""
    if isinstance(outline, dict):
        values = {key: outlined(inner, _in(found, key)) for key, inner in outline.items()}
        return {key: value for key, value in values.items() if value is not _ABSENT}
    if isinstance(outline, (list, tuple)):
        return type(outline)([outlined(inner, _in(found, n)) for n, inner in enumerate(outline)])
    return found


def is_sharded_tensor(tensor: Any) -> bool:
    """Whether this is torch's DTensor."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "placements")


def _in(found: Any, key: Any) -> Any:
    if isinstance(found, dict):
        return found[key] if key in found else found.get(str(key), _ABSENT)
    return found[key] if isinstance(found, (list, tuple)) and key < len(found) else _ABSENT


def _sharded(state: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if is_sharded_tensor(state):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _sharded(value, (*path, str(key)))
    elif isinstance(state, (list, tuple)):
        for number, value in enumerate(state):
            yield from _sharded(value, (*path, number))


@torch.no_grad()
def _fill(place: Any, found: Tensor) -> Tensor:
    if not is_sharded_tensor(place) or is_sharded_tensor(found):
        return place.copy_(found)  # type: ignore[no-any-return]
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = place.device_mesh, place.placements
    return place.copy_(distribute_tensor(found.to(place.device), mesh, placements, src_data_rank=None))  # type: ignore[no-any-return]
