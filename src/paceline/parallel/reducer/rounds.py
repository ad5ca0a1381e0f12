"""A round: what one outermost backward means to a reducer, and how its end is found.

The invariant: a round ends exactly once, when the graph task in which it was opened ends; or, if that task raised an
error, never, and then the round knows that it was abandoned.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable

from paceline.errors import ReductionError
from paceline.parallel.reducer.control import PendingControl


class Participant(Protocol):
    """A reducer, as the end of a backward sees it."""

    number: int  # in the order in which reducers were made
    sync: bool

    def open_round(self) -> "Round": ...

    def has_gradients(self) -> bool: ...

    def send_rest(self) -> None: ...

    def finish_round(self) -> None: ...

    def raise_observer_error(self) -> None: ...


class Round:
    """One outermost backward, as one reducer sees it.

    Args:
        on_end: called when it has ended, with or without an error.
        is_shadow: whether it is a backward of the other ranks' alone, with no graph task here.
    """

    def __init__(
        self, preexisting: set[int], reducer: Participant, on_end: Callable[[], None], *, is_shadow: bool = False
    ) -> None:
        self.is_shadow = is_shadow
        self.preexisting = preexisting  # parameters that had a gradient before
        self.arrived: dict[int, None] = {}  # an ordered set of the ids of parameters whose gradients came
        self.is_ready = False  # whether a complete bucket waits for the next gradient to be launched
        self.num_launched = 0
        self.pending: PendingControl | None = None
        self._task: weakref.ref[Task] | None = None
        if not is_shadow:
            self._task = weakref.ref(Task.join_current(self, reducer), lambda _: on_end())

    def is_abandoned(self) -> bool:
        """Whether the backward raised an error before its end, or at it."""
        task = None if self._task is None else self._task()
        return task is None or task.has_ended


_running: "weakref.WeakValueDictionary[int, Task]" = weakref.WeakValueDictionary()


class Task:
    """A graph task of autograd, and the rounds that end with it.

    Autograd holds the only lasting reference, as a callback: if the task fails, this object is gone.

    Several wrapped models may take part in one backward, in another order on each rank. So all of them send before any
    of them waits, and they wait in the order in which they were made, which is the same on all ranks.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._rounds: list[tuple[Round, Participant]] = []

    @classmethod
    def join_current(cls, opened: Round, reducer: Participant) -> "Task":
        """Let ``opened`` end with the graph task that runs now."""
        number = torch._C._current_graph_task_id()
        task = _running.get(number)
        if task is None:
            task = _running[number] = cls()
            Variable._execution_engine.queue_callback(task)
        task._rounds.append((opened, reducer))
        return task

    def __call__(self) -> None:
        # First: an error below may keep this object alive, in its traceback.
        self.has_ended = True
        reducers = [reducer for _, reducer in self._rounds if reducer.has_gradients()]
        reducers.sort(key=lambda reducer: reducer.number)
        for reducer in reducers:
            reducer.send_rest()
        for reducer in reducers:
            reducer.finish_round()
        for reducer in reducers:
            reducer.raise_observer_error()


def opener(reducer: Participant) -> Callable[[object], None]:
    """A hook for outputs of the wrapper: it opens ``reducer``'s round, and does not keep the reducer alive."""
    return functools.partial(_before_backward, weakref.ref(reducer))


def _before_backward(owner: "weakref.ref[Participant]", _: object) -> None:
    """Runs when a backward comes to an output of the wrapper."""
    reducer = owner()
    if reducer is None:
        raise ReductionError(
            f"rank {dist.get_rank()}: backward through an output of a DistributedDataParallel that has been deleted; "
            "its gradients would not be averaged. Keep the wrapper until backward has run."
        )
    if reducer.sync:
        reducer.open_round()
