"""Where ranks are, in words: their stacks as faulthandler writes them, those that are equal told once.

Pure functions of what was seen. The invariant: who waits for others comes first, who does not, last: that is whom they
wait for.
"""

import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.launch.failures.words import LIBRARIES, name_ranks
from paceline.waits import Wait

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HEADING = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[.*\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

# What wraps a call without being one.
_WRAPPERS = {"wrapper", "inner", "decorate_context", "<lambda>", "<module>"}
# Where torch waits for other ranks, or in a future that one of ours may be behind; and what of it does not.
_TORCHS = ("torch/distributed/", "torch/futures/")
_NOT_COLLECTIVE = ("torch/distributed/checkpoint/", "torch/distributed/elastic/")
_BACKWARD = ("torch/autograd/",)
_OUR_WAITS = {"wait", "_wait_until", "await_ranks"}
_MOST_FRAMES = 30  # of a stack, as of one that recurs without end


@dataclass(frozen=True)
class Frame:
    """A call under way."""

    path: str
    line: int
    function: str

    @property
    def module(self) -> str:
        """The file's path where python finds it, as ``torch/futures/__init__.py``; empty where it is no library's."""
        if self.path.startswith("<"):
            return self.path
        if self.path.startswith(_OWN + os.sep):
            return os.path.relpath(self.path, os.path.dirname(_OWN))
        # The longest: a folder of packages may lie in that of the standard library.
        home = max((home for home in LIBRARIES if self.path.startswith(home + os.sep)), key=len, default=None)
        return os.path.relpath(self.path, home) if home else ""

    def is_in(self, folders: tuple[str, ...]) -> bool:
        """Whether it is a library's, below one of ``folders``, as ``torch/distributed/``."""
        return self.module.startswith(folders)


# The innermost call first.
Stack = tuple[Frame, ...]


@dataclass(frozen=True)
class Answer:
    """Where one rank is.

    Args:
        rank: among all.
        stack: of its main thread; empty where it could not be seen.
        threads: the stacks of others that run what the user has written.
        waits: what it tells that it waits for.
        silence: why there is no stack, as a sentence without its subject.
        stands_still: it has waited in one and the same call for as long as a hang takes.
    """

    rank: int
    stack: Stack = ()
    threads: tuple[Stack, ...] = ()
    waits: tuple[Wait, ...] = ()
    silence: str = ""
    stands_still: bool = False


def parse(dump: str, main_thread: int) -> tuple[Stack, tuple[Stack, ...]]:
    """The main thread's stack, and those of the user's others, from what faulthandler has written.

    Args:
        main_thread: its ``threading.get_ident()``.
    """
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in dump.splitlines():
        if heading := _HEADING.match(line):
            frames = threads[int(heading[1], 16)] = []
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    main = tuple(threads.pop(main_thread, ()))
    others = [tuple(frames) for frames in threads.values() if any(not frame.module for frame in frames)]
    return main, tuple(others)


def shorten(stack: Stack) -> Stack:
    """The user's calls, and the library's that the innermost of them has made; where there are none, all."""
    own = [n for n, frame in enumerate(stack) if not frame.module]
    if not own:
        return stack[:_MOST_FRAMES]
    made = next((frame for frame in reversed(stack[: own[0]]) if _is_named(frame)), stack[0])
    shown = [*([made] if own[0] else []), *(stack[n] for n in own)]
    return tuple(shown[:_MOST_FRAMES])


def collective_of(stack: Stack, source: Callable[[str, int], str]) -> str:
    """The call in which a main thread seems to wait for other ranks, for people; empty where it does not.

    Args:
        source: the text of a line of a file; empty where it is not known.
    """
    if not stack:
        return ""
    if not stack[0].module:  # a handle's wait is written in C, and has no frame
        return "wait()" if ".wait(" in source(stack[0].path, stack[0].line) else ""
    if stack[0].is_in(_NOT_COLLECTIVE):
        return ""
    if stack[0].is_in(_TORCHS):
        inside = list(itertools.takewhile(lambda frame: frame.is_in(_TORCHS), stack))
        return _dotted(next(filter(_is_named, inside), stack[0]))
    # Of ours, which have many layers, the outermost is the one that is known.
    ours = list(itertools.takewhile(lambda frame: frame.is_in(("paceline/",)), stack))
    return _dotted(ours[-1]) if any(frame.function in _OUR_WAITS for frame in ours) else ""


def is_in_backward(stack: Stack) -> bool:
    """Whether a main thread that stands still may wait for other ranks in a backward, whose hooks are in C++."""
    return bool(stack) and stack[0].is_in(_BACKWARD)


def describe_stacks(
    answers: Sequence[Answer], *, now_s: float, folder: str, source: Callable[[str, int], str]
) -> tuple[str, str]:
    """Where the ranks are: those that wait for others, or cannot be asked; then those that wait for nobody.

    Args:
        now_s: on the clock of ``Wait.since_s``.
        folder: to which paths of files are relative where they lie below it.
        source: see :func:`collective_of`.
    """
    groups: dict[tuple[str, Stack], list[Answer]] = {}
    for answer in answers:
        groups.setdefault((_doing(answer, source), shorten(answer.stack)), []).append(answer)
    waiting: list[str] = []
    others: list[str] = []
    for (doing, stack), alike in sorted(groups.items(), key=lambda group: -len(group[1])):
        since_s = min((wait.since_s for answer in alike for wait in answer.waits), default=now_s)
        lasting = f" for {now_s - since_s:.0f} s," if since_s < now_s else ""
        lines = [f"paceline: {name_ranks([answer.rank for answer in alike])}{lasting} {doing or 'in no collective'}"]
        lines += _lines(stack, folder)
        for thread, ranks in _threads_of(alike).items():
            lines += [f"  another thread of {name_ranks(ranks)}", *_lines(thread, folder, indent="    ")]
        (waiting if doing else others).append("\n".join(lines) + "\n")
    return "".join(waiting), "".join(others)


def _doing(answer: Answer, source: Callable[[str, int], str]) -> str:
    if answer.silence:
        return answer.silence
    if answer.waits:
        waits = sorted(answer.waits, key=lambda wait: wait.since_s)
        return "; and ".join(f"in {wait.what}: {wait.who}" for wait in waits)
    if collective := collective_of(answer.stack, source):
        return f"in {collective}"
    return "in a backward that stands still" if answer.stands_still and is_in_backward(answer.stack) else ""


def _threads_of(alike: Sequence[Answer]) -> dict[Stack, list[int]]:
    threads: dict[Stack, list[int]] = {}
    for answer in alike:
        for stack in answer.threads:
            ranks = threads.setdefault(shorten(stack), [])
            if answer.rank not in ranks:
                ranks.append(answer.rank)
    return threads


def _lines(stack: Stack, folder: str, *, indent: str = "  ") -> list[str]:
    return [f"{indent}{_place(frame, folder)}:{frame.line} in {frame.function}" for frame in stack]


def _place(frame: Frame, folder: str) -> str:
    is_below = not frame.module and frame.path.startswith(folder.rstrip(os.sep) + os.sep)
    return os.path.relpath(frame.path, folder) if is_below else frame.module or frame.path


def _is_named(frame: Frame) -> bool:
    return not frame.function.startswith("_") and frame.function not in _WRAPPERS


def _dotted(frame: Frame) -> str:
    """As the user knows it: ``torch.distributed.barrier``."""
    package = frame.module.removesuffix(".py").removesuffix("/__init__").split("/")
    return f"{'.'.join(package[:2])}.{frame.function}"
