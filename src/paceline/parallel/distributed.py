"""``DistributedDataParallel``: torch's wrapper, around a reducer that cannot be told wrong.

The invariant: with the same weights at the start and the same calls on every rank, all replicas hold the same weights
after every optimizer step, and these are the weights of one process that saw all ranks' samples.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from paceline import world
from paceline.errors import PlanError, ReductionError, WorldError
from paceline.parallel.broadcast import broadcast_tensors
from paceline.parallel.channels import open_channels, retired_names
from paceline.parallel.outputs import find_tensors
from paceline.parallel.reducer import Reducer, collect_abandoned
from paceline.parallel.registry import Registry
from paceline.plan.buckets import CAP_BYTES, FIRST_CAP_BYTES, SHARED_CAP_BYTES


class DistributedDataParallel(Module):
    """Average a module's gradients over the ranks of a process group; torch's class of that name.

    Gradients are averaged during every backward that reaches the module's parameters, whether or not its forward was
    called through this wrapper. Parameters that no rank used keep ``grad=None``. Each rank must run backward equally
    often. Evaluation (``eval()`` or ``no_grad``) needs no other rank.

    Args:
        module: the model, on one device (or, without ``device_ids``, on several of one type), built alike on all ranks.
        device_ids: at most one CUDA device, to which inputs are moved; None for CPU modules.
        output_device: accepted as in torch; the device of ``device_ids``.
        dim: accepted as in torch; unused with one device.
        broadcast_buffers: deprecated in torch in favour of ``forward_sync_buffers``. False also leaves buffers alone at
            construction.
        init_sync: copy the first rank's parameters and buffers to all. Names and shapes are compared in any case.
        process_group: the ranks that take part; by default all.
        bucket_cap_mb: MiB of gradients that travel together, 25 by default.
        find_unused_parameters, static_graph, check_reduction, gradient_as_bucket_view, skip_all_reduce_unused_params:
            accepted and not needed: unused parameters and changing graphs are always right, and gradients always lie in
            the buckets.
        device_mesh: a one-dimensional mesh instead of ``process_group``.
        forward_sync_buffers: copy the first rank's buffers to all before each training forward. True by default.
    Raises:
        ReplicaMismatchError: on every rank, if the ranks' parameters or buffers differ in name, shape or dtype.
        ValueError, RuntimeError: where torch raises them: no process group, nothing to train, devices that do not fit,
            uninitialised parameters.
    Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """

    module: Module
    _reducer: Reducer | None

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
        *,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        self.process_group = _choose_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = [p for name, p in module.named_parameters() if name not in self.parameters_to_ignore]
        self.device_type = _check_params(params)
        self.device = params[0].device
        self.device_ids, self.output_device = _choose_device(params, device_ids, output_device)
        if check_reduction:
            warnings.warn(
                "check_reduction is not needed: every gradient is always reduced.", FutureWarning, stacklevel=2
            )
        self._init_sync = init_sync
        self._init_sync_buffers = self._choose_buffers(broadcast_buffers, forward_sync_buffers)
        self._bucket_cap_mb = _check_cap(bucket_cap_mb)
        self.require_backward_grad_sync = True
        self._join_ranks()
        if (here := world.current()) is not None:
            here.part_random_streams()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; torch's semantics."""
        if not self._is_joined and self.training and torch.is_grad_enabled():
            self._join_ranks()
        if self.will_sync_module_buffers():
            self._sync_buffers()
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, torch.device("cuda", self.device_ids[0]), True)
            inputs, kwargs = moved[0], moved_kwargs[0]
        output = self.module(*inputs, **kwargs)
        if self._reducer is not None and torch.is_grad_enabled():
            for tensor in find_tensors(output):
                self._reducer.watch(tensor)
        return output

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

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward averages gradients; torch's name for it."""
        return self._sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        self._sync = sync
        if "_reducer" in self.__dict__ and self._reducer is not None:
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
            and self._reducer is not None
            and bool(self._registry.buffer_names)
        )

    def _sync_buffers(self) -> None:
        try:
            broadcast_tensors(self._registry.buffers(), self.process_group)
        except RuntimeError as error:
            names = self._registry.buffer_names
            raise ReductionError(
                f"rank {dist.get_rank()}: the buffers ({names[0]!r} to {names[-1]!r}) could not be copied from the "
                "first rank. Either another rank has ended, and its output says why, or the ranks run unequal numbers "
                "of training forwards: call eval(), or use no_grad(), where a rank evaluates. The backend reports: "
                f"{error}"
            ) from error

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
        if name == "module" and self.__dict__.get("_is_joined"):
            self._join_ranks()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("process_group", "device_mesh", "_reducer", "_registry", "_join_reminders"):
            state.pop(name, None)
        return {**state, "_sync": True, "_is_joined": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(state, _choose_group(None, None))

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied._restore(copy.deepcopy(self.__getstate__(), memo), self.process_group)
        return copied

    def _restore(self, state: dict[str, Any], process_group: dist.ProcessGroup) -> None:
        """Become a copy, which joins the ranks in its first training forward: one rank may copy and evaluate alone."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = process_group
        self._reducer = None
        self._join_reminders = [
            param.register_post_accumulate_grad_hook(_remind)  # type: ignore[no-untyped-call]
            for param in self.module.parameters()
            if param.requires_grad and dist.get_world_size(process_group) > 1
        ]

    def _join_ranks(self) -> None:
        """Agree on the parameters with the other ranks and start reducing. A collective call."""
        group = self.process_group
        for reminder in self.__dict__.pop("_join_reminders", ()):
            reminder.remove()
        self._reducer = None
        self._is_joined = True
        with_buffers = self.forward_sync_buffers or (self._init_sync and self._init_sync_buffers)
        self._registry = Registry(self.module, self.parameters_to_ignore, with_buffers=with_buffers)
        if dist.get_world_size(group) == 1:
            return
        collect_abandoned(self.module.parameters())
        offers = self._registry.agree(group, extra=retired_names(group))
        channels = open_channels(group, self.device_type, offers, owner=self._registry)
        caps = _choose_caps(self._bucket_cap_mb, is_shared=channels.averages is not None)
        self._reducer = Reducer(self._registry, channels, **caps)
        self._reducer.sync = self._sync
        if self._init_sync:
            buffers = self._registry.buffers() if self._init_sync_buffers else []
            broadcast_tensors([*self._registry.params, *buffers], group)

    def _choose_buffers(self, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
        """Settle ``forward_sync_buffers``; return whether buffers are copied at construction. As torch 2.13 does."""
        if broadcast_buffers is not None:
            ignored = (
                " It is ignored here, since `forward_sync_buffers` is given."
                if forward_sync_buffers is not None
                else ""
            )
            warnings.warn(
                f"`broadcast_buffers` is deprecated; use `forward_sync_buffers`, which also copies buffers once at "
                f"construction.{ignored}",
                FutureWarning,
                stacklevel=3,
            )
        if forward_sync_buffers is not None:
            self.forward_sync_buffers = forward_sync_buffers
            return True
        self.forward_sync_buffers = True if broadcast_buffers is None else broadcast_buffers
        return self.forward_sync_buffers


def _remind(_: torch.nn.Parameter) -> None:
    raise ReductionError(
        f"rank {dist.get_rank()}: a backward through a copied or loaded DistributedDataParallel that has not joined "
        "the other ranks; its gradients would not be averaged. Call the wrapper in train() mode on all ranks first."
    )


def _choose_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return process_group
    if not dist.is_initialized():
        raise WorldError("there is no process group yet: call paceline.init() before wrapping a model.")
    return dist.distributed_c10d._get_default_group()


def _check_params(params: Sequence[torch.nn.Parameter]) -> str:
    """The device type of ``params``, if they can be trained."""
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(isinstance(param, UninitializedParameter) for param in params):
        raise RuntimeError(
            "the module has uninitialised parameters, of unknown shapes. Run one forward pass before wrapping it."
        )
    types = {param.device.type for param in params}
    if len(types) > 1:
        raise ValueError(f"parameters must be on devices of one type, but they are on {sorted(types)}.")
    return types.pop()


def _choose_device(
    params: Sequence[torch.nn.Parameter],
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    devices = sorted({str(param.device) for param in params})

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"device_ids={device_ids}, output_device={output_device}: {reason}.")

    if device_ids is not None and len(device_ids) > 1:
        refuse("expected None or one device: each rank trains on its own")
    if not device_ids and output_device is None:
        return None, None
    if len(devices) > 1 or params[0].device.type != "cuda":
        refuse(f"they are for a module on one GPU, but its parameters are on {', '.join(devices)}. Leave them out")
    if not device_ids:
        return None, None
    index = torch.cuda._utils._get_device_index(device_ids[0], True)
    return [index], index if output_device is None else torch.cuda._utils._get_device_index(output_device, True)


def _check_cap(bucket_cap_mb: float | None) -> float | None:
    if bucket_cap_mb is not None and bucket_cap_mb < 0:
        raise PlanError(f"bucket_cap_mb={bucket_cap_mb}: expected MiB, not less than 0.")
    return bucket_cap_mb


def _choose_caps(bucket_cap_mb: float | None, *, is_shared: bool) -> dict[str, int]:
    if bucket_cap_mb is None:
        return {"cap_bytes": SHARED_CAP_BYTES if is_shared else CAP_BYTES, "first_cap_bytes": FIRST_CAP_BYTES}
    cap_bytes = int(bucket_cap_mb * 1024 * 1024)
    return {"cap_bytes": cap_bytes, "first_cap_bytes": cap_bytes}
