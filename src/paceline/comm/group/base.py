"""A process group of c10d as an engine serves it: how a call begins, who it is, and how it ends.

The invariant: a call begins in one place, which gives it its deadline, submits it, and keeps the work that c10d gets.
"""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.engine import Engine, Operation
from paceline.comm.group.work import RecentWorks, Work
from paceline.comm.memory.averages import Averages
from paceline.comm.transport import Call, Transport
from paceline.world import on_leaving

_CPU = torch.device("cpu")


class EngineGroup(dist.ProcessGroup):
    """What a group is, but for its collectives.

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
        companion: Callable[[Any], dist.ProcessGroup],
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

    # -- how a call begins ---------------------------------------------------------------------------------------

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
        """Submit what a call is to do.

        Args:
            opts: c10d's, of this call; None where it has none.
            result, is_message, awaited: see ``Operation``.
        """
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
