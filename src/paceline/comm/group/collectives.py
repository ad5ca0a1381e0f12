"""c10d's process group over any transport: its many spellings of each collective, brought to one.

What c10d allows and a transport does not see is dealt with here: tensors with strides, several tensors in one call,
outputs in one tensor, sparse sums, tensors on other devices (they go to the backend that the group has for those).

The invariant: what is wrong with a call by itself is said at once, before any other rank is involved.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group.base import EngineGroup
from paceline.comm.group.callers import line_of_caller
from paceline.comm.group.checks import (
    check_dtype,
    check_list,
    check_numel,
    check_peer,
    list_of_root,
    root_of,
    spelled_list,
    spelled_sizes,
    splits_of,
)
from paceline.comm.group.monitored import pass_monitored_barrier
from paceline.comm.group.reducing import reducing_of
from paceline.comm.group.sparse import check_sparse, spell_sparse, sum_sparse
from paceline.comm.group.staging import Joined, Staged, flat, then_copy
from paceline.comm.transport import Call, Steps

c10d = dist.distributed_c10d


class CollectiveGroup(EngineGroup):
    """A process group of c10d. See torch.distributed for what each method means."""

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
        reducing = reducing_of(opts.reduceOp, tensors)
        if tensors[0].layout is not torch.strided and len(tensors) == 1:
            check_sparse(tensors[0], reducing)
            detail = spell_sparse(tensors[0], reducing)
            call = Call("all_reduce", tensors[0].dtype, -1, detail, line_of_caller())
            return self._begin(call, sum_sparse(self.transport, call, tensors[0], reducing), opts, tensors)
        joined = Joined("all_reduce", tensors)
        values, detail = joined.flat, reducing.name
        if reducing.factor is not None:
            values = reducing.scale(values)
        if len(tensors) > 1:
            detail += f", {spelled_list([[tensor] for tensor in tensors])}"
        call = Call("all_reduce", tensors[0].dtype, values.numel(), detail, line_of_caller())
        steps = self.transport.all_reduce(call, values, reducing.reduction)
        if values is not joined.flat:
            steps = then_copy(steps, values, joined.flat)
        return self._begin(call, joined.then_back(steps), opts, tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceOptions()
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.reduce(tensors, opts)
        (tensor,) = tensors
        root, reducing = root_of(opts, self.size()), reducing_of(opts.reduceOp, tensors)
        filled = Staged(tensors if self.rank() == root else ())
        whole = filled.flat[0] if filled.flat else flat(tensor)
        values = reducing.scale(whole)
        detail = f"{reducing.name}, to rank {self._ranks[root]}"
        call = Call("reduce", tensor.dtype, tensor.numel(), detail, line_of_caller())
        steps = self.transport.reduce(call, values, reducing.reduction, root)
        if filled.flat and values is not whole:
            steps = then_copy(steps, values, whole)
        steps = filled.then_back(steps)
        return self._begin(call, steps, opts, tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.BroadcastOptions()
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.broadcast(tensors, opts)
        (tensor,) = tensors
        root = root_of(opts, self.size())
        filled = Staged(tensors if self.rank() != root else ())
        whole = filled.flat[0] if filled.flat else flat(tensor)
        call = Call("broadcast", tensor.dtype, tensor.numel(), f"from rank {self._ranks[root]}", line_of_caller())
        steps = self.transport.broadcast(call, whole, root)
        return self._begin(call, filled.then_back(steps), opts, tensors)

    # -- all_gather, gather, scatter -----------------------------------------------------------------------------

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.allgather(outputs, inputs, opts)
        for outputs_of_one, mine in zip(outputs, inputs, strict=True):
            check_list("all_gather", outputs_of_one, mine, self.size())
            check_numel("all_gather: this rank's output", outputs_of_one[self.rank()], mine.numel())
        return self._gather_all(outputs, inputs, opts, outputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.allgather_coalesced(outputs, inputs, opts)
        for outputs_of_rank in outputs:
            if [(output.numel(), output.dtype) for output in outputs_of_rank] != [(t.numel(), t.dtype) for t in inputs]:
                raise ValueError(
                    "all_gather_coalesced: each rank's outputs must have the sizes and dtypes of the inputs."
                )
        if len(outputs) != self.size():
            raise ValueError(f"all_gather_coalesced: outputs of {len(outputs)} ranks, but the group has {self.size()}.")
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
            check_dtype("all_gather_into_tensor", output, mine)
            check_numel("all_gather_into_tensor: the output", output, mine.numel() * self.size())
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
        where, listed = line_of_caller(), spelled_list(by_input)
        filled, flats = [Staged(outputs) for outputs in by_input], [flat(mine) for mine in inputs]

        def steps() -> Steps:
            for staged, mine in zip(filled, flats, strict=True):
                sizes = spelled_sizes(staged.flat)
                detail = listed or sizes  # which are in the list too
                each = Call("all_gather", mine.dtype, -1 if sizes else mine.numel(), detail, where)
                yield from staged.then_back(self.transport.all_gather(each, staged.flat, mine))

        call = Call("all_gather", inputs[0].dtype, sum(mine.numel() for mine in inputs), "", where)
        return self._begin(call, outer.then_back(steps()) if outer else steps(), opts, result)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.GatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.gather(outputs, inputs, opts)
        (mine,), root = inputs, root_of(opts, self.size())
        staged = Staged(list_of_root("gather", outputs, mine, root=root, rank=self.rank(), size=self.size()))
        call = Call("gather", mine.dtype, -1, f"to rank {self._ranks[root]}", line_of_caller())
        steps = self.transport.gather(call, staged.flat, flat(mine), root)
        return self._begin(call, staged.then_back(steps), opts, outputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or c10d.ScatterOptions()
        if elsewhere := self._elsewhere(outputs):
            return elsewhere.scatter(outputs, inputs, opts)
        (output,), root = outputs, root_of(opts, self.size())
        given = [
            flat(tensor)
            for tensor in list_of_root("scatter", inputs, output, root=root, rank=self.rank(), size=self.size())
        ]
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
            check_list("reduce_scatter", inputs_of_one, output, self.size())
            check_numel("reduce_scatter: the output", output, inputs_of_one[self.rank()].numel())
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
            check_dtype("reduce_scatter_tensor", output, mine)
            check_numel("reduce_scatter_tensor: the input", mine, output.numel() * self.size())
        return self._scatter_all(outputs, [flat(mine).tensor_split(self.size()) for mine in inputs], opts)

    def _scatter_all(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """For each of ``outputs``, reduce what all ranks have for this rank among the inputs that belong to it."""
        reducing, where, listed = reducing_of(opts.reduceOp, outputs), line_of_caller(), spelled_list(inputs)
        staged = Staged(outputs)
        values = [[reducing.scale(piece) for piece in pieces] for pieces in inputs]

        def steps() -> Steps:
            for output, pieces in zip(staged.flat, values, strict=True):
                sizes = listed or spelled_sizes(pieces)
                detail = f"{reducing.name}, {sizes}" if sizes else reducing.name
                each = Call("reduce_scatter", output.dtype, sum(piece.numel() for piece in pieces), detail, where)
                yield from self.transport.reduce_scatter(each, output, pieces, reducing.reduction)

        numel = sum(output.numel() for output in outputs) * self.size()
        call = Call("reduce_scatter", outputs[0].dtype, numel, reducing.name, where)
        return self._begin(call, staged.then_back(steps()), opts, outputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()
        if elsewhere := self._elsewhere(inputs):
            return elsewhere.alltoall(outputs, inputs, opts)
        check_list("all_to_all", outputs, inputs[0], self.size())
        check_list("all_to_all", inputs, outputs[0], self.size())
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
        check_dtype("all_to_all_single", output, mine)
        staged = Staged([output])
        takes = torch.split(staged.flat[0], splits_of("output", output, output_splits, self.size()))
        gives = torch.split(flat(mine), splits_of("input", mine, input_splits, self.size()))
        call = Call("all_to_all", output.dtype, -1, "", line_of_caller())
        return self._begin(call, staged.then_back(self.transport.all_to_all(call, takes, gives)), opts, [output])

    # -- messages and barriers -----------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> dist.Work:
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.send(tensors, to, tag)
        check_peer("send", to, self.rank(), self.size())
        detail = f"to rank {self._ranks[to]}, tag {tag}"
        call = Call("send", tensors[0].dtype, tensors[0].numel(), detail, line_of_caller())
        steps = self.transport.send(flat(tensors[0]), to, tag)
        work = self._begin(call, steps, None, tensors, is_message=True, awaited=lambda: [to])
        if not work.is_completed():  # larger than what fits under way: who waits for the rest need not wait for a look
            self.engine.watch(at_once=True)
        return work

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> dist.Work:
        if elsewhere := self._elsewhere(tensors):
            return elsewhere.recv(tensors, source, tag)
        check_peer("recv", source, self.rank(), self.size())
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
