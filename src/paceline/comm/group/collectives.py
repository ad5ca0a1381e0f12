"""c10d's process group over any transport: its many spellings of each collective, brought to one.

What c10d allows and a transport does not see is dealt with here: tensors with strides, several tensors in one call,
outputs in one tensor, sparse sums, tensors on other devices (they go to the backend that the group has for those).

The invariant: what is wrong with a call by itself is said at once, before any other rank is involved.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.engine import Engine, Operation
from paceline.comm.group.callers import line_of_caller
from paceline.comm.group.monitored import pass_monitored_barrier
from paceline.comm.group.sparse import sum_sparse
from paceline.comm.group.staging import Joined, Staged, flat
from paceline.comm.group.work import RecentWorks, Work
from paceline.comm.memory.averages import Averages
from paceline.comm.transport import Call, Reduction, Steps, Transport
from paceline.world import on_leaving

_REDUCTIONS = {kind.value: Reduction(name.lower()) for name, kind in dist.ReduceOp.RedOpType.__members__.items()}
c10d = dist.distributed_c10d
_BITWISE = ("band", "bor", "bxor")
_ORDERED = ("min", "max")
_CPU = torch.device("cpu")


class CollectiveGroup(dist.ProcessGroup):
    """A process group of c10d. See torch.distributed for what each method means.

    Args:
        ranks: the global rank of each rank in the group.
        companion: makes, when it is needed, the group that serves tensors on other devices.
        averages: makes what ``averages`` returns.
    """

    def __init__(
        self,
        transport: Transport,
        ranks: Sequence[int],
        timeout_s: float,
        companion: "Callable[[CollectiveGroup], dist.ProcessGroup]",
        averages: Callable[[Engine], Averages] | None = None,
    ) -> None:
        super().__init__(transport.rank, transport.size)
        self.engine = Engine(transport, ranks, timeout_s)
        self.transport = transport
        self._ranks = ranks
        self._works = RecentWorks()
        self._name, self._description = "", "undefined"
        self._make_companion = companion
        self._make_averages = averages
        self._averages: Averages | None = None
        self._companion: dist.ProcessGroup | None = None
        weakref.finalize(self, self.engine.close)
        on_leaving(self.engine.depart)

    # -- all_reduce, reduce, broadcast ---------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllreduceOptions()
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.allreduce(tensors, opts)
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.allreduce_coalesced(tensors, opts)
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        reduction = _reduction_of(opts.reduceOp, tensors[0])
        where = line_of_caller()
        if tensors[0].layout != torch.strided:
            call = Call("all_reduce", tensors[0].dtype, -1, f"{reduction.name}, sparse", where)
            return self._begin(call, sum_sparse(self.transport, call, tensors[0], reduction), opts, tensors)
        joined = Joined(tensors)
        call = Call("all_reduce", tensors[0].dtype, joined.flat.numel(), reduction.name, where)
        steps = self.transport.all_reduce(call, joined.flat, reduction)
        return self._begin(call, joined.then_back(steps), opts, tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceOptions()
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.reduce(tensors, opts)
        (tensor,) = tensors
        root, reduction = self._root(opts), _reduction_of(opts.reduceOp, tensor)
        staged = Staged(tensors)
        detail = f"{reduction.name}, to rank {self._ranks[root]}"
        call = Call("reduce", tensor.dtype, tensor.numel(), detail, line_of_caller())
        steps = self.transport.reduce(call, staged.flat[0], reduction, root)
        return self._begin(call, staged.then_back(steps), opts, tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.BroadcastOptions()
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.broadcast(tensors, opts)
        (tensor,) = tensors
        root = self._root(opts)
        staged = Staged(tensors)
        call = Call("broadcast", tensor.dtype, tensor.numel(), f"from rank {self._ranks[root]}", line_of_caller())
        steps = self.transport.broadcast(call, staged.flat[0], root)
        return self._begin(call, staged.then_back(steps), opts, tensors)

    # -- all_gather, gather, scatter -----------------------------------------------------------------------------

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.allgather(outputs, inputs, opts)
        for outputs_of_one, mine in zip(outputs, inputs, strict=True):
            self._check_list("all_gather", outputs_of_one, mine)
            _check_numel("all_gather: this rank's output", outputs_of_one[self.rank()], mine.numel())
        return self._gather_all(outputs, inputs, opts, outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.allgather_coalesced(outputs, inputs, opts)
        for outputs_of_rank in outputs:
            if [output.numel() for output in outputs_of_rank] != [mine.numel() for mine in inputs]:
                raise ValueError("all_gather_coalesced: each rank's outputs must have the sizes of the inputs.")
        by_input = [[output[index] for output in outputs] for index in range(len(inputs))]
        return self._gather_all(by_input, inputs, opts, outputs)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return _spelled(elsewhere, _ALL_GATHER_COALESCED)(outputs, inputs, opts)
        for output, mine in zip(outputs, inputs, strict=True):
            _check_dtype("all_gather_into_tensor", output, mine)
            _check_numel("all_gather_into_tensor: the output", output, mine.numel() * self.size())
        staged = Staged(outputs)
        by_input = [whole.tensor_split(self.size()) for whole in staged.flat]
        return self._gather_all(by_input, inputs, opts, outputs, staged)

    def _gather_all(
        self,
        by_input: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any,
        result: Sequence[Any],
        outer: Staged | None = None,
    ) -> dist.Work:
        """For each of ``inputs``, gather it from all ranks into the outputs that belong to it."""
        where = line_of_caller()

        def steps() -> Steps:
            for outputs, mine in zip(by_input, inputs, strict=True):
                sizes = [output.numel() for output in outputs]
                detail = "" if len(set(sizes)) == 1 else f"sizes {', '.join(map(str, sizes))}"
                each = Call("all_gather", mine.dtype, -1 if detail else mine.numel(), detail, where)
                staged = Staged(outputs)
                yield from staged.then_back(self.transport.all_gather(each, staged.flat, flat(mine)))

        call = Call("all_gather", inputs[0].dtype, sum(mine.numel() for mine in inputs), "", where)
        return self._begin(call, outer.then_back(steps()) if outer else steps(), opts, result)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.GatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.gather(outputs, inputs, opts)
        (mine,), root = inputs, self._root(opts)
        staged = Staged(self._of_root("gather", outputs, mine, root))
        call = Call("gather", mine.dtype, -1, f"to rank {self._ranks[root]}", line_of_caller())
        steps = self.transport.gather(call, staged.flat, flat(mine), root)
        return self._begin(call, staged.then_back(steps), opts, outputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or c10d.ScatterOptions()
        if elsewhere := self._elsewhere(outputs):
            return elsewhere.scatter(outputs, inputs, opts)
        (output,), root = outputs, self._root(opts)
        given = [flat(tensor) for tensor in self._of_root("scatter", inputs, output, root)]
        staged = Staged(outputs)
        call = Call("scatter", output.dtype, -1, f"from rank {self._ranks[root]}", line_of_caller())
        steps = self.transport.scatter(call, staged.flat[0], given, root)
        return self._begin(call, staged.then_back(steps), opts, outputs)

    # -- reduce_scatter, all_to_all ------------------------------------------------------------------------------

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        if elsewhere := self._elsewhere(outputs):
            return elsewhere.reduce_scatter(outputs, inputs, opts)
        for output, inputs_of_one in zip(outputs, inputs, strict=True):
            self._check_list("reduce_scatter", inputs_of_one, output)
            _check_numel("reduce_scatter: the output", output, inputs_of_one[self.rank()].numel())
        flats = [[flat(tensor) for tensor in inputs_of_one] for inputs_of_one in inputs]
        return self._scatter_all(outputs, flats, opts)

    def reduce_scatter_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [mine], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        if elsewhere := self._elsewhere(outputs):
            return _spelled(elsewhere, _REDUCE_SCATTER_COALESCED)(outputs, inputs, opts)
        for output, mine in zip(outputs, inputs, strict=True):
            _check_dtype("reduce_scatter_tensor", output, mine)
            _check_numel("reduce_scatter_tensor: the input", mine, output.numel() * self.size())
        return self._scatter_all(outputs, [flat(mine).tensor_split(self.size()) for mine in inputs], opts)

    def _scatter_all(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """For each of ``outputs``, reduce what all ranks have for this rank among the inputs that belong to it."""
        reduction, where = _reduction_of(opts.reduceOp, outputs[0]), line_of_caller()
        staged = Staged(outputs)

        def steps() -> Steps:
            for output, pieces in zip(staged.flat, inputs, strict=True):
                sizes = [piece.numel() for piece in pieces]
                detail = reduction.name + ("" if len(set(sizes)) == 1 else f", sizes {', '.join(map(str, sizes))}")
                each = Call("reduce_scatter", output.dtype, sum(sizes), detail, where)
                yield from self.transport.reduce_scatter(each, output, pieces, reduction)

        numel = sum(output.numel() for output in outputs) * self.size()
        call = Call("reduce_scatter", outputs[0].dtype, numel, reduction.name, where)
        return self._begin(call, staged.then_back(steps()), opts, outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.alltoall(outputs, inputs, opts)
        self._check_list("all_to_all", outputs, inputs[0])
        self._check_list("all_to_all", inputs, outputs[0])
        staged = Staged(outputs)
        call = Call("all_to_all", outputs[0].dtype, -1, "", line_of_caller())
        steps = self.transport.all_to_all(call, staged.flat, [flat(tensor) for tensor in inputs])
        return self._begin(call, staged.then_back(steps), opts, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        mine: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()
        if elsewhere := self._elsewhere([mine]):
            spelled = _spelled(elsewhere, ("all_to_all_single", "alltoall_base"))
            return spelled(output, mine, output_splits, input_splits, opts)
        _check_dtype("all_to_all_single", output, mine)
        staged = Staged([output])
        takes = torch.split(staged.flat[0], self._splits("output", output, output_splits))
        gives = torch.split(flat(mine), self._splits("input", mine, input_splits))
        call = Call("all_to_all", output.dtype, -1, "", line_of_caller())
        return self._begin(call, staged.then_back(self.transport.all_to_all(call, takes, gives)), opts, [output])

    # -- messages and barriers -----------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> dist.Work:
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.send(tensors, to, tag)
        self._check_peer("send", to)
        detail = f"to rank {self._ranks[to]}, tag {tag}"
        call = Call("send", tensors[0].dtype, tensors[0].numel(), detail, line_of_caller())
        steps = self.transport.send(flat(tensors[0]), to, tag)
        return self._begin(call, steps, None, tensors, is_message=True, awaited=lambda: [to])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.recv(tensors, source, tag)
        self._check_peer("recv", source)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.recv_anysource(tensors, tag)
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Sequence[Tensor], source: int | None, tag: int) -> dist.Work:
        name = "any rank" if source is None else f"rank {self._ranks[source]}"
        call = Call("recv", tensors[0].dtype, tensors[0].numel(), f"from {name}, tag {tag}", line_of_caller())
        others = [peer for peer in range(self.size()) if peer != self.rank()]
        staged = Staged(tensors)
        steps = staged.then_back(self.transport.receive(staged.flat[0], source, tag))
        return self._begin(
            call, steps, None, tensors, is_message=True, awaited=lambda: [source] if source is not None else others
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        call = Call("barrier", where=line_of_caller())
        return self._begin(call, self.transport.barrier(call), opts, ())

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self.engine.timeout_s if seconds is None else seconds
        pass_monitored_barrier(self.engine, self.transport, self._ranks, seconds, wait_all_ranks, line_of_caller())

    def averages(self) -> Averages | None:
        """Averages of tensors that lie in shared memory; None where the transport has none."""
        if self._averages is None and self._make_averages is not None:
            self._averages = self._make_averages(self.engine)
        return self._averages

    # -- what c10d asks of a group -------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return self.transport.name

    name = getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def shutdown(self) -> None:
        """Free everything; what is under way fails."""
        self.engine.close()
        if self._companion is not None:
            self._companion.shutdown()

    def abort(self) -> None:
        """Let all that is under way fail, here and on the other ranks."""
        self.engine.abort("it was aborted")

    def set_timeout(self, timeout: timedelta) -> None:
        self.engine.timeout_s = timeout.total_seconds()

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        """What serves tensors on ``device``: this group itself on the CPU."""
        return self if torch.device(device).type == "cpu" else self._companion_group()._get_backend(device)

    @property
    def options(self) -> Any:
        return self._Options(self.engine.timeout_s)

    class _Options:
        def __init__(self, timeout_s: float) -> None:
            self._timeout = timedelta(seconds=timeout_s)

    # -- the way of every call -----------------------------------------------------------------------------------

    def _begin(
        self,
        call: Call,
        steps: Any,
        opts: Any,
        result: Sequence[Any],
        *,
        is_message: bool = False,
        awaited: Callable[[], Sequence[int]] | None = None,
    ) -> dist.Work:
        timeout_s = self.engine.timeout_s
        if opts is not None and opts.timeout.total_seconds() > 0:  # negative, where the caller has set none
            timeout_s = opts.timeout.total_seconds()
        operation = Operation(call, steps, timeout_s=timeout_s, result=result, is_message=is_message, awaited=awaited)
        self.engine.submit(operation)
        work = Work(self.engine, operation)
        if not getattr(opts, "asyncOp", True):
            return work
        if not operation.is_done:
            self.engine.watch()
        return self._works.add(work)

    def _elsewhere(self, tensors: Sequence[Any]) -> Any:
        """The group that serves tensors which are not on the CPU; None where all are."""
        for tensor in tensors:
            if not tensor.is_cpu:
                return self._companion_group()
        return None

    def _companion_group(self) -> dist.ProcessGroup:
        if self._companion is None:
            self._companion = self._make_companion(self)
        return self._companion

    # -- checks --------------------------------------------------------------------------------------------------

    def _root(self, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise ValueError(f"the root is rank {root} of the group, which has {self.size()} ranks, from 0.")
        return root

    def _check_peer(self, what: str, peer: int) -> None:
        if not 0 <= peer < self.size() or peer == self.rank():
            raise ValueError(
                f"{what}: rank {peer} of the group is {'this rank itself' if peer == self.rank() else 'not one of its'}"
                f"; name another of its ranks, 0 to {self.size() - 1}."
            )

    def _check_list(self, what: str, tensors: Sequence[Tensor], other: Tensor) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{what}: a list of {len(tensors)} tensors, but the group has {self.size()} ranks.")
        for tensor in tensors:
            _check_dtype(what, tensor, other)

    def _of_root(self, what: str, lists: Sequence[Sequence[Tensor]], other: Tensor, root: int) -> Sequence[Tensor]:
        """The root's list, checked; empty on the other ranks, which must not pass any."""
        if self.rank() != root:
            if any(lists):
                raise ValueError(f"{what}: only the root passes a list; this rank is {self.rank()}, not {root}.")
            return ()
        if len(lists) != 1:
            raise ValueError(f"{what}: the root must pass a list of {self.size()} tensors.")
        self._check_list(what, lists[0], other)
        return lists[0]

    def _splits(self, what: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Elements for each rank, from a list of rows; equal ones where it is empty."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size():
                raise ValueError(
                    f"all_to_all_single: the {what} has {rows} rows, which cannot be split equally among "
                    f"{self.size()} ranks. Pass {what}_split_sizes."
                )
            splits = [rows // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} must have {self.size()} entries and add up to "
                f"the {rows} rows of the {what}."
            )
        row_numel = tensor.numel() // rows if rows else 0
        return [split * row_numel for split in splits]


def _alias(cls: type, **names: str) -> None:
    """Names that torch gave the same methods before 2.13."""
    for old, new in names.items():
        setattr(cls, old, getattr(cls, new))


_alias(
    CollectiveGroup,
    _allgather_base="all_gather_single",
    _reduce_scatter_base="reduce_scatter_single",
    alltoall_base="all_to_all_single",
    allgather_into_tensor_coalesced="all_gather_single_coalesced",
    reduce_scatter_tensor_coalesced="reduce_scatter_single_coalesced",
)
_ALL_GATHER_COALESCED = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
_REDUCE_SCATTER_COALESCED = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")


def _spelled(group: dist.ProcessGroup, names: Sequence[str]) -> Any:
    """The method of ``group`` under the first of ``names`` that this torch knows."""
    return next(getattr(group, name) for name in names if hasattr(group, name))


def _reduction_of(op: Any, tensor: Tensor) -> Reduction:
    reduction = _REDUCTIONS[getattr(op, "op", op).value]
    if reduction.name in _BITWISE and (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"{reduction.name.upper()} needs integers or booleans, not {tensor.dtype}.")
    if reduction.name in _ORDERED and tensor.is_complex():
        raise ValueError(f"{reduction.name.upper()} is not defined for {tensor.dtype}.")
    if reduction.name == "premul_sum":
        return Reduction(reduction.name, op.__getstate__()[1])
    return reduction


def _check_dtype(what: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        raise ValueError(f"{what}: tensors of {tensor.dtype} and {other.dtype} in one call; use one dtype.")


def _check_numel(what: str, tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"{what} has {tensor.numel()} elements; expected {numel}.")
