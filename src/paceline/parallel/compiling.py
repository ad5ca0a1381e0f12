"""What torch.compile is to do with our code: pass over it, and compile what it calls.

The invariant: saying so imports no compiler, which takes a second.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., object])


def not_compiled(fn: _F) -> _F:
    """As torch.compiler.disable(recursive=False), which would import the compiler now."""
    frames = torch._C._dynamo.eval_frame
    passed_over = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(fn.__code__, passed_over)
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return fn
