"""Master weights: float32 copies of weights that a model holds in fewer bits, which the optimizers step instead.

A weight has one master, however many optimizers it is in. The model's weight is always its master, rounded: what writes
to the weight in place, such as clamping or loading, is taken over, element by element, so that elements that were not
written keep their bits. A step finds such writes by torch's count of them. ``scale_loss`` and checkpoints look for
those that torch does not count, such as writes through ``.data``. Where masters have been handed out since the last
step, or torch has counted a write to them, somebody may have written to them instead: then what looking finds is left
to them.

The invariant: whenever a master is handed out, the model's weight equals it, rounded.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.amp.convert import HALF
from paceline.errors import AmpError

_CHUNK_BYTES = 8 << 20


class Master:
    """A weight and its master.

    Attributes:
        param: the model's weight.
        weight: float32; what optimizers hold.
        is_lent: whether it has been handed out since the last step.
        is_spent: whether a step has used its gradient, which waits for other optimizers that hold it.
        holders: the holdings of the optimizers that have it.
    """

    def __init__(self, param: Tensor, whole: Tensor | None = None) -> None:
        self._param = weakref.ref(param)
        self.weight = Parameter(param.detach().float() if whole is None else whole)
        self._version, self._own_version = param._version, self.weight._version
        self.is_lent = self.is_spent = False
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def param(self) -> Tensor:
        param = self._param()
        if param is None:
            raise AmpError(
                "a weight of which this optimizer steps a master is gone: the model was deleted, or has "
                "got another parameter in its place. Build a new optimizer, and call amp.initialize with it."
            )
        return param

    @torch.no_grad()
    def take_over(self, *, looks: bool = False) -> None:
        """Follow what was written to the model's weight since.

        Args:
            looks: also for what torch has not counted, such as writes through ``.data``, by comparing all elements.
        """
        param = self.param
        may_be_written_itself = self.is_lent or self.weight._version != self._own_version
        if param._version != self._version or (looks and not may_be_written_itself):
            is_written = self.weight.to(param.dtype) != param
            self.weight.copy_(torch.where(is_written, param.to(self.weight.dtype), self.weight))
            self._version, self._own_version = param._version, self.weight._version

    def note_step(self) -> None:
        """A step is done, and what was written to the model's weight is the master, rounded."""
        self._version, self._own_version = self.param._version, self.weight._version
        self.is_lent = False
        if len(self.holders) > 1:
            self.is_spent = True
        else:
            self.weight.grad = None  # which model.zero_grad() would not find

    def drop_spent(self) -> None:
        """Forget the gradient of a step that is done."""
        if self.is_spent:
            self.weight.grad, self.is_spent = None, False


_masters = WeakTensorKeyDictionary()  # by the model's weight
_of_weights = WeakTensorKeyDictionary()  # weak references to the same, by the master's weight


def master_of(param: Tensor) -> Master | None:
    """The master of a model's weight, up to date; None where it has none."""
    master: Master | None = _masters.get(param)  # type: ignore[no-untyped-call]
    if master is not None:
        master.take_over(looks=True)
    return master


def master_with(weight: Tensor) -> Master | None:
    """The master whose float32 weight this is; None where it is none's."""
    reference: weakref.ref[Master] | None = _of_weights.get(weight)  # type: ignore[no-untyped-call]
    return None if reference is None else reference()


def adopt(param: Tensor, whole: Tensor | None = None) -> Master:
    """Give ``param`` a master, if it has none yet.

    Args:
        whole: its values in float32, if they are still there; else what ``param`` holds is taken.
    """
    master = master_of(param)
    if master is None:
        master = _masters[param] = Master(param, whole)
        _of_weights[master.weight] = weakref.ref(master)
    return master


@torch.no_grad()
def copy_to_model(masters: Sequence[Master]) -> None:
    """Round masters to the model's weights."""
    if masters:
        torch._foreach_copy_([master.param for master in masters], [master.weight for master in masters])


@torch.no_grad()
def find_writes(masters: Sequence[Master]) -> list[Tensor]:
    """Whether weights of the model differ from their masters, rounded.

    Returns:
        Numbers, on the weights' devices, which are 0 where none does. (1,)
    """
    found = []
    for chunk in _chunks(masters):
        params = [master.param for master in chunk]
        rounded = [torch.empty_like(param) for param in params]
        torch._foreach_copy_(rounded, [master.weight for master in chunk])
        torch._foreach_sub_(rounded, params)
        torch._foreach_abs_(rounded)
        found.append(torch.stack(torch._foreach_max(rounded)).amax().reshape(1))  # on CPUs faster than a norm of inf
    return found


def _chunks(masters: Sequence[Master]) -> Iterator[list[Master]]:
    """Those of one kind together, and no more of them than is little memory."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Master]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for master in masters:
        param = master.param
        kind = (param.device, param.dtype)
        if param.numel():
            kinds.setdefault(kind, []).append(master)
            sizes[kind] = sizes.get(kind, 0) + param.nbytes
            if sizes[kind] >= _CHUNK_BYTES:
                yield kinds.pop(kind)
                del sizes[kind]
    yield from kinds.values()


def keep_in_checkpoints(model: Module) -> None:
    """Let the model's ``state_dict`` hold float32, masters where there are any, and let loading one set masters."""
    for module in model.modules():
        if _save not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_save)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_load)  # type: ignore[no-untyped-call]


def _save(module: Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:  # noqa: ARG001
    for name, tensor in _named(module):
        key = prefix + name
        if tensor.dtype not in HALF or key not in state_dict:
            continue
        keeps_graph = state_dict[key] is tensor  # keep_vars
        master = master_of(tensor)
        whole = tensor.float() if master is None else master.weight
        state_dict[key] = whole if keeps_graph else whole.detach()


@torch.no_grad()
def _load(module: Module, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    for name, tensor in _named(module):
        master, loaded = master_of(tensor), state_dict.get(prefix + name)
        if master is not None and isinstance(loaded, Tensor) and loaded.shape == tensor.shape:
            master.weight.copy_(loaded)  # torch itself loads what is rounded


def _named(module: Module) -> Iterable[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
