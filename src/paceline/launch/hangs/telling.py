"""Saying where the ranks are: whenever the launcher is asked, and when a wait has lasted for too long."""

import linecache
import os
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from paceline.launch.failures.words import name_ranks
from paceline.launch.hangs.asking import Inquiry
from paceline.launch.hangs.stacks import Answer, describe_stacks
from paceline.launch.hangs.watching import Watch
from paceline.launch.lives.life import Life
from paceline.launch.loop import Loop
from paceline.launch.spec.launch import LaunchSpec


class Say(Protocol):
    """Prints a text, in red where that is wanted and the output is a terminal."""

    def __call__(self, text: str, *, in_color: bool = False) -> None: ...


class Whereabouts:
    """Of the ranks of one life."""

    def __init__(self, loop: Loop, life: Life, spec: LaunchSpec, say: Say) -> None:
        self._loop = loop
        self._life = life
        self._spec = spec
        self._say = say
        self._inquiry: Inquiry | None = None
        self._is_wanted = False
        self._watch: Watch | None = None
        if spec.hang_timeout_s:
            self._watch = Watch(loop, life, spec.hang_timeout_s, self._ask, lambda: self._inquiry is not None)

    def tell(self) -> None:
        """Ask the ranks where they are, and say it."""
        self._is_wanted = True
        if self._inquiry is None:
            if self._watch is not None:
                self._watch.refresh()
            self._ask(None)

    def _ask(self, among: Collection[int] | None) -> None:
        """Ask these local ranks, or all."""

        def hear(answers: list[Answer]) -> None:
            self._inquiry = None
            self._hear(answers, is_all=among is None)

        self._inquiry = Inquiry(self._loop, self._life, hear, among=among, is_command=self._spec.is_command)

    def _hear(self, answers: list[Answer], *, is_all: bool) -> None:
        hanging: Sequence[int] = ()
        if self._watch is not None:
            answers, hanging = self._watch.hear(answers, linecache.getline, is_all=is_all)
        if not hanging and not self._is_wanted:
            return
        if not is_all:
            self._ask(None)
            return
        self._is_wanted = False
        linecache.checkcache()
        waiting, others = describe_stacks(answers, now_s=time.monotonic(), folder=os.getcwd(), source=linecache.getline)
        if hanging:
            limit_s = self._spec.hang_timeout_s
            self._say(
                f"paceline: a wait of {name_ranks(hanging)} lasts for more than {limit_s:g} s. Where the ranks are:\n"
            )
        self._say(waiting or "" if answers else "paceline: no rank runs on this host\n")
        if others:
            self._say(others, in_color=bool(waiting))
