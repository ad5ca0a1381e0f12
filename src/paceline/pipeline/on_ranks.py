"""A pipeline over ranks: this rank's lane, messages to its neighbours, and the averages over its replicas.

The first stage's rank tells with each microbatch how the batch was cut; so the others need not be given the batch, and
each batch may be of another size.

The invariant: all ranks of a column run the same schedule; a lane's replicas average once a step, at its last backward.
"""

import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from paceline import world
from paceline.errors import PipelineError
from paceline.pipeline.clock import Placed
from paceline.pipeline.column import (
    OUTPUT_TAG,
    ToRanks,
    compare_inputs,
    first_tag_for_ties,
    share_loss,
    share_outputs,
    spread_overflow,
    tell_of_inputs,
)
from paceline.pipeline.groups import make_groups
from paceline.pipeline.lanes import Batch, run_lane
from paceline.pipeline.layout import Layout
from paceline.pipeline.links import Links
from paceline.pipeline.microbatches import has_batch, num_samples
from paceline.pipeline.replicas import Replicas
from paceline.pipeline.stage import Call, Stage
from paceline.pipeline.stages import Cut, homes_of, move, release, users_of
from paceline.pipeline.terms import NO_TARGET, Terms, weighed, weights_of
from paceline.pipeline.ties import TiesOverRanks, find_ties
from paceline.pipeline.values import moved, put_together, take_apart


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
        self._check = cut.model.check
        self._lane, self._replica = layout.place_of(rank)
        self._layout = layout
        self.device = device
        parts = [cut.part(number) for number in range(terms.num_stages)]
        users = users_of(cut.root, parts)
        lanes_of = {key: sorted({stage % layout.num_lanes for stage in stages}) for key, stages in users.items()}
        ties = find_ties(cut.root.named_parameters(), lanes_of)
        self._homes = homes_of(cut.root, parts, lanes_of, layout.num_lanes)
        self.tied_elsewhere = {id(tie.param) for tie in ties if tie.users[0] != self._lane}
        release(cut.root, {key for key, lanes in lanes_of.items() if self._lane in lanes})
        own = range(self._lane, terms.num_stages, layout.num_lanes)
        self.stages = {number: Stage(number, parts[number], device, cut.root) for number in own}
        moved_to_device: set[int] = set()
        for part in (*(stage.part for stage in self.stages.values()), cut.root):
            move(part, device, moved_to_device)
        self.column, row = make_groups(layout, rank)
        self.replicas = Replicas(self.stages, terms.loss if self._is_last else None, row)
        self.links = Links(self.column, layout.column(self._replica), device)
        self._carrier = ToRanks(self.links, terms.num_stages, layout.num_lanes, self._lane)
        self._ties = TiesOverRanks(ties, self._lane, self.links, first_tag_for_ties(terms.num_stages))
        self._ties.make_equal()
        self.times: list[Placed] = []
        self._is_broken = False
        if (here := world.current()) is not None:
            here.part_random_streams()  # or equal layers of two stages would drop the same

    @property
    def _is_first(self) -> bool:
        return self._lane == 0

    @property
    def _is_last(self) -> bool:
        return self._lane == self._layout.num_lanes - 1

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, scale: float | None) -> Tensor:
        """Loss and gradients of this column's batch; see ``Pipeline.forward_backward``."""
        with self._unbroken(trains=True):
            self._ties.begin()
            sizes, calls = self._cut(args, kwargs)
            batch, weights = Batch(calls), []
            if self._is_first:
                tell_of_inputs(self.links, self._layout.num_lanes, (args, kwargs))
            if self._is_last:
                targets = self._terms.targets(target, sizes)
                matters = target is not NO_TARGET or self._terms.counts_calls(targets)
                are_given = matters and has_batch((args, kwargs))
                compare_inputs(self.links, self._layout.num_lanes, (args, kwargs), are_given=are_given)
                weights = self._weights(calls or self._given_calls(args, kwargs, sizes), targets, sizes)
                batch = Batch(
                    calls, self._terms.loss, moved(targets, self.device), weights, 1.0 if scale is None else scale
                )
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
            if scale is not None:
                spread_overflow(self.stages.values(), self.column)
            told = share_loss(self.links, self._lane, self._layout.num_lanes, loss)
            self.links.finish()
            return told

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output for this column's batch, without gradients, on all its ranks."""
        with self._unbroken(trains=False), torch.no_grad():
            sizes, calls = self._cut(args, kwargs)
            schedule = self._terms.schedule(len(sizes)).forward_only()
            results = run_lane(schedule, self._lane, self.stages, Batch(calls), self._carrier, keeps=False)
            self.times = results.times
            output = None
            if self._is_last:
                given = calls or self._given_calls(args, kwargs, sizes)
                output = self._terms.joined(results.outputs, given, sizes, self.device)
            shell, tensors = share_outputs(self.links, self._lane, self._layout.num_lanes, *take_apart(output))
            self.links.finish()
            return put_together(shell, tensors)

    def __reduce__(self) -> Any:
        raise PipelineError(
            f"rank {dist.get_rank()}: a pipeline over ranks holds process groups, so it can be neither copied nor "
            "pickled. Save full_state_dict(), and build it anew."
        )

    def gather_state(self, own: dict[str, Any]) -> dict[str, Any]:
        """The states of all lanes, each entry from its home. A collective call of the column."""
        kept = {name: value for name, value in own.items() if self._homes.get(name) == self._lane}
        together = {name: value for lane in self.gather(kept) for name, value in lane.items()}
        return {name: together[name] for name in self._homes if name in together}

    def gather(self, value: Any) -> list[Any]:
        """What each lane gives, with its tensors on the CPU. A collective call of the column."""
        self._refuse_if_broken()
        lanes: list[Any] = []
        for lane in range(self._layout.num_lanes):
            shell, tensors = take_apart(value)
            if lane == self._lane:
                for other in range(self._layout.num_lanes):
                    if other != lane:
                        self.links.send(other, OUTPUT_TAG, shell, tensors)
            else:
                shell, tensors = self.links.receive(lane, OUTPUT_TAG)
            lanes.append(put_together(shell, [tensor.detach().cpu() for tensor in tensors]))
            self.links.finish()
        return lanes

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
        """Of the last step, of all lanes, by the clocks on the wall. A collective call of the column."""
        self._refuse_if_broken()
        shift = time.time() - time.perf_counter()  # each host counts from a beginning of its own
        own = [item._replace(begin=item.begin + shift, end=item.end + shift) for item in self.times]
        told: list[list[Placed]] = [[]] * self._layout.num_lanes
        dist.all_gather_object(told, own, group=self.column)
        return [item for times in told for item in times]

    def norm_of(self, params: Sequence[Parameter], norm_type: float) -> Tensor:
        """Of the gradients of all lanes, each tied parameter counted once. A collective call of the column."""
        self._refuse_if_broken()
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
        self._check(args, kwargs)
        sizes = self._terms.sizes(args, kwargs, f"rank {dist.get_rank()}, which runs the first stage: ")
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

    def _refuse_if_broken(self) -> None:
        if self._is_broken:
            raise PipelineError(
                f"rank {dist.get_rank()}: an earlier step of this pipeline failed, so its ranks are no longer in step. "
                "Start them anew from the last checkpoint."
            )

    @contextlib.contextmanager
    def _unbroken(self, *, trains: bool) -> Iterator[None]:
        """Refuse to go on after a step that has failed: the other ranks' messages are still on their way."""
        self._refuse_if_broken()
        self._is_broken = True
        self._carrier.trains = trains
        try:
            yield
        except BaseException as failure:
            self.links.fail(failure, [*self._carrier.ways(), *self._ties.ways()])
            self._ties.restore()
            for stage in self.stages.values():
                stage.forget()
            raise
        self._is_broken = False
