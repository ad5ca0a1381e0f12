"""``DataParallel``: one process, a replica of the module on each device.

The invariant: outputs and gradients are those of the bare module on the whole batch, for every size of batch.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel.data_parallel import _check_balance

from paceline.errors import DataError
from paceline.parallel.compiling import not_compiled, not_compiled_within
from paceline.parallel.data_parallel.apply import parallel_apply
from paceline.parallel.data_parallel.balanced import WithLoss, differentiate, train_replicas
from paceline.parallel.data_parallel.devices import DeviceLike, all_devices, as_device, as_devices, as_id
from paceline.parallel.data_parallel.gather import gather
from paceline.parallel.data_parallel.meter import measure_bytes
from paceline.parallel.data_parallel.mirror import Mirror
from paceline.parallel.data_parallel.replicate import replicate, replicate_with
from paceline.parallel.data_parallel.scatter import scatter_kwargs
from paceline.parallel.data_parallel.weights import Count, Loss, Weighing
from paceline.parallel.naming import accept_plain_names

_M = TypeVar("_M", bound=Module)

_log = logging.getLogger("paceline.parallel.data_parallel")
_NO_TARGET = object()
_TIMES_AS_LONG = 2.4  # a step than DistributedDataParallel's, of 200 small layers; measured in docs/data-parallel.md


@functools.cache
def _advise() -> None:
    """Once in a process."""
    _log.warning(
        "DataParallel runs all replicas in one Python interpreter and copies the weights to each in every step: prefer "
        "DistributedDataParallel wherever a script can be started by `paceline run` (with 200 small layers on two CPU "
        "cores, a step of DataParallel took %s times as long).",
        _TIMES_AS_LONG,
    )


class DataParallel(torch.nn.DataParallel[Module]):
    """Split each batch over devices, and run a replica of the module on each, in threads; torch's class of that name.

    Without a device (no accelerator here, and no ``device_ids`` on the CPU) it only calls the module, as torch's does.
    ``device_ids=["cpu", "cpu"]`` runs two replicas on the CPU. Replicas that would have no sample are not run.

    With ``loss``, ``forward_backward`` computes loss and gradients in the replicas, so that no device holds more than
    its share.

    It is a subclass of torch's, so that other people's ``isinstance`` holds.

    Args:
        module: with its parameters and buffers on the first device.
        device_ids: devices of one type; by default all accelerators.
        output_device: where outputs and losses are put; by default the first device.
        dim: the dimension of the batch.
        loss: takes an output and a target, and returns a scalar: a mean over the samples, unless it says otherwise by
            an attribute ``reduction``, as torch's criteria do.
        count: takes a share's target, or without one what the module is called with, and returns what the loss is a
            mean over (say, the number of tokens that are not padding), if that is not the number of samples. Known for
            torch's losses over classes.
    Raises:
        DataError: devices of several types, or a loss that is no scalar.
    """

    module: Module

    def __init__(
        self,
        module: Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        loss: Loss | None = None,
        count: Count | None = None,
    ) -> None:
        Module.__init__(self)
        self.module = module
        self.dim = dim
        self._mirror = Mirror()
        self._loss = None if loss is None else (loss, Weighing(loss, count))  # in a tuple: no submodule
        devices = _choose_devices(device_ids)
        self.device_ids = [as_id(device) for device in devices]  # type: ignore[misc]  # torch knows numbers only
        if not devices:
            return
        self.output_device = as_id(devices[0] if output_device is None else as_device(output_device))  # type: ignore[assignment]
        self.src_device_obj = devices[0]
        if devices[0].type == "cuda":
            _check_balance(self.device_ids)
        if len(devices) == 1:
            module.to(devices[0])
        else:
            _advise()

    @not_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on the shares of a batch, and join what the replicas return.

        Shape:
            inputs: tensors of size N along ``dim``, in containers however nested; N may be anything.
            output: as the module's; of tensors without dimensions, a vector with an element for each replica.
        Raises:
            RuntimeError: a parameter or buffer is not on the first device.
            DataError: arguments that cannot be split alike, or outputs that cannot be joined.
            Exception: of the first replica that failed, of the same type; see ``parallel_apply``.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            shares, named = self._split(inputs, kwargs)
            if len(self.device_ids) == 1:
                return self.module(*shares[0], **named[0])
            return self._call_replicas(shares, named)

    @not_compiled_within
    def _split(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_placement(self.module, self.src_device_obj)
        shares, named = self.scatter(inputs, kwargs, self.device_ids)
        return (shares, named) if shares or named else (((),), ({},))

    @not_compiled_within
    def _call_replicas(self, shares: Sequence[Any], named: Sequence[dict[str, Any]]) -> Any:
        replicas = self.replicate(self.module, self.device_ids[: len(shares)])
        outputs = self.parallel_apply(replicas, shares, named)
        return self.gather(outputs, self.output_device)

    @not_compiled_within
    def forward_backward(
        self, *inputs: Any, target: Any = _NO_TARGET, scale: float | Tensor = 1.0, **kwargs: Any
    ) -> Tensor:
        """Compute loss and gradients of a batch, each replica those of its share.

        Gradients are added to ``param.grad`` as by ``loss.backward()``, hooks included; those of inputs too. If a
        replica raises, none are.

        Args:
            inputs, kwargs: what the module is called with, as in ``forward``.
            target: split like the inputs, and passed to ``loss`` after the output; left out, so is the argument.
            scale: of the gradients, not of the result: 1 / k where k batches make one step, or a GradScaler's
                ``scaler.scale(torch.ones((), device=...))``.
        Returns:
            The loss of the whole batch, a scalar without gradient, on ``output_device``.
        Raises:
            DataError: there is no loss, it returns no scalar, arguments cannot be split alike, or this wrapper's own
                ``forward`` has been replaced.
            ReplicaError: there is nothing to train.
            RuntimeError: a parameter or buffer is not on the first device.
            Exception: of the first replica that failed, of the same type.
        """
        if self._loss is None:
            raise DataError("forward_backward needs a loss: DataParallel(module, ..., loss=criterion).")
        if "forward" in vars(self):
            raise DataError(
                "this DataParallel's forward has been replaced, as amp.initialize does, but forward_backward does not "
                "call it. Call amp.initialize on the module, before it is wrapped."
            )
        targets = () if target is _NO_TARGET else (target,)
        with torch.inference_mode(False), torch.enable_grad():
            losses = self._train(inputs, kwargs, targets, float(scale))
        if not self.device_ids:
            return losses[0]
        home = as_device(self.output_device)
        return torch.stack([part.to(home) for part in losses]).sum()

    def _train(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...], scale: float
    ) -> list[Tensor]:
        """Loss and backward, in the module itself or in replicas: what each share adds to the loss."""
        assert self._loss is not None
        loss, weighing = self._loss
        network = WithLoss(self.module, loss)
        if not self.device_ids:
            return [_train_alone(network, (inputs, kwargs, targets), scale)]
        _check_placement(network, self.src_device_obj)
        devices = as_devices(self.device_ids)
        shares, named = scatter_kwargs((inputs, targets), kwargs, devices, self.dim)
        calls = [(given, named[index], wanted) for index, (given, wanted) in enumerate(shares)]
        if len(devices) == 1:
            return [_train_alone(network, calls[0], scale)]
        weights = weighing.weigh(calls, self.dim)
        return train_replicas(self._mirror, network, devices[: len(calls)], calls, weights, scale)

    def replicate(self, module: _M, device_ids: Sequence[DeviceLike]) -> list[_M]:
        """Replicas of ``module``; what has not changed since the last call is not copied again."""
        return replicate_with(self._mirror, module, as_devices(device_ids), not torch.is_grad_enabled())

    def scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[DeviceLike]) -> Any:
        """Positional and keyword arguments for each replica."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def parallel_apply(self, replicas: Sequence[Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """What the replicas return."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Any, output_device: DeviceLike) -> Any:
        """The replicas' outputs, joined."""
        return gather(outputs, output_device, dim=self.dim)

    @contextlib.contextmanager
    def measure_bytes(self) -> Iterator[dict[int, int]]:
        """Measure the most bytes that each replica's device holds in this block; complete when the block is over.

        On accelerators the allocator is asked. On the CPU the storages of this wrapper's tensors, and of those that
        torch's operations make in the block, are counted; the caller's go to replica 0.

        Returns:
            Bytes by the number of the replica; 0 is the first device.
        """
        with measure_bytes(self.module, self._mirror, as_devices(self.device_ids)) as peaks:
            yield peaks

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._mirror = Mirror()
        return replica

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the module's own state too, whose names lack ``module.``."""
        accept_plain_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def data_parallel(
    module: Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call ``module`` on the shares of a batch, one for each device; torch's function of that name.

    Args:
        module: on the first device.
        inputs: its positional argument, or a tuple of them; None for none.
        device_ids: devices of one type; by default all accelerators.
        output_device: where outputs are put; by default the first device.
        dim: the dimension of the batch.
        module_kwargs: its keyword arguments.
    Raises:
        RuntimeError: there is no accelerator and no device is named, or a parameter is not on the first one.
    """
    given = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    devices = all_devices() if device_ids is None else as_devices(device_ids)
    if not devices:
        raise RuntimeError('no available devices were found; for replicas on the CPU say device_ids=["cpu", "cpu"].')
    _check_placement(module, devices[0])
    shares, named = scatter_kwargs(given, module_kwargs, devices, dim)
    if len(devices) == 1:
        return module(*shares[0], **named[0])
    used = devices[: len(shares)]
    outputs = parallel_apply(replicate(module, used), shares, named, used)
    return gather(outputs, devices[0] if output_device is None else output_device, dim)


def _train_alone(network: Module, call: Sequence[Any], scale: float) -> Tensor:
    loss: Tensor = network(*call)
    differentiate(loss, scale)
    return loss.detach()


def _choose_devices(device_ids: Sequence[DeviceLike] | None) -> list[torch.device]:
    accelerators = all_devices()
    if device_ids is None:
        return accelerators
    on_cpu = all(not isinstance(device, int) and torch.device(device).type == "cpu" for device in device_ids)
    return as_devices(device_ids) if accelerators or on_cpu else []


def _check_placement(module: Module, device: torch.device) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if tensor.device != device:
            raise RuntimeError(
                f"module must have its parameters and buffers on device {device} (device_ids[0]) but found one of them "
                f"on device: {tensor.device}: {name!r}. Move it there: module.to({str(device)!r})."
            )
