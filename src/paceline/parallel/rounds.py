"""A round: what one outermost backward means to a reducer, and how its end is found.

The invariant: every round ends exactly once, when the graph task in which it was opened ends; or never, if that task
raised an error, and then the round knows that it was abandoned.
"""

import weakref
from typing import Protocol

import torch
from torch.autograd import Variable

from paceline.parallel.control import PendingControl


class Participant(Protocol):
    """A reducer, as the end of a backward sees it."""

    number: int  # in the order in which reducers were made

    def send_all(self) -> None: ...

    def finish_round(self) -> None: ...


class Round:
    """One outermost backward, as one reducer sees it."""

    def __init__(self, preexisting: set[int], reducer: "Participant") -> None:
        self.preexisting = preexisting  # parameters that had a gradient before
        self.arrived: dict[int, None] = {}  # an ordered set
        self.num_launched = 0
        self.told: PendingControl | None = None
        self._task = weakref.ref(Task.current(reducer))

    def is_abandoned(self) -> bool:
        """Whether the backward raised an error before its end."""
        return self._task() is None


_running: "weakref.WeakValueDictionary[int, Task]" = weakref.WeakValueDictionary()


class Task:
    """A graph task of autograd, and the reducers whose rounds end with it.

    Autograd holds the only lasting reference, as a callback: if the task fails, this object is gone.

    Several wrapped models may take part in one backward, in another order on each rank. So all of them send before any
    of them waits, and they wait in the order in which they were made, which is the same on all ranks.
    """

    def __init__(self) -> None:
        self._reducers: list[Participant] = []

    @classmethod
    def current(cls, reducer: "Participant") -> "Task":
        number = torch._C._current_graph_task_id()
        task = _running.get(number)
        if task is None:
            task = _running[number] = cls()
            Variable._execution_engine.queue_callback(task)
        task._reducers.append(reducer)
        return task

    def __call__(self) -> None:
        reducers = sorted(self._reducers, key=lambda reducer: reducer.number)
        for reducer in reducers:
            reducer.send_all()
        for reducer in reducers:
            reducer.finish_round()
