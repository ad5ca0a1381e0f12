"""``Pipeline``: one model whose parts lie on different devices, or on different ranks.

The invariant: loss and gradients are those of the undivided model on the whole batch, for every size of batch and every
schedule; names in checkpoints are the undivided model's.
"""

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from paceline.errors import PipelineError
from paceline.parallel.compiling import not_compiled_within
from paceline.parallel.data_parallel.devices import DeviceLike
from paceline.parallel.data_parallel.weights import Count, Loss, Weighing
from paceline.pipeline.activations import measure_activations
from paceline.pipeline.agreement import agree_on_model, from_first
from paceline.pipeline.clock import Placed, bubble_fraction
from paceline.pipeline.layout import Layout, Ranks, choose_lanes, device_of_this_rank
from paceline.pipeline.on_devices import DeviceRunner
from paceline.pipeline.on_ranks import RankRunner
from paceline.pipeline.picture import draw_placed
from paceline.pipeline.schedule import Rule, Schedule
from paceline.pipeline.stages import Balance, Cut, choose_ranges, open_model
from paceline.pipeline.terms import NO_TARGET, Terms, own_loss
from paceline.pipeline.tracing import Example
from paceline.pipeline.whole import Whole


class Pipeline(Module):
    """Cut a model into stages, and run microbatches through them on several devices or ranks at once.

        model = paceline.Pipeline(net, devices=["cuda:0", "cuda:1"], microbatches=8, loss=criterion)
        loss = model.forward_backward(x, target=y)   # gradients as after loss.backward()
        optimizer.step()

    Over ranks, the same lines run on every rank, in a world that ``init`` has made; the first stage's rank uses the
    inputs, the last's the targets, and the others may be given None. Each rank holds, and trains, its own stages'
    parameters only, so make the optimizer of ``model.parameters()``, after this call.

    Each microbatch is normalised by its own statistics where the model has batch norm, as when gradients are
    accumulated; running statistics are updated once for each.

    Args:
        module: a Sequential, any model that torch.fx can follow outside of its blocks, or a list of stages, of which
            each is called with what the one before it returns.
        devices: of this process; all accelerators by default, where there is no world of several ranks. One may appear
            several times: ``["cpu", "cpu"]`` computes with two threads.
        ranks: for each lane a rank, or a list of ranks that are its replicas, averaged by DistributedDataParallel; or
            a DeviceMesh of lanes, or of lanes by replicas. Each rank of the world once. By default all, one for each
            lane.
        microbatches: into how many a batch is cut, of sizes that differ by at most one; fewer where there are fewer
            samples. By default 4 for each lane.
        schedule: "1f1b", "gpipe", "interleaved", or a function of the numbers of lanes, stages and microbatches that
            returns a Schedule.
        loss: takes an output and a target, and returns a scalar: a mean over the samples, unless it says otherwise by
            an attribute ``reduction``, as torch's criteria do. By default the model returns its loss.
        count: takes a microbatch's target, and returns what its loss is a mean over, if that is not the number of
            samples. Known for torch's losses over classes.
        balance: "parameters", "time" or "memory": what the dearest stage has least of; or the names of the modules
            with which the stages after the first begin.
        example: of the model's input, of a microbatch's size: a tensor, a tuple of arguments or a dict of keywords. For
            "time" and "memory", and for models that are not called with just the arguments that have no default.
        stages_per_lane: 1, and 2 for "interleaved".
        dim: the dimension of the batch.
    Raises:
        PlanError: the model cannot be cut so, or there is no such schedule.
        PipelineError: devices and ranks are both given, ranks do not fit the world, or the ranks' models differ.
        DataError: a loss that is no scalar.
    """

    module: Module

    def __init__(
        self,
        module: Module | Sequence[Module],
        devices: Sequence[DeviceLike] | None = None,
        ranks: Ranks | None = None,
        microbatches: int | None = None,
        schedule: str | Rule = "1f1b",
        *,
        loss: Loss | None = None,
        count: Count | None = None,
        balance: Balance = "parameters",
        example: Any = None,
        stages_per_lane: int | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        lanes = choose_lanes(devices, ranks)
        num_lanes = lanes.num_lanes if isinstance(lanes, Layout) else len(lanes)
        if isinstance(module, Module):
            per_lane = stages_per_lane or (2 if schedule == "interleaved" else 1)
            num_stages = num_lanes * per_lane
        else:
            num_stages = len(module)
        microbatches = 4 * num_lanes if microbatches is None else microbatches
        loss = own_loss if loss is None else loss
        terms = Terms(schedule, num_lanes, num_stages, microbatches, dim, loss, Weighing(loss, count))
        self._terms = terms
        whole = terms.schedule(microbatches)
        example = None if example is None else Example.of(example)
        root, model = open_model(module, balance, example)
        device = device_of_this_rank() if isinstance(lanes, Layout) else lanes[0]

        def choose() -> tuple[range, ...]:
            return choose_ranges(model, num_stages, balance, example, whole, device)

        # What one rank measures, all take: their own measures would differ.
        if isinstance(lanes, Layout):
            agree_on_model(root, model.units, terms)
            ranges = from_first(choose)
        else:
            ranges = choose()
        cut = Cut(root, model, ranges)
        self.units = cut.units
        self._schedule = whole
        self._names = list(root.state_dict())
        if isinstance(lanes, Layout):
            self._runner: DeviceRunner | RankRunner = RankRunner(cut, terms, lanes, device)
        else:
            self._runner = DeviceRunner(cut, terms, lanes)
        self.module = root
        first = root if isinstance(module, Module) else module[0]
        self._takes_scale = "scale" in inspect.signature(first.forward).parameters
        self.training = root.training

    @not_compiled_within
    def forward_backward(
        self, *inputs: Any, target: Any = NO_TARGET, scale: float | Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Compute loss and gradients of a batch, microbatch by microbatch.

        Gradients are added to ``param.grad`` as by ``loss.backward()``, those of replicas averaged. Over ranks, a
        collective call.

        Args:
            inputs, kwargs: what the module is called with; tensors of size N along ``dim`` are cut, those without
                dimensions, and what is no tensor, go to each microbatch whole.
            target: cut likewise, and passed to the loss after the output; left out, so is the argument.
            scale: of the gradients, not of the result: 1 / k where k batches make one step, or a GradScaler's. Where it
                is given, gradients that overflow on one rank overflow on all, so that their GradScalers agree.
        Returns:
            The loss of the whole batch, that of all replicas, a scalar without gradient: on the last stage's device,
            and over ranks on each rank.
        Raises:
            PipelineError: gradients are not enabled, the loss is no scalar, the model takes a ``scale``, too, an
                earlier step failed, or tied weights have parted.
            PeerError: another rank failed.
            DataError: sizes of inputs and targets do not agree.
            Exception: what a stage raised, of the same type, with stage and microbatch in its message.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "forward_backward computes gradients, which no_grad or inference_mode forbids here. Call the pipeline "
                "itself for outputs alone."
            )
        if "forward" in vars(self):
            raise PipelineError(
                "the pipeline's forward has been replaced, as amp.initialize does, but forward_backward does not call "
                "it. Use torch.autocast around forward_backward."
            )
        if scale is not None and self._takes_scale:
            raise PipelineError(
                "the model's forward has an argument `scale`, and so has forward_backward. Pass the model's by "
                "position."
            )
        return self._runner.train(inputs, kwargs, target, None if scale is None else float(scale))

    @not_compiled_within
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output for a batch; its loss, where the model returns that.

        On devices, ``loss.backward()`` works as ever, with all forwards before all backwards. Over ranks there is no
        graph; the output is on every rank of the column.

        Raises:
            PipelineError: over ranks, in training with gradients enabled.
            Exception: what a stage raised, of the same type, with stage and microbatch in its message.
        """
        if isinstance(self._runner, RankRunner) and self.training and torch.is_grad_enabled():
            raise PipelineError(
                f"rank {dist.get_rank()}: no graph reaches over ranks, so gradients need "
                "model.forward_backward(inputs, target=...). For outputs alone, call model.eval() first, or use "
                "torch.no_grad()."
            )
        return self._runner.evaluate(inputs, kwargs)

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """What a step runs; print it, or `draw` it.

        Args:
            num_microbatches: of the batch; by default the most there are.
        """
        return self._schedule if num_microbatches is None else self._terms.schedule(num_microbatches)

    def last_step(self) -> list[Placed]:
        """When the last step ran what; over ranks, a collective call.

        On accelerators it is the host's time that is measured. Times of several hosts are compared by their clocks.

        Returns:
            For each action its lane, and when it began and ended, in seconds from a moment of no meaning. Waits are
            what is between them.
        Raises:
            PipelineError: no step has been run.
        """
        times = self._runner.all_times()
        if not times:
            raise PipelineError("no step has been run yet, so none has been measured.")
        return times

    def measured_bubble(self) -> float:
        """The share of the lanes' time in which they waited, in the last step; over ranks, a collective call.

        Returns:
            Between 0 and 1; ``clock.bubble_fraction`` of the schedule is what to expect.
        Raises:
            PipelineError: no step has been run.
        """
        return bubble_fraction(self.last_step(), len(self._schedule.lanes))

    def draw_last_step(self) -> str:
        """The last step as it ran, as an SVG; over ranks, a collective call.

        Raises:
            PipelineError: no step has been run.
        """
        times, num_lanes = self.last_step(), len(self._schedule.lanes)
        title = f"{self._schedule.name}, measured: bubble {bubble_fraction(times, num_lanes):.1%}"
        return draw_placed(times, num_lanes, title)

    @contextlib.contextmanager
    def measure_bytes(self) -> Iterator[dict[int, int]]:
        """Measure the most bytes that each lane of this process keeps from forward to backward, weights apart.

        Returns:
            Bytes by the lane's number, complete when the block is over.
        """
        with measure_activations(self._runner.all_stages(), self._schedule.lane_of) as peaks:
            yield peaks

    def train(self, mode: bool = True) -> "Pipeline":
        super().train(mode)
        self._runner.switch(mode)
        return self

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that the norm over *all* stages is at most ``max_norm``; over ranks, a collective call.

        ``torch.nn.utils.clip_grad_norm_`` would see this rank's parameters only.

        Args:
            norm_type: of the norm; a positive number, or inf.
        Returns:
            The norm before.
        """
        params = [param for param in self.parameters() if param.grad is not None]
        norm = self._runner.norm_of(params, norm_type)
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """This process's parameters, under the undivided model's names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers, under the undivided model's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This process's part of the undivided model's state, under its names."""
        return self.module.state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Any]:
        """The undivided model's state, which it can load. Over ranks, a collective call; tensors are on the CPU."""
        own = self.module.state_dict()
        return self._runner.gather_state(own) if isinstance(self._runner, RankRunner) else dict(own)

    def whole(self, optimizer: Optimizer | None = None) -> Whole:
        """The model and, over ranks, all ranks' optimizers, for `Checkpointer` and `paceline.save`.

        It has ``state_dict``, a collective call of the same value on all ranks, and ``load_state_dict``. Parameters go
        by the undivided model's names, so the state can be loaded into a pipeline that is cut otherwise.

        Args:
            optimizer: this rank's, of ``parameters()``.
        """
        return Whole(self, optimizer, self._runner.gather)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the undivided model's state, or this process's part of it; what belongs to other ranks is passed over.

        Raises:
            RuntimeError: as torch's, for names that no stage has, or lacks.
            PipelineError: ``assign``, which would leave stages with the parameters that they had.
        """
        _refuse_to_assign(assign)
        elsewhere = self._names_elsewhere()
        mine = {name: value for name, value in state_dict.items() if name not in elsewhere}
        return self.module.load_state_dict(mine, strict)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """As part of another module that is loaded."""
        _refuse_to_assign(local_metadata.get("assign_to_params_buffers", False))
        elsewhere = self._names_elsewhere()
        for key in [key for key in state_dict if key.startswith(prefix)]:
            value, name = state_dict.pop(key), key[len(prefix) :]
            if name not in elsewhere:
                state_dict[f"{prefix}module.{name}"] = value
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _names_elsewhere(self) -> set[str]:
        """Of what the undivided model holds and this process does not."""
        return set(self._names) - set(self.module.state_dict())

    def extra_repr(self) -> str:
        names = (f"stage {number}: {', '.join(units)}" for number, units in enumerate(self.units))
        return "\n".join([f"{self._schedule.name}, {self._schedule.num_microbatches} microbatches", *names])


def _refuse_to_assign(assign: bool) -> None:
    if assign:
        raise PipelineError("assign=True would replace parameters that stages hold. Load without it.")
