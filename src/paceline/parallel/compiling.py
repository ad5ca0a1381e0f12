"""What torch.compile is to do with our code: pass over it, and compile what it calls.

The invariant: saying so imports no compiler, which takes a second.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., object])


def not_compiled(fn: _F) -> _F:
    """As torch.compiler.disable(recursive=False), which would import the compiler now."""
    return _passed_over(fn, torch._C._dynamo.eval_frame._FrameAction.DEFAULT)


def not_compiled_within(fn: _F) -> _F:
    """As torch.compiler.disable: nothing that it calls is compiled either."""
    return _passed_over(fn, torch._C._dynamo.eval_frame._FrameAction.SKIP)


def _passed_over(fn: _F, action_within: Any) -> _F:
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, action_within))
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    return fn
