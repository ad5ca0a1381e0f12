"""A pipeline within one process: a thread for each device, and a mailbox between them.

torch gives up the interpreter while it computes, so lanes on CPUs run at the same time, and lanes on accelerators fill
their devices' queues.

The invariant: when a step returns or raises, all its threads have ended. The first failure ends the waits
of all others, and is what is raised.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import PipelineError
from paceline.parallel.data_parallel.apply import run
from paceline.pipeline.clock import Placed
from paceline.pipeline.lanes import Batch, Results, run_lane
from paceline.pipeline.schedule import Action, Schedule
from paceline.pipeline.stage import Parcel, Stage
from paceline.pipeline.stages import Cut, move
from paceline.pipeline.terms import Terms, weighed, weights_of
from paceline.pipeline.ties import CopiesOnDevices
from paceline.pipeline.values import moved


class _Ended(Exception):  # noqa: N818  # no error of its own
    """Another lane has failed."""


class _Mailbox:
    """What has been made and not been fetched."""

    def __init__(self) -> None:
        self._made: dict[Action, tuple[Any, Any]] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._made.clear()
            self._changed.notify_all()

    def take_failure(self) -> BaseException | None:
        failure, self._failure = self._failure, None
        return failure

    def put(self, made_by: Action, value: Any, event: Any) -> None:
        with self._changed:
            self._made[made_by] = value, event
            self._changed.notify_all()

    def fetch(self, made_by: Action) -> tuple[Any, Any]:
        with self._changed:
            self._changed.wait_for(lambda: made_by in self._made or self._failure is not None)
            if self._failure is not None:
                raise _Ended
            return self._made.pop(made_by)


class _ToDevice:
    """A lane's end of the mailbox: what it takes is brought to its device."""

    def __init__(self, mailbox: _Mailbox, device: torch.device) -> None:
        self._mailbox = mailbox
        self._device = device

    def give(self, made_by: Action, value: Any) -> None:
        event = None
        if self._device.type != "cpu":  # who takes it must not read before this device has written
            event = torch.get_device_module(self._device).current_stream(self._device).record_event()
        self._mailbox.put(made_by, value, event)

    def take(self, made_by: Action) -> Any:
        value, event = self._mailbox.fetch(made_by)
        if event is not None:
            if self._device.type == "cpu":
                event.synchronize()
            else:
                torch.get_device_module(self._device).current_stream(self._device).wait_event(event)
        if isinstance(value, Parcel):
            return Parcel(value.shell, [self._brought(tensor) for tensor in value.tensors], value.wanted)
        return [None if grad is None else self._brought(grad) for grad in value]

    def _brought(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._device:
            return tensor
        if tensor.device.type != "cpu":  # the copy is made on a stream of that device, maybe not the one that wrote it
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
        return tensor.to(self._device)


class DeviceRunner:
    """All stages, each on a device of this process.

    Args:
        cut: of the model, whose parts are moved to their devices.
        devices: one for each lane; one may appear several times.
    Raises:
        PipelineError: a module is in two stages on different devices.
    """

    def __init__(self, cut: Cut, terms: Terms, devices: Sequence[torch.device]) -> None:
        self._terms = terms
        self._devices = devices
        self.stages = [
            Stage(number, cut.part(number), devices[number % len(devices)], cut.root)
            for number in range(terms.num_stages)
        ]
        self._check = cut.model.check
        _place(self.stages)
        self._copies = CopiesOnDevices(self.stages)
        self.times: list[Placed] = []

    @property
    def output_device(self) -> torch.device:
        return self.stages[-1].device

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, scale: float | None) -> Tensor:
        """Loss and gradients of a batch; see ``Pipeline.forward_backward``."""
        terms = self._terms
        self._check(args, kwargs)
        sizes = terms.sizes(args, kwargs)
        calls, targets = terms.calls(args, kwargs, sizes), terms.targets(target, sizes)
        counts = terms.counts(calls, targets, sizes)
        weights = [1.0] * len(sizes) if counts is None else weights_of(counts, sum(counts))
        batch = Batch(
            moved(calls, self.stages[0].device),
            terms.loss,
            moved(targets, self.output_device),
            weights,
            1.0 if scale is None else scale,
        )
        self._copies.spread(is_differentiable=False)
        try:
            results = self._run(terms.schedule(len(sizes)), batch, keeps=True)
            self._copies.collect()
        finally:
            self._copies.drop()
        losses = next(result.losses for result in results if result.losses)
        return weighed(losses, weights)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output; with a graph through all stages, where gradients are enabled."""
        self._check(args, kwargs)
        sizes = self._terms.sizes(args, kwargs)
        calls = self._terms.calls(args, kwargs, sizes)
        batch = Batch(moved(calls, self.stages[0].device))
        self._copies.spread(is_differentiable=torch.is_grad_enabled())
        try:
            results = self._run(self._terms.schedule(len(sizes)).forward_only(), batch, keeps=False)
        finally:
            self._copies.drop()
        outputs = next(result.outputs for result in results if result.outputs)
        return self._terms.joined(outputs, calls, sizes, self.output_device)

    def gather(self, value: Any) -> list[Any]:
        """What the one process gives."""
        return [value]

    def switch(self, mode: bool) -> None:
        """To training, or to evaluation."""
        for stage in self.stages:
            stage.part.train(mode)

    def all_stages(self) -> list[Stage]:
        """Those of this process."""
        return self.stages

    def all_times(self) -> list[Placed]:
        """Of the last step."""
        return self.times

    def norm_of(self, params: Sequence[Parameter], norm_type: float) -> Tensor:
        """Of the gradients, on the output's device."""
        grads = [param.grad.to(self.output_device) for param in params if param.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    def _run(self, schedule: Schedule, batch: Batch, *, keeps: bool) -> list[Results]:
        """Run all lanes at once.

        Raises:
            Exception: of the first lane that failed.
        """
        mailbox = _Mailbox()
        jobs = [self._job(schedule, lane, batch, mailbox, keeps=keeps) for lane in range(len(self._devices))]
        try:
            results = run(jobs, self._devices, mailbox.fail)
            failure = mailbox.take_failure()
            if failure is not None:
                raise failure
        except BaseException:  # also Ctrl-C, or no thread could be started
            for stage in self.stages:
                stage.forget()
            raise
        finally:
            failure = None  # its traceback holds the lanes, and they what they have made
        found = [result for result in results if result is not None]
        self.times = [item for result in found for item in result.times]
        return found

    def _job(
        self, schedule: Schedule, lane: int, batch: Batch, mailbox: _Mailbox, *, keeps: bool
    ) -> Callable[[], Results | None]:
        own = {stage.number: stage for stage in self.stages if schedule.lane_of(stage.number) == lane}
        carrier = _ToDevice(mailbox, self._devices[lane])

        def work() -> Results | None:
            try:
                return run_lane(schedule, lane, own, batch, carrier, keeps=keeps)
            except _Ended:
                return None
            except BaseException as failure:  # raised in the caller's thread, when all lanes have ended
                mailbox.fail(failure)
                return None

        return work


def _place(stages: Sequence[Stage]) -> None:
    """Move each part to its device; a parameter of several goes to that of the first."""
    owners: dict[int, Stage] = {}
    for stage in stages:
        for name, module in stage.part.named_modules():
            owner = owners.setdefault(id(module), stage)
            if owner.device != stage.device and (module._parameters or module._buffers):
                raise PipelineError(
                    f"{name!r}, a {type(module).__name__}, is in stage {owner.number} on {owner.device} and in stage "
                    f"{stage.number} on {stage.device}. Give each stage a module of its own; their weights may be one "
                    "parameter."
                )
    placed: set[int] = set()
    for stage in stages:
        move(stage.part, stage.device, placed)
