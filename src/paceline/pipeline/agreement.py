"""What all ranks of the world must have alike before they build a pipeline.

The invariant: what any rank would compute for a stage, every other rank would, too. These are collective calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from paceline.errors import PipelineError
from paceline.pipeline.terms import Terms


def agree_on_model(root: Module, units: Sequence[str], terms: Terms) -> None:
    """Compare what all ranks are about to cut. A collective call of the world.

    Args:
        units: names of what is never cut.
    Raises:
        PipelineError: on every rank, if any differs.
    """
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, _what_is_built(root, units, terms))
    for rank, theirs in enumerate(said):
        if (difference := _first_difference(rank, theirs, said[0])) is not None:
            raise PipelineError(difference)


def from_first(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, or the exception that it raised there. A collective call of the world."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = True, make()
        except Exception as error:
            box[0] = False, error
    dist.broadcast_object_list(box, src=0)
    succeeded, value = box[0]
    if not succeeded:
        raise value
    return value


def _what_is_built(root: Module, units: Sequence[str], terms: Terms) -> dict[str, Any]:
    state = {
        name: (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__
        for name, value in root.state_dict().items()
    }
    kinds = {f"the type of {name or 'the model'!r}": type(part).__qualname__ for name, part in root.named_modules()}
    rule = terms.rule if isinstance(terms.rule, str) else getattr(terms.rule, "__qualname__", "a function")
    said = {"schedule": rule, "microbatches": terms.num_microbatches, "lanes": terms.num_lanes, "dim": terms.dim}
    named = {f"{name!r}": value for name, value in state.items()}
    return {**said, "stages": terms.num_stages, **named, **kinds, "what is never cut": units}


def _first_difference(rank: int, theirs: dict[str, Any], firsts: dict[str, Any]) -> str | None:
    for name in [*firsts, *theirs]:
        if theirs.get(name, "nothing") != firsts.get(name, "nothing"):
            return (
                f"rank {rank} has {theirs.get(name, 'nothing')} for {name}, but rank 0 has "
                f"{firsts.get(name, 'nothing')}. Build the same pipeline on every rank."
            )
    return None
