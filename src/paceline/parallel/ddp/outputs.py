"""The tensors in whatever a model's forward returned."""

import types
from collections.abc import Iterable, Iterator, Mapping

import torch

# What holds no tensor, or none that forward made.
_LEAVES = (type(None), str, bytes, int, float, complex, type, torch.nn.Module, types.ModuleType, types.FunctionType)
_MOST_VISITED = 10_000


def find_tensors(output: object) -> Iterator[torch.Tensor]:
    """The tensors in ``output``: in lists, dicts, named tuples, dataclasses and plain objects, however nested.

    The search gives up after ten thousand objects, and passes over those that do not let themselves be looked into: a
    tensor that it misses costs a round more at most, and no forward should fail for it.
    """
    pending: list[object] = [output]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_VISITED:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, _LEAVES) and id(item) not in seen:
            seen.add(id(item))
            try:
                pending.extend(part for part in _parts(item) if not isinstance(part, _LEAVES))
            except Exception:  # of the user's own class
                continue


def _parts(item: object) -> Iterable[object]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    return [*getattr(item, "__dict__", {}).values(), *_slots(item)]


def _slots(item: object) -> Iterator[object]:
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            yield getattr(item, mangled, None)
