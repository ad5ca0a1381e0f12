"""Making replicas of a module: its structure anew for each call, its tensors as told.

[Note: what replicas share] A replica is torch's shallow copy of each submodule, so attributes, modes and hooks are the
module's as of now, and what forward assigns to an attribute is gone after the call. Parameters of replica 0 lie in the
module's memory, its buffers are the module's: what forward writes into these in place, as batch normalisation does,
stays. All others have copies. Unlike torch's, replicas have ``parameters()``: the tensors that they compute with.

The invariant: a tensor or submodule that the module holds in several places is one in each replica as well.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module
from torch.nn.parallel import comm
from torch.nn.parameter import is_lazy

from paceline.parallel.data_parallel.devices import DeviceLike, as_devices
from paceline.parallel.data_parallel.mirror import Mirror
from paceline.parallel.data_parallel.place import working_for

_M = TypeVar("_M", bound=Module)


def replicate(network: _M, devices: Sequence[DeviceLike], detach: bool = False) -> list[_M]:
    """Make a replica of ``network`` for each device; torch's function of that name.

    Gradients that reach the replicas' parameters are summed onto the network's. [Note: what replicas share]

    Args:
        network: on the first device.
        devices: of one type; one may appear several times.
        detach: the replicas' parameters need no gradient.
    Raises:
        RuntimeError: uninitialised parameters, as in torch.
    """
    return replicate_with(Mirror(), network, as_devices(devices), detach)


def replicate_with(mirror: Mirror, network: _M, devices: Sequence[torch.device], detach: bool) -> list[_M]:
    """The same, with copies that ``mirror`` keeps."""
    if not devices:
        return []
    sources = tensors_to_copy(network)
    copies = mirror.fetch(sources, devices)
    if detach or not sources or not torch.is_grad_enabled():
        rows = [[source.detach() for source in row] for row in (sources, *copies)]
    else:
        flat = _Broadcast.apply(copies, *sources)  # type: ignore[no-untyped-call]
        rows = [list(flat[at : at + len(sources)]) for at in range(0, len(flat), len(sources))]
    return build(network, devices, sources, rows)


def tensors_to_copy(network: Module) -> list[Tensor]:
    """Parameters, and buffers that need a gradient: what a replica must have a differentiable copy of."""
    for name, param in network.named_parameters():
        if is_lazy(param):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DataParallel`: {name!r}. Call the module "
                "itself once before, on some batch."
            )
    learnt = [*network.parameters(), *(buffer for buffer in network.buffers() if buffer.requires_grad)]
    return list({id(tensor): tensor for tensor in learnt}.values())


def build(
    network: _M, devices: Sequence[torch.device], sources: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]
) -> list[_M]:
    """Replicas of ``network`` that have, in the place of each source, the tensor in their row."""
    modules = list(network.modules())
    buffers = list(network.buffers())
    replicas = []
    for index, (device, row) in enumerate(zip(devices, rows, strict=True)):
        tensors = {id(source): tensor for source, tensor in zip(sources, row, strict=True)}
        with working_for(index), torch.no_grad():
            for buffer in buffers:
                if id(buffer) not in tensors:
                    copied = buffer.detach().to(device, non_blocking=True, copy=True) if index else buffer
                    tensors[id(buffer)] = copied
        copies = {module: _shallow_copy(module) for module in modules}
        for module, replica in copies.items():
            _furnish(module, replica, copies, tensors)
        replicas.append(cast(_M, copies[network]))
    return replicas


def _furnish(module: Module, replica: Module, copies: Mapping[Module, Module], tensors: Mapping[int, Tensor]) -> None:
    """Give a replica of one module its submodules, parameters and buffers."""
    children = {name: child if child is None else copies[child] for name, child in module._modules.items()}
    params = {name: param if param is None else tensors[id(param)] for name, param in module._parameters.items()}
    buffers = {name: buffer if buffer is None else tensors[id(buffer)] for name, buffer in module._buffers.items()}
    if type(module).__setattr__ is Module.__setattr__:
        replica.__dict__.update(_modules=children, _parameters=params, _buffers=buffers)
    else:  # it wants to be told of each, as recurrent layers do, or lays them down elsewhere, as ScriptModules do
        for name, value in (*children.items(), *params.items(), *buffers.items()):
            if value is not None:
                setattr(replica, name, value)
        if type(replica._parameters) is dict:
            replica._parameters.update(params)  # type: ignore[arg-type]
    # What torch.compile has stored in a module calls that module, not its replica.
    if "_compiled_call_impl" in replica.__dict__:
        replica.__dict__["_compiled_call_impl"] = None
    if _is_made_by_compile(replica):
        replica._initialize()  # type: ignore[operator]


def _shallow_copy(module: Module) -> Module:
    if not _is_made_by_compile(module):
        replica: Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return replica
    replica = type(module).__new__(type(module))  # assigning to its attributes would change the module within
    replica.__dict__.update(module.__dict__, _modules={}, _parameters={}, _buffers={}, _is_replica=True)
    return replica


def _is_made_by_compile(module: Module) -> bool:
    return "dynamo_ctx" in module.__dict__


class _Broadcast(Function):
    """Tensors for all replicas; backward sums the replicas' gradients, where any has one."""

    @staticmethod
    def forward(ctx: Any, copies: list[list[Tensor]], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.num_sources = len(sources)
        ctx.device = sources[0].device if sources else None
        rows = [[tensor.detach() for tensor in row] for row in (sources, *copies)]
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(tensor for row in rows for tensor, is_needed in zip(row, needed, strict=True) if not is_needed)
        )
        return tuple(tensor for row in rows for tensor in row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num = ctx.num_sources
        rows = [grads[at : at + num] for at in range(0, len(grads), num)]
        with working_for(0):
            return (None, *_sum_rows(rows, ctx.device))


def _sum_rows(rows: Sequence[Sequence[Tensor | None]], device: torch.device) -> list[Tensor | None]:
    columns = [[grad for grad in column if grad is not None] for column in zip(*rows, strict=True)]
    if device.type == "cpu" or torch.is_grad_enabled():
        return [_sum(column, device) for column in columns]
    dense = [n for n, column in enumerate(columns) if len(column) == len(rows) and not any(g.is_sparse for g in column)]
    total = {n: _sum(column, device) for n, column in enumerate(columns) if n not in set(dense)}
    as_real = [
        [torch.view_as_real(g) if g.is_complex() else g for g in (columns[n][at] for n in dense)]
        for at in range(len(rows))
    ]
    sums = comm.reduce_add_coalesced(as_real, device.index) if dense else ()  # type: ignore[no-untyped-call]
    for n, summed in zip(dense, sums, strict=True):
        total[n] = torch.view_as_complex(summed) if columns[n][0].is_complex() else summed
    return [total[n] for n in range(len(columns))]


def _sum(grads: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """In the order of replicas; None where there is none. Dense ones first: a sparse one can only be added to."""
    total: Tensor | None = None
    for grad in sorted(grads, key=lambda grad: grad.is_sparse):
        moved = grad.to(device, non_blocking=True)
        total = moved if total is None else total + moved
    return total
