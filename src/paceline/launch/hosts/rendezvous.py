"""How a launcher learns, for each life, where its ranks are among all: at once on one host, from the others on several.

The invariant: to each ``meet`` there is one answer, ``on_layout`` or ``on_lost``; nothing here waits.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.launch.layout import Layout
from paceline.launch.loop import READ, Loop
from paceline.launch.ports import claim_port
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.wire import Message, Receiver, send

_SETTLE_S = 2.0  # for the other hosts to be told of a failure


class Launcher(Protocol):
    """Who is told."""

    def on_layout(self, layout: Layout, listener: socket.socket | None, hosts: Sequence[str]) -> None:
        """Where this host's ranks are. ``listener`` is the store's port where this host is to host it."""

    def on_peer_failed(self, failure: Message) -> None:
        """Another host's ranks have failed: its launcher's ``fail``."""

    def on_changed(self) -> None:
        """A host has come: all begin a new life, with it."""

    def on_finished(self) -> None:
        """The ranks of all hosts have succeeded."""

    def on_lost(self, why: str) -> None:
        """The other hosts are out of reach."""


class Rendezvous(Protocol):
    """Where that is learnt."""

    def open(self, meet_apart: Callable[[], socket.socket], loop: Loop) -> None:
        """All is ready; called once.

        Args:
            meet_apart: starts the process in which this host meets the others; what leads to it.
        """

    def meet(self, life: int) -> None:
        """Find out where this host's ranks are in ``life``."""

    def fail(self, failure: Message) -> None:
        """Tell the other launchers that ranks here have failed, and how."""

    def finish(self) -> None:
        """All ranks here have succeeded: wait for the others'."""

    def settle(self) -> None:
        """Before the launcher ends: wait until the others have been told."""

    def close(self) -> None: ...


class OneHost:
    """There are no others."""

    def __init__(self, spec: LaunchSpec, run_id: str, launcher: Launcher) -> None:
        self._spec = spec
        self._run_id = run_id
        self._launcher = launcher
        self._listener: socket.socket | None = self._claim_port()  # of the first life: a taken port is known at once

    def open(self, meet_apart: Callable[[], socket.socket], loop: Loop) -> None:
        pass

    def meet(self, life: int) -> None:
        listener, self._listener = self._listener, None
        listener = listener or self._claim_port()
        port = listener.getsockname()[1]
        self._launcher.on_layout(Layout.of_one_host(self._run_id, life, self._spec.num_ranks, port), listener, [])

    def fail(self, failure: Message) -> None:
        pass

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        self._launcher.on_finished()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _claim_port(self) -> socket.socket:
        is_hosted = self._spec.num_ranks > 1
        return claim_port(self._spec.master_port, backlog=max(128, self._spec.num_ranks) if is_hosted else 0)


class SeveralHosts:
    """Each with a launcher of its own. What is sent and heard here, the process in meet.py tells the others."""

    def __init__(self, spec: LaunchSpec, run_id: str, launcher: Launcher) -> None:
        self._spec = spec
        self._run_id = run_id
        self._launcher = launcher
        self._connection: socket.socket | None = None
        self._has_finished = False
        self._num_untold = 0  # failures that the others may not know yet

    def open(self, meet_apart: Callable[[], socket.socket], loop: Loop) -> None:
        self._loop = loop
        self._connection = meet_apart()
        self._receiver = Receiver(self._connection)
        loop.watch(self._connection.fileno(), READ, self._hear)

    def meet(self, life: int) -> None:
        self._send({"do": "meet", "life": life})

    def fail(self, failure: Message) -> None:
        """Tell the other launchers that ranks here have failed, and how."""
        self._num_untold += 1
        self._send({"do": "fail", "failure": failure})

    def settle(self) -> None:
        """Before the launcher ends: wait until the others have been told, which takes no longer than they are there."""
        deadline = time.monotonic() + _SETTLE_S
        while self._connection is not None and self._num_untold > 0:
            ready, _, _ = select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))
            received = self._receiver.receive() if ready else None
            if received is None:
                return
            self._num_untold -= sum(message["event"] == "told" for message, _ in received)

    def finish(self) -> None:
        """All ranks here have succeeded: wait for the others'."""
        self._send({"do": "finish"})

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _send(self, message: Message) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it died: seen when it is next listened to
                send(self._connection, message)

    def _hear(self) -> None:
        assert self._connection is not None
        received = self._receiver.receive()
        if received is None:
            self._loop.unwatch(self._connection.fileno())
            if not self._has_finished:
                self._launcher.on_lost("the process that met them has ended")
            return
        for message, fds in received:
            self._tell(message, fds)

    def _tell(self, message: Message, fds: list[int]) -> None:
        if message["event"] == "layout":
            listener = socket.socket(fileno=fds[0]) if fds else None
            hosts = [f"{host}: {count} ranks" for host, count in message["hosts"]]
            self._launcher.on_layout(Layout(**message["layout"]), listener, hosts)
        elif message["event"] == "peer failed":
            self._launcher.on_peer_failed(message["failure"])
        elif message["event"] == "changed":
            self._launcher.on_changed()
        elif message["event"] == "told":
            self._num_untold -= 1
        elif message["event"] == "finished":
            self._has_finished = True
            self._launcher.on_finished()
        else:
            self._launcher.on_lost(message["text"])
