"""A pipeline over ranks: this rank's lane, messages to its neighbours, and the averages over its replicas.

The first stage's rank tells with each microbatch how the batch was cut; so the others need not be given the batch, and
each batch may be of another size.

The invariant: all ranks of a column run the same schedule; a lane's replicas average once a step, at its last backward.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleDict, Parameter

from paceline.errors import PipelineError
from paceline.parallel import DistributedDataParallel, gather
from paceline.parallel.groups import cpu_backend_of, timeout_of
from paceline.parallel.replicas.broadcast import broadcast_tensors
from paceline.pipeline.clock import Placed
from paceline.pipeline.lanes import Batch, run_lane
from paceline.pipeline.layout import Layout
from paceline.pipeline.links import Links
from paceline.pipeline.microbatches import num_samples
from paceline.pipeline.schedule import Action, Schedule
from paceline.pipeline.stage import Call, Parcel, Stage
from paceline.pipeline.stages import Cut, move, release, users_of
from paceline.pipeline.terms import Terms, weighed, weights_of
from paceline.pipeline.ties import TiesOverRanks, find_ties
from paceline.pipeline.values import moved, put_together, take_apart

_OUTPUT_TAG, _LOSS_TAG, _FIRST_FREE_TAG = 0, 1, 2


class ToRanks:
    """A lane's way to the stages on other ranks of its column.

    Attributes:
        sizes: of the microbatches of this step, once they are known.
    """

    def __init__(self, links: Links, num_stages: int, num_lanes: int, lane: int) -> None:
        self._links = links
        self._num_stages = num_stages
        self._num_lanes = num_lanes
        self._lane = lane
        self._kept: dict[Action, Any] = {}  # for this rank's own stages, or come before its time
        self.sizes: tuple[int, ...] = ()

    def await_sizes(self) -> tuple[int, ...]:
        """What the first stage says of this step: with the first parcel that comes."""
        first = Action("F", self._lane - 1, 0)
        self._kept[first] = self.take(first)
        return self.sizes

    def give(self, made_by: Action, value: Any) -> None:
        """Keep it, or send it, as the needing stage is here or elsewhere."""
        to = self._lane_of(made_by.stage + (1 if made_by.kind == "F" else -1))
        if to == self._lane:
            self._kept[made_by] = value
        elif isinstance(value, Parcel):
            self._links.send(to, self._tag(made_by), (self.sizes, value.shell, value.wanted), value.tensors)
        else:
            there = tuple(grad is not None for grad in value)
            self._links.send(to, self._tag(made_by), there, [grad for grad in value if grad is not None])

    def take(self, made_by: Action) -> Any:
        """What is here, or comes next on its way."""
        if made_by in self._kept:
            return self._kept.pop(made_by)
        shell, tensors = self._links.receive(self._lane_of(made_by.stage), self._tag(made_by))
        if made_by.kind == "F":
            self.sizes, inner, wanted = shell
            return Parcel(inner, tensors, wanted)
        coming = iter(tensors)
        return [next(coming) if is_there else None for is_there in shell]

    def _lane_of(self, stage: int) -> int:
        return stage % self._num_lanes

    def _tag(self, made_by: Action) -> int:
        return _FIRST_FREE_TAG + 2 * made_by.stage + (made_by.kind == "B")


def first_tag_for_ties(num_stages: int) -> int:
    """Past those of the stages."""
    return _FIRST_FREE_TAG + 2 * num_stages


class _Lane(Module):
    """All parts of a lane, as one module to be averaged."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        super().__init__()
        self.parts = ModuleDict({str(number): stage.part for number, stage in stages.items()})

    def forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        return self.parts[str(number)](*args, **kwargs)


class Replicas:
    """This rank's lane among its replicas on other ranks.

    Args:
        stages: this rank's, built alike by all replicas. A collective call among them.
        group: of the replicas; None where there is but one.
    Raises:
        ReplicaMismatchError: their parameters differ.
    """

    def __init__(self, stages: Mapping[int, Stage], group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.wrapper: DistributedDataParallel | None = None
        params = [param for stage in stages.values() for param in stage.part.parameters()]
        if group is None:
            return
        if not any(param.requires_grad for param in params):  # nothing to average, but alike from the beginning
            buffers = [buffer for stage in stages.values() for buffer in stage.part.buffers()]
            broadcast_tensors([*dict.fromkeys([*params, *buffers])], group)
            return
        self.wrapper = DistributedDataParallel(_Lane(stages), process_group=group)
        for number, stage in stages.items():
            stage.call = functools.partial(self.wrapper, number)

    def around(self, action: Action, schedule: Schedule, lane: int) -> contextlib.AbstractContextManager[None]:
        """Copy buffers in the lane's first forward, average in its last backward, and leave replicas alone between."""
        actions = schedule.lanes[lane]
        if self.wrapper is None or action in (actions[0], actions[-1]):
            return contextlib.nullcontext()
        return self.wrapper.no_sync()

    def total(self, value: float, device: torch.device) -> float:
        """The sum over the replicas. A collective call among them."""
        if self._group is None:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(tensor, group=self._group)
        return float(tensor)


class RankRunner:
    """This rank's stages; the others are on other ranks of its column.

    Args:
        cut: of the model, the same on all ranks. A collective call of the world.
        device: this rank's.
    Raises:
        PipelineError: the ranks' models or arguments differ.
    """

    def __init__(self, cut: Cut, terms: Terms, layout: Layout, device: torch.device) -> None:
        rank = dist.get_rank()
        self._terms = terms
        self._lane, self._replica = layout.place_of(rank)
        self._layout = layout
        self.device = device
        parts = [cut.part(number) for number in range(terms.num_stages)]
        users = users_of(cut.root, parts)
        lanes_of = {key: sorted({stage % layout.num_lanes for stage in stages}) for key, stages in users.items()}
        ties = find_ties(cut.root.named_parameters(), lanes_of)
        self.homes = {
            name: lanes_of[id(tensor)][0]
            for name, tensor in cut.root.state_dict(keep_vars=True).items()
            if id(tensor) in lanes_of
        }
        self.tied_elsewhere = {id(tie.param) for tie in ties if tie.users[0] != self._lane}
        release(cut.root, {key for key, lanes in lanes_of.items() if self._lane in lanes})
        own = range(self._lane, terms.num_stages, layout.num_lanes)
        self.stages = {number: Stage(number, parts[number], device) for number in own}
        moved_to_device: set[int] = set()
        for part in (*(stage.part for stage in self.stages.values()), cut.root):
            move(part, device, moved_to_device)
        self.column, row = make_groups(layout, rank)
        self.replicas = Replicas(self.stages, row)
        self.links = Links(self.column, device)
        self._carrier = ToRanks(self.links, terms.num_stages, layout.num_lanes, self._lane)
        self._ties = TiesOverRanks(ties, self._lane, self.links, first_tag_for_ties(terms.num_stages))
        self._ties.make_equal()
        self.times: list[Placed] = []
        self._is_broken = False

    @property
    def _is_first(self) -> bool:
        return self._lane == 0

    @property
    def _is_last(self) -> bool:
        return self._lane == self._layout.num_lanes - 1

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, scale: float) -> Tensor:
        """Loss and gradients of this column's batch; see ``Pipeline.forward_backward``."""
        with self._unbroken():
            self._ties.begin()
            sizes, calls = self._cut(args, kwargs)
            batch, weights = Batch(calls), []
            if self._is_last:
                targets = self._terms.targets(target, sizes)
                weights = self._weights(calls or self._given_calls(args, kwargs, sizes), targets, sizes)
                factors = [weight * scale for weight in weights]
                batch = Batch(calls, self._terms.loss, moved(targets, self.device), factors)
            schedule = self._terms.schedule(len(sizes))
            around = functools.partial(self.replicas.around, schedule=schedule, lane=self._lane)
            results = run_lane(schedule, self._lane, self.stages, batch, self._carrier, keeps=True, around=around)
            self.times = results.times
            loss = None
            if self._is_last:
                loss = weighed(results.losses, weights)
                if self.replicas.size > 1:
                    loss = loss.new_tensor(self.replicas.total(float(loss), self.device) / self.replicas.size)
            self._ties.add_up()
            told = share_loss(self.links, self._lane, self._layout.num_lanes, loss)
            self.links.finish()
            return told

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output for this column's batch, without gradients, on all its ranks."""
        with self._unbroken(), torch.no_grad():
            sizes, calls = self._cut(args, kwargs)
            schedule = self._terms.schedule(len(sizes)).forward_only()
            results = run_lane(schedule, self._lane, self.stages, Batch(calls), self._carrier, keeps=False)
            self.times = results.times
            output = gather(results.outputs, self.device, self._terms.dim) if self._is_last else None
            shell, tensors = share_outputs(self.links, self._lane, self._layout.num_lanes, *take_apart(output))
            self.links.finish()
            return put_together(shell, tensors)

    def gather_state(self, own: dict[str, Any]) -> dict[str, Any]:
        """The states of all lanes, each entry from its home. A collective call of the column."""
        kept = {name: value for name, value in own.items() if self.homes.get(name, self._lane) == self._lane}
        lanes: list[dict[str, Any]] = []
        for lane in range(self._layout.num_lanes):
            shell, tensors = take_apart(kept)
            if lane == self._lane:
                for other in range(self._layout.num_lanes):
                    if other != lane:
                        self.links.send(other, _OUTPUT_TAG, shell, tensors)
                lanes.append({name: tensor.detach().cpu() for name, tensor in kept.items()})
            else:
                shell, tensors = self.links.receive(lane, _OUTPUT_TAG)
                lanes.append(put_together(shell, [tensor.cpu() for tensor in tensors]))
            self.links.finish()
        together = {name: value for lane in lanes for name, value in lane.items()}
        return {name: together[name] for name in self.homes if name in together}

    def switch(self, mode: bool) -> None:
        """To training, or to evaluation."""
        for stage in self.stages.values():
            stage.part.train(mode)
        if self.replicas.wrapper is not None:
            self.replicas.wrapper.train(mode)  # type: ignore[no-untyped-call]

    def all_stages(self) -> list[Stage]:
        """Those of this process."""
        return list(self.stages.values())

    def all_times(self) -> list[Placed]:
        """Of the last step, of all lanes. A collective call of the column."""
        told: list[list[Placed]] = [[]] * self._layout.num_lanes
        dist.all_gather_object(told, self.times, group=self.column)
        return [item for times in told for item in times]

    def norm_of(self, params: Sequence[Parameter], norm_type: float) -> Tensor:
        """Of the gradients of all lanes, each tied parameter counted once. A collective call of the column."""
        grads = [param.grad for param in params if param.grad is not None and id(param) not in self.tied_elsewhere]
        own = torch.nn.utils.get_total_norm(grads, norm_type).detach()
        norm = own.to("cpu", torch.float64).reshape(1)
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.column)
        else:
            norm.pow_(norm_type)
            dist.all_reduce(norm, group=self.column)
            norm.pow_(1 / norm_type)
        return norm[0].to(self.device, own.dtype)

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], list[Call]]:
        """How the batch is cut; and on the first rank, into what."""
        if not self._is_first:
            return self._carrier.await_sizes(), []
        sizes = self._terms.sizes(args, kwargs)
        self._carrier.sizes = sizes
        return sizes, moved(self._terms.calls(args, kwargs, sizes), self.device)

    def _given_calls(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[int]) -> list[Call] | None:
        """On the last rank, the inputs, if it has been given them all the same."""
        found = num_samples((args, kwargs), self._terms.dim, "inputs")
        return self._terms.calls(args, kwargs, sizes) if found == sum(sizes) else None

    def _weights(
        self, calls: Sequence[Call] | None, targets: Sequence[tuple[Any, ...]], sizes: Sequence[int]
    ) -> list[float]:
        """Of the microbatches' losses, so that the average over replicas is what one process would get."""
        counts = self._terms.counts(calls, targets, sizes)
        if counts is None:
            return [float(self.replicas.size)] * len(sizes)
        total = self.replicas.total(sum(counts), self.device)
        return [weight * self.replicas.size for weight in weights_of(counts, total)]

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Refuse to go on after a step that has failed: the other ranks' messages are still on their way."""
        if self._is_broken:
            raise PipelineError(
                f"rank {dist.get_rank()}: an earlier step of this pipeline failed, so its ranks are no longer in step. "
                "Start them anew from the last checkpoint."
            )
        self._is_broken = True
        try:
            yield
            self._is_broken = False
        finally:
            if self._is_broken:
                self._ties.restore()
                for stage in self.stages.values():
                    stage.forget()


def make_groups(layout: Layout, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
    """This rank's column, for messages, and its replicas. A collective call of the world, in one order."""
    lane, replica = layout.place_of(rank)
    everybody = dist.group.WORLD
    assert everybody is not None
    timeout, on_cpu = timeout_of(everybody), cpu_backend_of(everybody)
    columns = [dist.new_group(layout.column(number), timeout, on_cpu) for number in range(layout.num_replicas)]
    if layout.num_replicas == 1:
        return columns[replica], None
    rows = [dist.new_group(list(row), timeout) for row in layout.rows]
    return columns[replica], rows[lane]


def agree(what: Any, explain: Callable[[int, Any, Any], str | None]) -> None:
    """Compare what all ranks say. A collective call of the world.

    Args:
        explain: of a rank, what it says and what rank 0 says: the difference, if there is one.
    Raises:
        PipelineError: on every rank, if any differs.
    """
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, what)
    for rank, theirs in enumerate(said):
        if (difference := explain(rank, theirs, said[0])) is not None:
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


def share_outputs(
    links: Links, lane: int, num_lanes: int, shell: Any, tensors: list[Tensor]
) -> tuple[Any, list[Tensor]]:
    """From the last lane to all others of the column."""
    return _from_last(links, lane, num_lanes, _OUTPUT_TAG, shell, tensors)


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
