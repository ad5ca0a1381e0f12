"""The opt levels: what O0, O1, O2 and O3 stand for, as one table.

The invariant: a level is a value. What a call to ``initialize`` changes of it is a new value, made in ``options``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Level:
    """The properties of a level, by Apex's names.

    Attributes:
        cast_model_type: the dtype of weights and inputs; None leaves both alone.
        patch_torch_functions: whether functions choose their dtype within the models' forward.
        keep_batchnorm_fp32: whether batch normalisation stays float32 in a model that is cast.
        master_weights: whether the optimizer steps float32 copies of weights that have fewer bits.
        loss_scale: the factor of the loss, or "dynamic".
    """

    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str


LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        # cast_model_type, patch_torch_functions, keep_batchnorm_fp32, master_weights, loss_scale
        "O0": Level(torch.float32, False, None, False, 1.0),
        "O1": Level(None, True, None, None, "dynamic"),
        "O2": Level(torch.float16, False, True, True, "dynamic"),
        "O3": Level(torch.float16, False, False, False, 1.0),
    }
)
