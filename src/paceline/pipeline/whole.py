"""All that the ranks of a pipeline train, as one state: the model's, and their optimizers'.

Each rank's optimizer knows its own parameters only, by number. In the state they go by the undivided model's names, so
it can be loaded however the model is cut then, or not cut at all.

The invariant: the state is the same on all ranks, and what each loads of it is what it would have saved.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import PipelineError

if TYPE_CHECKING:
    from paceline.pipeline.pipeline import Pipeline

Gather = Callable[[Any], list[Any]]  # what each lane gives, in the order of lanes


class Whole:
    """A pipeline and its ranks' optimizers: what a `Checkpointer` saves, and `paceline.save`.

    Args:
        pipeline: over ranks or devices.
        optimizer: this rank's.
        gather: as the pipeline's runner does it.
    """

    def __init__(self, pipeline: "Pipeline", optimizer: Optimizer | None, gather: Gather) -> None:
        self._pipeline = pipeline
        self._optimizer = optimizer
        self._gather = gather

    def state_dict(self) -> dict[str, Any]:
        """Of the undivided model, and of an optimizer of all its parameters. Over ranks, a collective call.

        Raises:
            PipelineError: the optimizer has a parameter that is not the pipeline's, or ranks have other groups.
        """
        state = {"model": self._pipeline.full_state_dict()}
        if self._optimizer is not None:
            state["optimizer"] = _optimizer_state(self._pipeline.named_parameters(), self._optimizer, self._gather)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what is this process's part.

        Raises:
            PipelineError: it has nothing of a parameter that the optimizer has.
            RuntimeError: as torch's, for what it lacks of the model.
        """
        self._pipeline.load_state_dict(state_dict["model"])
        if self._optimizer is not None:
            _load_optimizer_state(self._pipeline.named_parameters(), self._optimizer, state_dict["optimizer"])


def _optimizer_state(named: Iterable[tuple[str, Parameter]], optimizer: Optimizer, gather: Gather) -> dict[str, Any]:
    """Of all lanes' optimizers, on the CPU, by the names of parameters, of which ``named`` are this lane's."""
    names = _names_of(named, optimizer)
    given = optimizer.state_dict()
    own = {
        "state": {names[number]: _on_cpu(state) for number, state in given["state"].items()},
        "param_groups": [
            group | {"params": [names[number] for number in group["params"]]} for group in given["param_groups"]
        ],
    }
    lanes = gather(own)
    numbers = [len(lane["param_groups"]) for lane in lanes]
    if len(set(numbers)) > 1:
        raise PipelineError(
            f"the lanes' optimizers have {numbers} groups of parameters; expected equally many in each."
        )
    groups = [_merged(alike) for alike in zip(*(lane["param_groups"] for lane in lanes), strict=True)]
    return {"state": {name: state for lane in lanes for name, state in lane["state"].items()}, "param_groups": groups}


def _load_optimizer_state(
    named: Iterable[tuple[str, Parameter]], optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Load what is this lane's of what ``_optimizer_state`` returned."""
    names = _names_of(named, optimizer)
    own = optimizer.state_dict()
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    groups = []
    for group in own["param_groups"]:
        strangers = [names[number] for number in group["params"] if names[number] not in saved]
        if strangers:
            raise PipelineError(
                f"the optimizer's state has nothing of {strangers[0]!r}. Load what was saved of the same model, with "
                "the same parameters in the optimizer."
            )
        options = saved[names[group["params"][0]]] if group["params"] else group
        groups.append(options | {"params": group["params"]})
    own_state = {number: state["state"][name] for number, name in names.items() if name in state["state"]}
    optimizer.load_state_dict({"state": own_state, "param_groups": groups})


def _names_of(named: Iterable[tuple[str, Parameter]], optimizer: Optimizer) -> dict[int, str]:
    """By the numbers that ``Optimizer.state_dict`` uses."""
    name_of = {id(param): name for name, param in named}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if id(param) not in name_of:
            raise PipelineError(
                f"the optimizer has a parameter of shape {tuple(param.shape)} that is not the pipeline's. Make it of "
                "model.parameters(), after the model has been cut; save others by themselves."
            )
    return {number: name_of[id(param)] for number, param in enumerate(params)}


def _merged(groups: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One group of all lanes' parameters, a tied one once, with the first lane's options."""
    first, *others = groups
    names = dict.fromkeys([*first["params"], *(name for group in others for name in group["params"])])
    return first | {"params": list(names)}


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.detach().cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
