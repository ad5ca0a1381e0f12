"""Parameters and buffers that a part of a model holds beside the module that owns them.

torch.fx gives each part modules of its own for what the model itself reads, such as ``self.positions``. When the
model's is replaced, as ``model.double()`` replaces buffers, the part's must be, too.

The invariant: before each step a part reads what the model has under the same name.
"""

from typing import Any

import torch
from torch.nn import Module

_Place = tuple[dict[str, Any], str]


class Shadows:
    """What ``part`` holds in modules that are not ``root``'s own."""

    def __init__(self, part: Module, root: Module) -> None:
        owned = {id(module) for module in root.modules()}
        owners = {id(tables[name]): (tables, name) for tables, name in _places(root) if tables[name] is not None}
        self._pairs: list[tuple[_Place, _Place, Any]] = []
        for module in part.modules():
            if id(module) in owned:
                continue
            for tables, name in _own_places(module):
                if (owner := owners.get(id(tables[name]))) is not None:
                    self._pairs.append(((tables, name), owner, tables[name]))

    def renew(self, device: torch.device) -> None:
        """Take over what has been replaced since the last time."""
        for number, (shadow, owner, seen) in enumerate(self._pairs):
            now = owner[0][owner[1]]
            if now is not seen:
                shadow[0][shadow[1]] = now if now.device == device else now.to(device)
                self._pairs[number] = shadow, owner, now


def _places(root: Module) -> list[_Place]:
    return [place for module in root.modules() for place in _own_places(module)]


def _own_places(module: Module) -> list[_Place]:
    return [(tables, name) for tables in (module._parameters, module._buffers) for name in tables]
