"""Names of parameters with and without what wrappers put into them: ``module.`` and torch.compile's ``_orig_mod.``.

The invariant: only names change, and only of tensors that the model has under another wrapping.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_OF_WRAPPERS = {"module", "_orig_mod"}


def plain(name: str) -> str:
    """The name without the components that wrappers add, wherever they are in it."""
    return ".".join(part for part in name.split(".") if part not in _OF_WRAPPERS)


def unwrapped(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A model's state under the names that it has without wrappers. A module of its own may be called as theirs are."""
    added = set(_added_by_wrappers(model))

    def short(name: str) -> str:
        parts = name.split(".")
        return ".".join(part for n, part in enumerate(parts) if ".".join(parts[: n + 1]) not in added)

    modules = {plain(name): short(name) for name in getattr(state, "_metadata", ())}
    return _with_metadata(state, {short(name): value for name, value in state.items()}, modules)


def _added_by_wrappers(model: nn.Module) -> Iterator[str]:
    """The names of modules that are within wrappers."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            yield f"{name}.module".lstrip(".")
        elif type(module).__name__ == "OptimizedModule":  # torch.compile's, whose import takes seconds
            yield f"{name}._orig_mod".lstrip(".")


def fitted(obj: Any, model: nn.Module) -> Any:
    """An object in which state dicts have the names that ``model`` has, itself wrapped or not.

    Args:
        obj: dicts, lists and tuples; dicts of tensors by name are state dicts, at any depth.
        model: its names count; where two of them differ by wrappers alone, they are left as they are.
    """
    names = _by_plain_name(model.state_dict(keep_vars=True))
    modules = _by_plain_name(name for name, _ in model.named_modules(remove_duplicate=False))
    return _fitted(obj, names, modules)


def _fitted(obj: Any, names: Mapping[str, str], modules: Mapping[str, str]) -> Any:
    if isinstance(obj, dict):
        changed = {_new_name(key, value, names): _fitted(value, names, modules) for key, value in obj.items()}
        if len(changed) < len(obj) or type(obj).__name__ not in ("dict", "OrderedDict"):
            return obj
        return _with_metadata(obj, changed, modules)
    if type(obj) in (list, tuple):
        return type(obj)(_fitted(value, names, modules) for value in obj)
    return obj


def _with_metadata(state: dict[str, Any], renamed: dict[str, Any], modules: Mapping[str, str]) -> dict[str, Any]:
    """``renamed`` as the kind of dict that ``state`` is, with the versions of modules that came with it."""
    found = type(state)(renamed)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        found._metadata = type(metadata)(  # type: ignore[attr-defined]
            {modules.get(plain(name), name): versions for name, versions in metadata.items()}
        )
    return found


def _new_name(key: Any, value: Any, names: Mapping[str, str]) -> Any:
    return names.get(plain(key), key) if isinstance(key, str) and isinstance(value, Tensor) else key


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    twice = set()
    for name in names:
        if plain(name) in found:
            twice.add(plain(name))
        found[plain(name)] = name
    return {short: name for short, name in found.items() if short not in twice}
