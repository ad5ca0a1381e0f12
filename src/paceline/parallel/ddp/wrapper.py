"""``DistributedDataParallel``: torch's wrapper, around a reducer that cannot be told wrong.

The invariant: with the same weights at the start and the same calls on every rank, all replicas hold the same weights
after every optimizer step, and these are the weights of one process that saw all ranks' samples.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.nn import Module, Parameter

from paceline import world
from paceline.parallel.buckets.hooked import Hook
from paceline.parallel.compiling import not_compiled
from paceline.parallel.ddp import arguments
from paceline.parallel.ddp.comm_hooks import builtin_hook, check_hook
from paceline.parallel.ddp.copies import Reminder, portable_state
from paceline.parallel.ddp.join import Joining, ShadowHook, Stateful, call_roll, note_live
from paceline.parallel.ddp.mixed_precision import LowPrecision
from paceline.parallel.ddp.outputs import find_tensors
from paceline.parallel.ddp.replica import Replica, Terms
from paceline.parallel.ddp.report import Report, report_of
from paceline.parallel.ddp.torch_private import Absent, TorchsReducer
from paceline.parallel.naming import accept_plain_names
from paceline.parallel.reducer.in_backward import take_over
from paceline.parallel.reducer.reducer import Reducer
from paceline.parallel.replicas.buffers import copy_buffers
from paceline.timeline import Observer, Timeline


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """Average a module's gradients over the ranks of a process group; torch's class of that name.

    Gradients are averaged during every backward that reaches the module's parameters, whether or not its forward was
    called through this wrapper. Parameters that no rank used keep ``grad=None``. Each rank must run backward equally
    often. Evaluation (``eval()`` or ``no_grad``) needs no other rank.

    It is a subclass of torch's, so that other people's ``isinstance`` holds, but shares no code with it.

    Args:
        module: the model, on one device (or, without ``device_ids``, on several of one type), built alike on all ranks.
        device_ids: at most one CUDA device, to which inputs are moved; None for CPU modules.
        output_device: accepted as in torch; the device of ``device_ids``.
        dim: accepted as in torch; unused with one device.
        broadcast_buffers: deprecated in torch in favour of ``forward_sync_buffers``. False also leaves buffers alone at
            construction.
        init_sync: copy the first rank's parameters and buffers to all. Names and shapes are compared in any case.
        process_group: the ranks that take part; by default all.
        bucket_cap_mb: MiB of gradients that travel together; by default 4 in shared memory, 12 over other backends for
            CPUs, 25 on GPUs.
        find_unused_parameters, static_graph, check_reduction, skip_all_reduce_unused_params: accepted and not needed:
            unused parameters and changing graphs are always right.
        gradient_as_bucket_view, batched_grad_copy: accepted and not needed: gradients always lie in the buckets, copied
            a bucket at a time.
        delay_all_reduce_named_params, param_to_hook_all_reduce: accepted, both or neither, and not needed: gradients
            that come late or more than once in a backward are always right.
        mixed_precision: torch's ``_MixedPrecision``: forward and backward in ``param_dtype``, gradients averaged in
            ``reduce_dtype`` or else in the parameters' own.
        device_mesh: a one-dimensional mesh instead of ``process_group``.
        bucket_cap_mb_list: MiB in each bucket, in the order in which gradients arrive; the last counts for the rest.
        forward_sync_buffers: copy the first rank's buffers to all before each training forward. True by default.
        detect_drift: compare samples of the weights between ranks in each backward, and raise on all ranks where they
            differ. Always off with a communication hook.
        observer: called with each `paceline.timeline.Event`; see ``observe``.
    Raises:
        ReplicaMismatchError: on every rank, if the ranks' parameters or buffers differ in name, shape or dtype.
        ValueError, RuntimeError: where torch raises them: no process group, nothing to train, devices that do not fit,
            uninitialised parameters.
    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """

    module: Module
    use_side_stream_for_tensor_copies = True  # torch's ``to_kwargs`` asks for it
    # torch's own books and machinery.
    _get_ddp_logging_data = _set_ddp_runtime_logging_sample_rate = _register_buffer_comm_hook = Absent()
    _ddp_init_helper = _build_params_for_reducer = _run_ddp_forward = _check_global_requires_backward_grad_sync = (
        Absent()
    )
    _replica: Replica | None = None  # none as long as a copy has not joined the other ranks
    _reminder: Reminder | None = None

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Iterable[tuple[str, Parameter]] | None = None,
        param_to_hook_all_reduce: Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        detect_drift: bool = True,
        observer: Observer | None = None,
    ) -> None:
        Module.__init__(self)
        Joinable.__init__(self)
        arguments.check_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.process_group = arguments.choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        is_over_a_slice = arguments.prepare_for_mesh(module, device_mesh)
        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = [p for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
        self.device_type = arguments.check_params(params)
        self.is_multi_device_module = len({param.device for param in params}) > 1
        self.device = params[0].device
        self.device_ids, self.output_device = arguments.choose_device(params, device_ids, output_device)
        if check_reduction:
            warnings.warn(
                "check_reduction is not needed: every gradient is always reduced.", FutureWarning, stacklevel=2
            )
        self.forward_sync_buffers, init_sync_buffers = arguments.choose_buffer_syncs(
            broadcast_buffers, forward_sync_buffers
        )
        self._observers: list[Observer] = []
        self._timeline: Timeline | None = None
        self.observe(observer)
        self.mixed_precision = mixed_precision
        self._low_precision = mixed_precision and LowPrecision(mixed_precision, self.parameters_to_ignore)
        if self._low_precision is not None:
            self._low_precision.cast_buffers(module)
        self._terms = Terms(
            self.parameters_to_ignore,
            is_over_a_slice,
            self.device_type,
            arguments.Caps(bucket_cap_mb, bucket_cap_mb_list),
            detects_drift=detect_drift,
            copies_params=init_sync,
            copies_buffers=init_sync_buffers,
            reduce_dtype=None if self._low_precision is None else self._low_precision.reduce_dtype,
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._comm_hooks: list[tuple[Hook, object]] = []
        self._divides_by_initial = False
        self._has_looked_for_optimizers = False
        self._join_ranks()
        if (here := world.current()) is not None:
            here.part_random_streams()

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; torch's semantics."""
        trains = self.training and torch.is_grad_enabled()
        if trains:
            self._prepare_to_train()
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device("cuda", self.device_ids[0]), True)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self._low_precision is None:
            output = self.module(*inputs, **kwargs)
        else:
            output = self._low_precision.call(self.module, inputs, kwargs)
        if self._reducer is not None and torch.is_grad_enabled():
            for tensor in find_tensors(output):
                self._reducer.watch(tensor)
        return output

    def _prepare_to_train(self) -> None:
        """What a training forward begins with; only that needs other ranks."""
        if self._replica is None:
            self._join_ranks()
        if not self._has_looked_for_optimizers:
            self._has_looked_for_optimizers = True
            replica = self._replica
            if replica is not None and replica.reducer is not None:
                replica.reducer.steps_in_backward = take_over(replica.registry.params)
        source = 0
        if self._join_config.enable and self._reducer is not None:
            notified = Join.notify_join_context(self)
            if notified is not None:
                notified.wait()
            source, _ = self._attend(is_live=True)
        if self.will_sync_module_buffers():
            self._sync_buffers(source)

    def _attend(self, *, is_live: bool) -> tuple[int, bool]:
        """Call the roll under ``join``: the first live rank, and whether the backward to come averages."""
        assert self._replica is not None
        control = self._replica.channels.control
        live, will_sync = call_roll(control, is_live=is_live, will_sync=self.require_backward_grad_sync)
        note_live(self, live)
        return live[0], will_sync

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local in the backwards that run in this block; the next one outside averages their sum.

        What counts is where backward runs, not forward.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def observe(self, observer: Observer | None) -> None:
        """Have ``observer`` called with each `paceline.timeline.Event` of the backwards to come; None for nobody.

        It is called on this rank, in the thread that runs backward, so it had better be quick. What it raises is raised
        by that ``backward()``, as an ObserverError, after the gradients have been averaged on all ranks. On CUDA, this
        call waits for the device; the rounds observed do not.

        Args:
            observer: a `paceline.timeline.Timeline`, say, which ``report`` then measures; or any callable.
        """
        self._set_observers([] if observer is None else [observer])

    @contextlib.contextmanager
    def profile(self) -> Iterator[Timeline]:
        """Keep the events of the backwards that run in this block, for ``report`` and for a trace.

            with model.profile() as timeline:
                for x, y in itertools.islice(loader, 20): ...
            print(model.report())
            timeline.save("trace.json")

        An observer that is there is called as before.
        """
        timeline, before = Timeline(), self._observers
        self._set_observers([*before, timeline])
        try:
            yield timeline
        finally:
            self._set_observers(before)

    def _set_observers(self, observers: list[Observer]) -> None:
        self._observers = observers
        for observer in observers:
            if isinstance(observer, Timeline):
                self._timeline = observer
        if self._reducer is not None:
            self._reducer.witness.observe(observers)

    def report(self) -> Report:
        """The buckets, what has happened so far, and how well communication was hidden; no other rank is needed.

        The last is known where a `paceline.timeline.Timeline` observed, or after ``profile``. Print it, or look at its
        fields.
        """
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if self._replica is None or self._replica.reducer is None:
            return Report(rank, size, dist.get_backend(self.process_group))
        backend = dist.get_backend(self._replica.channels.gradients)
        measured = None if self._timeline is None else self._timeline.measure(dist.get_rank())
        return report_of(self._replica.reducer, self._replica.registry.names, backend, measured)

    @property
    def _reducer(self) -> Reducer | None:
        """None where this rank has nothing to average: in a world of one, and in a copy that has not joined yet."""
        return None if self._replica is None else self._replica.reducer

    @property
    def reducer(self) -> "TorchsReducer":  # type: ignore[override]
        """What other people's code asks torch's reducer for."""
        return TorchsReducer(self._reducer)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward averages gradients; torch's name for it."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._sync = sync
        if self._reducer is not None:
            self._reducer.sync = sync

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward copies the first rank's buffers to all: only one that trains does."""
        return (
            self.forward_sync_buffers
            and self.training
            and torch.is_grad_enabled()
            and self.require_backward_grad_sync
            and self._replica is not None
            and self._replica.reducer is not None
            and bool(self._replica.registry.buffer_names)
        )

    def _sync_buffers(self, source: int = 0) -> None:
        """Copy the buffers of the group's rank ``source`` to all. A collective call."""
        assert self._replica is not None
        copy_buffers(self._replica.registry, self.process_group, source)

    def join(
        self,
        divide_by_initial_world_size: bool = False,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        states: Sequence[Stateful] = (),
    ) -> Join:
        """A context in which ranks may run out of batches at different times; torch's, with SyncBatchNorm allowed.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks, rather than of those that still
                have batches. True in torch.
            enable: False for an ordinary context.
            throw_on_early_termination: raise on all ranks when the first has run out.
            states: what else must be equal on all ranks afterwards: an optimizer with momentum, a scheduler, a
                GradScaler. Their ``state_dict`` of the rank that went on longest is loaded everywhere.
        """
        kwargs = {"divide_by_initial_world_size": divide_by_initial_world_size, "states": states}
        return Joining([self], enable, throw_on_early_termination, **kwargs)

    def join_hook(self, **kwargs: Any) -> ShadowHook:
        """For torch's ``Join``. It takes the keyword arguments ``divide_by_initial_world_size`` and ``states``."""
        divides_by_initial = kwargs.get("divide_by_initial_world_size", False)
        return ShadowHook(self, divides_by_initial=divides_by_initial, states=kwargs.get("states", ()))

    @property
    def join_device(self) -> torch.device:
        device: torch.device = self.device
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Have ``hook(state, bucket)`` average gradients; torch's semantics, and torch's shipped hooks.

        Gradients are not divided before. Sparse ones, and those of parameters that the ranks have not agreed on yet,
        are averaged without the hook. Weights are no longer compared between ranks, since a hook may let them differ.

        Args:
            state: passed to the hook.
            hook: takes ``(state, bucket)``, the bucket as ``GradBucket``, and returns a future of the averaged buffer.
        Raises:
            TypeError, ValueError: it cannot be a hook.
            RuntimeError: there is one already.
        """
        check_hook(hook)
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm_hooks.append((hook, state))
        if self._reducer is None:
            self._join_ranks(copies=False)  # alone in its world, it has had nothing to reduce
        else:
            self._reducer.use_hook(state, hook, keeps_replicas_equal=False)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self.register_comm_hook(self.process_group, builtin_hook(comm_hook_type))

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Go on over other ranks, without copying anything. A collective call of the new group."""
        self.process_group = new_process_group
        self._join_ranks(copies=False)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Leave these names alone when ``module`` is wrapped; torch's name for it, which FSDP and others call too."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]

    def _set_static_graph(self) -> None:
        """As in torch, before the first step only; it has no effect, since changing graphs are right anyway."""
        if self._reducer is not None and self._reducer.has_run:
            raise RuntimeError(
                "_set_static_graph() should be called before training loop starts, not after a backward."
            )
        self.static_graph = True

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "module" and self._replica is not None:
            self._join_ranks()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the module's own state too, whose names lack ``module.``."""
        accept_plain_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group is not dist.distributed_c10d._get_default_group():
            raise RuntimeError(
                "a DistributedDataParallel over another process group than the default one cannot be pickled: the "
                "group would be lost. Save its module's state_dict() instead."
            )
        return portable_state(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, arguments.choose_group(None, None))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied._restore(copy.deepcopy(portable_state(self.__dict__), memo), self.process_group)
        return copied

    def _restore(self, state: dict[str, Any], process_group: dist.ProcessGroup) -> None:
        """Become a copy, which joins the ranks in its first training forward: one rank may copy and evaluate alone."""
        Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        self.process_group = process_group
        if dist.get_world_size(process_group) > 1:
            self._reminder = Reminder(self.module)

    def _join_ranks(self, *, copies: bool = True) -> None:
        """Agree on the parameters with the other ranks and start reducing. A collective call.

        Args:
            copies: whether the first rank's parameters and buffers are copied to all, if the wrapper does so at all.
        """
        if self._reminder is not None:
            self._reminder.remove()
            self._reminder = None
        self._replica = None  # first, so that the next one may take its channels
        hook = next(((state, hook) for hook, state in self._comm_hooks), None)
        self._replica = Replica(
            self.module,
            self.process_group,
            self._terms,
            with_buffers=self.forward_sync_buffers,
            hook=hook,
            copies=copies,
        )
        if self._reducer is not None:
            self._reducer.sync = self._sync
            self._reducer.witness.observe(self._observers)
