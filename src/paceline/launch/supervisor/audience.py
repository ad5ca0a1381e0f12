"""Whom a launcher tells what its ranks say and how they end, and by whom it meets other hosts.

For a command that was typed here it is the user, at this terminal. For a launcher that was started by a conductor it is
that: agent/conducted.py.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from paceline.launch.failures.ending import Ending
from paceline.launch.failures.words import in_red
from paceline.launch.hosts.rendezvous import Launcher, OneHost, Rendezvous, SeveralHosts
from paceline.launch.layout import Layout
from paceline.launch.loop import Loop
from paceline.launch.output.display import Display
from paceline.launch.output.interleaving import Speakers
from paceline.launch.output.plumbing import Outlet, open_outlets
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.wire import write_all


class Supervisor(Launcher, Protocol):
    """Who tells, and can be told."""

    def on_signals(self, signums: bytes) -> None:
        """Signals have come, one a byte."""

    def on_abandoned(self) -> None:
        """Nobody is left who would hear how it ends."""

    def hold(self) -> None:
        """The ranks are to stand still, until ``go_on``."""

    def go_on(self) -> None: ...

    def on_window(self) -> None:
        """The terminal has changed its size."""


class Audience(Protocol):
    """Who is told."""

    def open_outlets(self, speakers: Speakers, *, apart: bool) -> list[Outlet]:
        """Where the ranks' output goes; called once, first."""

    def meet(self, spec: LaunchSpec, run_id: str, launcher: Launcher) -> Rendezvous:
        """How other hosts are met; called once."""

    def attend(self, loop: Loop, display: Display, supervisor: Supervisor) -> None:
        """From now on the launcher listens; called once."""

    def say(self, text: str, *, in_color: bool = False) -> None:
        """Something of this host alone."""

    def sum_up(self, text: str, *, in_color: bool = False) -> None:
        """Something that all hosts' launchers would say alike."""

    def life_ended(self, layout: Layout, endings: Sequence[Ending], logs: str) -> None:
        """All ranks of a life have ended."""

    @property
    def has_keys(self) -> bool:
        """Whether what is said is read where Ctrl-C can be typed."""

    def on_keys(self) -> None:
        """Ctrl-C, or its like, was typed."""


class Terminal:
    """The user, who typed the command."""

    def open_outlets(self, speakers: Speakers, *, apart: bool) -> list[Outlet]:
        self._outlets = open_outlets(speakers, apart=apart)
        return self._outlets

    def meet(self, spec: LaunchSpec, run_id: str, launcher: Launcher) -> Rendezvous:
        self._speaks_for_all = not spec.nodes.shares_output or spec.nodes.node_rank == 0
        meet = OneHost if spec.nodes.is_alone else SeveralHosts
        return meet(spec, run_id, launcher)

    def attend(self, loop: Loop, display: Display, supervisor: Supervisor) -> None:
        pass

    def say(self, text: str, *, in_color: bool = False) -> None:
        say(self._outlets, text, in_color=in_color)

    def sum_up(self, text: str, *, in_color: bool = False) -> None:
        if self._speaks_for_all:
            self.say(text, in_color=in_color)

    def life_ended(self, layout: Layout, endings: Sequence[Ending], logs: str) -> None:
        pass

    @property
    def has_keys(self) -> bool:
        return said_to(self._outlets).is_terminal

    def on_keys(self) -> None:
        leave_line_of_keys(self._outlets)


def say(outlets: Sequence[Outlet], text: str, *, in_color: bool = False) -> None:
    """Print something of the launcher's own on stderr, below what ranks have said: where that waits, after it."""
    outlet = said_to(outlets)
    if in_color and outlet.is_terminal and not os.environ.get("NO_COLOR"):
        text = in_red(text)
    data = outlet.interleaver.close_line() + text.encode(errors="backslashreplace")
    if not outlet.is_empty:  # its reader stands still, perhaps, which must not hold the launcher up
        outlet.put(data)
        return
    with contextlib.suppress(OSError):  # nobody reads it
        write_all(outlet.fd, data)


def leave_line_of_keys(outlets: Sequence[Outlet]) -> None:
    """The terminal has written ^C where the cursor was."""
    if said_to(outlets).is_terminal:
        said_to(outlets).interleaver.line_is_open = True
        say(outlets, "")


def said_to(outlets: Sequence[Outlet]) -> Outlet:
    return next(outlet for outlet in outlets if "stderr" in outlet.streams)
