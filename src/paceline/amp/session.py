"""What a call to ``initialize`` has settled, until the next; and the names under which Apex's scripts find it.

The invariant: there is at most one session in force, and optimizers keep to the one that they came through.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import Module

from paceline.amp import functions
from paceline.amp.masters import master_with
from paceline.amp.options import DISABLED, Properties
from paceline.amp.scaler import LossScaler
from paceline.amp.wrapping import unwrap

logger = logging.getLogger("paceline.amp")


@dataclass
class Session:
    """One call's properties, scalers and models."""

    properties: Properties = DISABLED
    scalers: list[LossScaler] = field(default_factory=list)
    models: Sequence[Module] = ()
    verbosity: int = 1

    def names_of(self, params: Sequence[Tensor]) -> Iterator[str]:
        """What the models call these parameters, masters among them."""
        names: dict[int, str] = {}
        for index, model in enumerate(self.models):
            prefix = "" if len(self.models) == 1 else f"model {index}: "
            for name, param in model.named_parameters():
                names.setdefault(id(param), prefix + name)
        for held in params:
            master = master_with(held)
            yield names.get(id(held if master is None else master.param), f"a parameter of shape {tuple(held.shape)}")


class AmpState:
    """Apex's ``_amp_state``: what scripts look up there.

    Attributes:
        session: in force; None before the first ``initialize``.
        allow_incoming_model_not_fp32: let ``initialize`` take models that hold half-precision parameters.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.allow_incoming_model_not_fp32 = False

    @property
    def opt_properties(self) -> Properties:
        """What is in force."""
        return DISABLED if self.session is None else self.session.properties

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """One for each loss."""
        return [] if self.session is None else self.session.scalers

    @property
    def verbosity(self) -> int:
        """0 where nothing is to be logged."""
        return 1 if self.session is None else self.session.verbosity


state = AmpState()


def begin(session: Session) -> None:
    """Let ``session`` be the one in force."""
    functions.restore()
    state.session = session
    if session.properties.patch_torch_functions:
        functions.put_in_place()


def deactivate() -> None:
    """Turn amp off: the models' forwards, and functions registered by name, are again what they were.

    Weights that were cast stay cast, and optimizers keep their masters.
    """
    if state.session is not None:
        for model in state.session.models:
            unwrap(model)
    begin(Session())


def skipped_steps() -> int:
    """How many backwards, of all losses together, have come to gradients that are not finite."""
    return sum(scaler.num_skipped for scaler in state.loss_scalers)
