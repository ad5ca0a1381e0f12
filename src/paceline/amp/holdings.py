"""What an optimizer steps: masters, and parameters that have none.

Parameter groups may be added, or changed by hand, at any time, so it is looked up anew whenever it is asked for.

The invariant: an optimizer never holds a weight that has a master; it holds the master.
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.amp.convert import HALF
from paceline.amp.masters import Master, adopt, find_writes, master_with


class Holdings:
    """What one optimizer steps.

    Args:
        optimizer: torch's, or what looks like it.
        uses_masters: whether its weights of half precision have masters.
        wholes: the float32 values that weights had before the model was cast, by the weights' ids.
    """

    def __init__(self, optimizer: Any, *, uses_masters: bool, wholes: Mapping[int, Tensor]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._uses_masters = uses_masters
        self._ids: tuple[int, ...] | None = None  # of the parameters that these two lists are of
        self._masters: list[Master] = []
        self._own: list[Tensor] = []
        self._has_looked = False  # for writes to the model's weights, since the last step
        self._take_over(optimizer, wholes)

    def look(self) -> tuple[list[Master], list[Tensor]]:
        """The masters, and the parameters that have none. Weights that are new to the optimizer are given masters."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        ids = tuple(id(param) for group in groups for param in group["params"])
        if ids != self._ids:
            kept = self._masters  # also those whose weights are gone
            self._masters, self._own = [], []
            for group in groups:
                group["params"][:] = [self._look_at(param, None) for param in group["params"]]
            del kept
            self._ids = tuple(id(param) for group in groups for param in group["params"])
        return self._masters, self._own

    def held(self) -> list[Tensor]:
        """All that it steps, masters among them."""
        masters, own = self.look()
        return [*(master.weight for master in masters), *own]

    def of_model(self) -> list[Tensor]:
        """The model's weights that it steps, or steps masters of."""
        masters, own = self.look()
        return [*(master.param for master in masters), *own]

    def find_writes(self) -> list[Tensor]:
        """Whether somebody has written to the model's weights since the last step, in numbers. (1,)"""
        self._has_looked = True
        return find_writes([master for master in self.look()[0] if not master.is_lent])

    def follow_writes(self) -> None:
        """Let masters be what has been written to the model's weights."""
        for master in self.look()[0]:
            master.take_over(looks=True)

    def lend(self) -> None:
        """Expect that masters are written to."""
        if not self._has_looked:
            self.follow_writes()
        for master in self.look()[0]:
            master.is_lent = True

    def note_step(self) -> None:
        """A step is done, and the model's weights are the masters, rounded."""
        self._has_looked = False
        for master in self.look()[0]:
            master.note_step()

    def _look_at(self, param: Tensor, whole: Tensor | None) -> Tensor:
        """What the optimizer is to hold for ``param``."""
        master = master_with(param)
        if master is None and self._uses_masters and param.dtype in HALF:
            master = adopt(param, whole)
        if master is None:
            self._own.append(param)
            return param
        self._masters.append(master)
        master.holders.add(self)
        return master.weight

    def _take_over(self, optimizer: Any, wholes: Mapping[int, Tensor]) -> None:
        """Let the optimizer step masters, and its state be of their dtype."""
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                held = group["params"][index] = self._look_at(param, wholes.get(id(param)))
                if held is not param:
                    param.grad = None  # from before there was amp
                    if param in optimizer.state:
                        optimizer.state[held] = optimizer.state.pop(param)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())
