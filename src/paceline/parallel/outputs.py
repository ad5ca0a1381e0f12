"""The tensors in whatever a model's forward returned."""

from collections.abc import Iterator, Mapping

import torch


def find_tensors(output: object) -> Iterator[torch.Tensor]:
    """Every tensor in ``output``: in lists, dicts, named tuples, dataclasses and plain objects, however nested."""
    pending, seen = [output], set[int]()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, (str, bytes, int, float, torch.nn.Module, type)) and id(item) not in seen:
            seen.add(id(item))
            pending.extend(_parts(item))


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    else:
        yield from getattr(item, "__dict__", {}).values()
        for kind in type(item).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(item, name, None)
