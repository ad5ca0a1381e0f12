"""Parameters that several stages use, such as an embedding that is also the output layer.

Within one process and one device they are one tensor, and need nothing. On other devices a step works with a copy, and
the copy's gradient is added to the one parameter that the optimizer knows. On other ranks each has its own parameter:
they begin equal, get the sum of all their gradients, and so stay equal under equal optimizers, which is checked.

The invariant: the gradient of each is that of the one parameter in the undivided model, and what an earlier step has
left in ``grad`` is counted once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import PipelineError
from paceline.pipeline.links import Links, Way
from paceline.pipeline.stage import Stage

_SAMPLE = 64


@dataclass(frozen=True)
class Tie:
    """One parameter, and who uses it; the first is its home."""

    name: str
    param: Parameter
    users: tuple[int, ...]


def find_ties(named: Iterable[tuple[str, Parameter]], lanes_of: Mapping[int, Sequence[int]]) -> list[Tie]:
    """The parameters that several lanes use.

    Args:
        named: all of the model.
        lanes_of: by ``id``, who uses it, in order.
    """
    return [Tie(name, param, tuple(lanes_of[id(param)])) for name, param in named if len(lanes_of[id(param)]) > 1]


class CopiesOnDevices:
    """What the stages of one process use of parameters that live on another device: that of their first user."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        homes: dict[int, torch.device] = {}
        self._used: list[tuple[Stage, str, Parameter]] = []
        for stage in stages:
            for name, param in stage.part.named_parameters(remove_duplicate=False):
                if homes.setdefault(id(param), stage.device) != stage.device:
                    self._used.append((stage, name, param))
        self._copies: dict[tuple[int, torch.device], Tensor] = {}

    def spread(self, *, is_differentiable: bool) -> None:
        """Give the stages copies of the weights as they are now.

        Args:
            is_differentiable: leave it to autograd to bring gradients home.
        """
        self._copies = {}
        for stage, name, param in self._used:
            key = id(param), stage.device
            if key not in self._copies:
                copied = param.to(stage.device)
                own = param.requires_grad and not is_differentiable
                self._copies[key] = copied.detach().requires_grad_() if own else copied
            stage.overrides[name] = self._copies[key]

    def collect(self) -> None:
        """Bring gradients home, and forget the copies."""
        done: set[tuple[int, torch.device]] = set()
        for stage, _, param in self._used:
            key = id(param), stage.device
            if key not in done and (grad := self._copies[key].grad) is not None:
                grad = grad.to(param.device)
                param.grad = grad if param.grad is None else param.grad + grad
            done.add(key)
        self.drop()

    def drop(self) -> None:
        """Forget the copies."""
        self._copies = {}
        for stage, name, _ in self._used:
            stage.overrides.pop(name, None)


class TiesOverRanks:
    """This rank's parameters that ranks of its column have too.

    Args:
        ties: all of the model, whose users are lanes; ranks agree on their order.
        lane: this rank's.
        links: to the other lanes, by number.
        first_tag: of the messages for these.
    """

    def __init__(self, ties: Sequence[Tie], lane: int, links: Links, first_tag: int) -> None:
        self._own = [(number, tie) for number, tie in enumerate(ties) if lane in tie.users]
        self._lane = lane
        self._links = links
        self._first_tag = first_tag
        self._before: list[Tensor | None] = []

    def make_equal(self) -> None:
        """Give all the home's weights."""
        for number, tie in self._own:
            home, *others = tie.users
            if self._lane == home:
                for other in others:
                    self._links.send(other, self._first_tag + number, None, [tie.param])
            else:
                _, (weights,) = self._links.receive(home, self._first_tag + number)
                with torch.no_grad():
                    tie.param.copy_(weights)
        self._links.finish()

    def ways(self) -> list[Way]:
        """Those on which other lanes may wait for this one."""
        homes = [tie.users if tie.users[0] == self._lane else tie.users[:1] for _, tie in self._own]
        pairs = zip(self._own, homes, strict=True)
        return [Way(to, self._first_tag + number) for (number, _), to_all in pairs for to in to_all if to != self._lane]

    def begin(self) -> None:
        """Set aside what earlier steps have left, which is a sum already."""
        self._before = [tie.param.grad for _, tie in self._own]
        for _, tie in self._own:
            tie.param.grad = None

    def add_up(self) -> None:
        """Give all the sum of their gradients, in the order of lanes.

        Raises:
            PipelineError: their weights have parted.
        """
        for number, tie in self._own:
            if self._lane != tie.users[0]:
                grads = [] if tie.param.grad is None else [tie.param.grad]
                self._links.send(tie.users[0], self._first_tag + number, None, [_sample(tie.param), *grads])
        for (number, tie), before in zip(self._own, self._before, strict=True):
            home, *others = tie.users
            tag = self._first_tag + number
            if self._lane == home:
                total = tie.param.grad
                parted: list[int] = []
                for other in others:
                    _, (sample, *grads) = self._links.receive(other, tag)
                    if not torch.equal(sample, _sample(tie.param)):
                        parted.append(other)
                    for grad in grads:
                        total = grad if total is None else total + grad
                for other in others:
                    self._links.send(other, tag, tuple(parted), [] if total is None else [total])
            else:
                shell, totals = self._links.receive(home, tag)
                parted, total = list(shell), (totals[0] if totals else None)
            if parted:
                self._links.finish()
                raise PipelineError(
                    f"rank {dist.get_rank()}: the tied weights {tie.name!r} of lane {parted[0]} are no longer those "
                    f"of lane {home}. All ranks need the same optimizer for them, with the same options, and must load "
                    "the same checkpoint."
                )
            tie.param.grad = _sum_of(before, total)
        self._before = []

    def restore(self) -> None:
        """After a step that failed: give back what was set aside."""
        for (_, tie), before in zip(self._own, self._before, strict=False):
            tie.param.grad = before
        self._before = []


def _sum_of(before: Tensor | None, total: Tensor | None) -> Tensor | None:
    if before is None or total is None:
        return before if total is None else total
    with torch.no_grad():
        return before.add_(total)


def _sample(param: Tensor) -> Tensor:
    """Some of its elements, spread over it."""
    flat = param.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)].clone()
