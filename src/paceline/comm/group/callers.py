"""Where in the user's code a collective was called."""

import os
import sys
from types import CodeType, FrameType

import torch

import paceline

_OURS = tuple(os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, paceline))
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = os.sep + "site-packages" + os.sep
_is_inside: dict[CodeType, bool] = {}  # whether it is torch's, ours, or the standard library's


def line_of_caller() -> str:
    """``file:line`` of the innermost frame that is neither torch's nor ours; empty in a thread that has none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = _is_inside.get(code)
        if inside is None:
            inside = _is_inside[code] = _is_inner(code.co_filename)
        if not inside:
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_inner(filename: str) -> bool:
    if filename.startswith(_OURS) or filename.startswith("<"):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and _INSTALLED not in filename
