"""What the lanes of a column tell one another: activations, gradients, outputs and the loss.

The invariant: each stage's forwards and backwards have a tag of their own, so a lane may take them in its own order.
"""

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PipelineError
from paceline.pipeline.links import Links, Way
from paceline.pipeline.schedule import Action
from paceline.pipeline.stage import Parcel, Stage
from paceline.pipeline.values import take_apart

OUTPUT_TAG, _LOSS_TAG, _INPUTS_TAG, _FIRST_FREE_TAG = 0, 1, 2, 3
_NUM_SAMPLED = 1000


class ToRanks:
    """A lane's way to the stages on other ranks of its column.

    Attributes:
        sizes: of the microbatches of this step, once they are known.
        trains: whether this step does.
    """

    def __init__(self, links: Links, num_stages: int, num_lanes: int, lane: int) -> None:
        self._links = links
        self._num_stages = num_stages
        self._num_lanes = num_lanes
        self._lane = lane
        self._kept: dict[Action, Any] = {}  # for this rank's own stages, or come before its time
        self.sizes: tuple[int, ...] = ()
        self.trains = False

    def await_sizes(self) -> tuple[int, ...]:
        """What the first stage says of this step: with the first parcel that comes.

        Raises:
            PipelineError: it trains, and this lane evaluates, or the reverse.
        """
        first = Action("F", self._lane - 1, 0)
        self._kept[first] = self.take(first)
        return self.sizes

    def give(self, made_by: Action, value: Any) -> None:
        """Keep it, or send it, as the needing stage is here or elsewhere."""
        to = self._lane_after(made_by)
        if to == self._lane:
            self._kept[made_by] = value
        elif isinstance(value, Parcel):
            told = (self.trains, self.sizes, value.shell, value.wanted)
            self._links.send(to, self._tag(made_by), told, value.tensors)
        else:
            there = tuple(grad is not None for grad in value)
            self._links.send(to, self._tag(made_by), there, [grad for grad in value if grad is not None])

    def take(self, made_by: Action) -> Any:
        """What is here, or comes next on its way."""
        if made_by in self._kept:
            return self._kept.pop(made_by)
        shell, tensors = self._links.receive(self._lane_of(made_by.stage), self._tag(made_by))
        if made_by.kind == "F":
            trains, self.sizes, inner, wanted = shell
            if trains != self.trains:
                calls = {True: "model.forward_backward(...)", False: "model(...)"}
                raise PipelineError(
                    f"lane {self._lane} has called {calls[self.trains]}, but lane {self._lane_of(made_by.stage)} "
                    f"{calls[trains]}. All ranks must call the same."
                )
            return Parcel(inner, tensors, wanted)
        coming = iter(tensors)
        return [next(coming) if is_there else None for is_there in shell]

    def ways(self) -> list[Way]:
        """Those on which other lanes may wait for this one."""
        own = range(self._lane, self._num_stages, self._num_lanes)
        made = [Action(kind, stage, 0) for stage in own for kind in ("F", "B")]
        ends = Action("B", 0, 0), Action("F", self._num_stages - 1, 0)
        ways = [Way(self._lane_after(action), self._tag(action)) for action in made if action not in ends]
        if self._lane == self._num_lanes - 1:
            ways += [Way(lane, tag) for lane in range(self._lane) for tag in (OUTPUT_TAG, _LOSS_TAG)]
        if self._lane == 0:
            ways.append(Way(self._num_lanes - 1, _INPUTS_TAG))
        return [way for way in ways if way.to != self._lane]

    def _lane_after(self, made_by: Action) -> int:
        return self._lane_of(made_by.stage + (1 if made_by.kind == "F" else -1))

    def _lane_of(self, stage: int) -> int:
        return stage % self._num_lanes

    def _tag(self, made_by: Action) -> int:
        return _FIRST_FREE_TAG + 2 * made_by.stage + (made_by.kind == "B")


def first_tag_for_ties(num_stages: int) -> int:
    """Past those of the stages."""
    return _FIRST_FREE_TAG + 2 * num_stages


def tell_of_inputs(links: Links, num_lanes: int, inputs: Any) -> None:
    """On the first lane: let the last one compare."""
    if num_lanes > 1:
        links.send(num_lanes - 1, _INPUTS_TAG, _digest_of(inputs), [])


def compare_inputs(links: Links, num_lanes: int, inputs: Any, *, are_given: bool) -> None:
    """On the last lane, which has the targets: those of the first lane's inputs?

    Args:
        inputs: this rank's, if ``are_given``.
    Raises:
        PipelineError: this rank has been given others.
    """
    if num_lanes == 1:
        return
    firsts, _ = links.receive(0, _INPUTS_TAG)
    if are_given and _digest_of(inputs) != firsts:
        raise PipelineError(
            f"rank {dist.get_rank()}, which runs the last stage, has been given other inputs than the rank that runs "
            "the first, so its targets belong to other samples. Have all ranks of a column load the same batches: give "
            "the loader num_replicas and rank of the columns, not of all ranks. If only inputs differ, such "
            "as by augmentation, pass None in their place here."
        )


def _digest_of(inputs: Any) -> int:
    """Of some of the elements; which they are has nothing to do with rows and columns."""
    _, tensors = take_apart(inputs)
    digest = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _NUM_SAMPLED) | 1].cpu().contiguous()
        digest = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), digest)
        digest = zlib.crc32(f"{tuple(tensor.shape)}, {tensor.dtype}".encode(), digest)
    return digest


def spread_overflow(stages: Iterable[Stage], column: dist.ProcessGroup) -> None:
    """An infinity or NaN in one lane's gradients becomes one in all, so that their GradScalers skip alike.

    A collective call of the column.
    """
    found = [param.grad for stage in stages for param in stage.part.parameters() if param.grad is not None]
    grads = [grad for grad in (each._values() if each.is_sparse else each for each in found) if grad.numel()]
    is_finite = not grads or bool(torch.nn.utils.get_total_norm(grads, math.inf).isfinite())
    overflows = torch.tensor([not is_finite], dtype=torch.uint8)
    dist.all_reduce(overflows, dist.ReduceOp.MAX, group=column)
    if overflows and is_finite and grads:
        grads[0][(0,) * grads[0].dim()] = math.inf


def share_outputs(
    links: Links, lane: int, num_lanes: int, shell: Any, tensors: list[Tensor]
) -> tuple[Any, list[Tensor]]:
    """From the last lane to all others of the column."""
    return _from_last(links, lane, num_lanes, OUTPUT_TAG, shell, tensors)


def share_loss(links: Links, lane: int, num_lanes: int, loss: Tensor | None) -> Tensor:
    """From the last lane to all others of the column."""
    _, (told,) = _from_last(links, lane, num_lanes, _LOSS_TAG, None, [] if loss is None else [loss])
    return told


def _from_last(
    links: Links, lane: int, num_lanes: int, tag: int, shell: Any, tensors: Sequence[Tensor]
) -> tuple[Any, list[Tensor]]:
    if lane < num_lanes - 1:
        return links.receive(num_lanes - 1, tag)
    for other in range(num_lanes - 1):
        links.send(other, tag, shell, list(tensors))
    return shell, list(tensors)
