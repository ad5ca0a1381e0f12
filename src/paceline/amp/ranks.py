"""What amp must know of the other ranks: whose gradients are averaged, and who must agree on an overflow.

[Note: agreement] Ranks that train one model must skip the same steps and have the same scale.

- Where a DistributedDataParallel, torch's or paceline's, averages all gradients of a step, an infinity on one rank is
  one on all: the verdicts are equal, and nothing is sent.
- Where it averages some of them only, or where an ``apex.Reducer`` does, which may run after the check, the ranks of
  its process group take the largest of their verdicts: one number for each ``scale_loss``.
- Where neither is, ranks may be training different models, for different numbers of steps. Nothing is sent; a message
  that some never send would be a hang.

[Note: local gradients] Under ``no_sync`` gradients are not averages yet. They stay in the model, scaled, until a
backward that averages: a wrapper averages what it finds there, and would not see what had been moved to masters.

The invariant: whether a message is sent depends on what has been wrapped, in which order, and on which parameters are
trained, which is the same on all ranks; not on when a wrapper that is no longer used is collected, which is not.
"""

import gc
import itertools
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_module_registration_hook

from paceline.parallel.apex import Reducer, numbers_of_reducers, reducers
from paceline.parallel.replicas.broadcast import broadcast_tensors

_Wrapper = torch.nn.parallel.DistributedDataParallel
_wrappers: "weakref.WeakKeyDictionary[_Wrapper, int]" = weakref.WeakKeyDictionary()  # in the order of this number
_numbers = itertools.count()


def _see(parent: Module, name: str, child: Module) -> None:  # noqa: ARG001
    if isinstance(parent, _Wrapper):
        _wrappers[parent] = next(_numbers)


def find_earlier() -> None:
    """Know of each DistributedDataParallel that was made before this module was imported; later ones make themselves
    known."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # so that all ranks find the same ones
        found = [each for each in gc.get_objects() if issubclass(type(each), _Wrapper) and _is_made(each)]
        for wrapper in sorted(found, key=lambda each: [name for name, _ in each.named_parameters()]):
            _wrappers.setdefault(wrapper, next(_numbers))


register_module_module_registration_hook(_see)
find_earlier()


def wrappers_of(models: Iterable[Module]) -> list[_Wrapper]:
    """Those around the models or within them."""
    wanted = {id(param) for model in models for param in model.parameters()}
    return [each for each in sorted(_wrappers, key=_wrappers.__getitem__) if _is_made(each) and wanted & _ids(each)]


def _is_made(wrapper: _Wrapper) -> bool:
    """Whether its constructor has come to an end."""
    return hasattr(wrapper, "module") and hasattr(wrapper, "process_group")


class Company:
    """The wrappers and reducers over several ranks that average gradients of ``params``, and how far.

    Args:
        params: the model's weights.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        wanted = {id(param) for param in params}
        made = filter(_is_made, sorted(_wrappers, key=_wrappers.__getitem__))
        latest = {id(wrapper.module): wrapper for wrapper in made}
        self._wrappers = [each for each in latest.values() if _has_others(each) and wanted & _ids(each)]
        reduced = [each for each in reducers() if _has_others(each) and wanted & _ids(each)]
        covered: set[int] = set().union(*map(_ids, self._wrappers))
        self.members: list[_Wrapper | Reducer] = [*self._wrappers, *reduced]
        self._must_ask = bool(reduced) or (bool(self._wrappers) and not wanted <= covered)

    @staticmethod
    def key() -> tuple[int, ...]:
        """It changes when there are other wrappers."""
        return (*_wrappers.values(), -1, *numbers_of_reducers())

    @property
    def is_local(self) -> bool:
        """Whether gradients of the last backward are this rank's alone. [Note: local gradients]"""
        return any(not wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def agree(self, verdict: Tensor) -> Tensor:
        """The largest of the ranks' verdicts, where they may differ. [Note: agreement]

        Args:
            verdict: (1,)
        """
        if self._must_ask:
            for group in _groups_of(self.members):
                dist.all_reduce(verdict, dist.ReduceOp.MAX, group=group)
        return verdict


def share(masters: Sequence[Tensor], members: "Iterable[_Wrapper | Reducer]") -> None:
    """Copy the masters of the first rank to all, as ``members`` have done with the weights. A collective call.

    The weights are the first rank's masters, rounded, already. Nothing is written to them: a graph may need them.
    """
    for group in _groups_of(members):
        broadcast_tensors(masters, group)


def _groups_of(members: "Iterable[_Wrapper | Reducer]") -> list[dist.ProcessGroup]:
    """Each once."""
    return list(dict.fromkeys(_group_of(member) for member in members))


def _group_of(member: "_Wrapper | Reducer") -> dist.ProcessGroup:
    return member.process_group or dist.distributed_c10d._get_default_group()


def _has_others(member: "_Wrapper | Reducer") -> bool:
    return dist.is_initialized() and dist.get_world_size(_group_of(member)) > 1


def _ids(member: "_Wrapper | Reducer") -> set[int]:
    """The parameters that it averages gradients of."""
    ignored = getattr(member, "parameters_to_ignore", ())
    return {id(param) for name, param in member.module.named_parameters() if name not in ignored}
