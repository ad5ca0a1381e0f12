"""A launcher that a conductor has started on its host: what it hears and says, over one connection.

It meets the others through the conductor, which knows them all, so launchers need no port between hosts.

    it says                                          it hears
    meet (life, port of the ranks' store)            layout
    failed (what, exit status)                       peer failed
    finished                                         finished
    said (rank, stream, text), closed (rank, ...)    signal, hold, go on, window
    say (text, in colour or not), life (endings of its ranks)          lost (why), abandon, tick

The invariant: when the connection is lost, or nothing is heard for half a minute, the ranks here are ended.
"""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from paceline.launch.failures.ending import Ending
from paceline.launch.hosts.rendezvous import Launcher, Rendezvous
from paceline.launch.layout import LOOPBACK, Layout
from paceline.launch.loop import READ, Loop
from paceline.launch.output.display import Display
from paceline.launch.output.interleaving import Speakers
from paceline.launch.output.plumbing import Outlet
from paceline.launch.ports import claim_port
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.supervisor.audience import Supervisor
from paceline.launch.wire import Decoder, Message, encode

# The conductor is heard every few seconds, even if it has nothing to say.
TICK_S = 5.0
SILENCE_S = 30.0
_BACKLOG = 4096  # ranks may knock before the store answers; the kernel has a limit of its own


@dataclass
class Enveloped:
    """The ranks' pieces of one stream, each as a message: the conductor joins those of all hosts."""

    stream: str
    is_terminal: bool
    line_is_open: bool = False
    mark_width: int = 0  # the conductor has subtracted it

    def feed(self, rank: int, data: bytes) -> bytes:
        text = data.decode(errors="surrogateescape")
        return encode({"event": "said", "rank": rank, "stream": self.stream, "text": text}) if data else b""

    def holds_start(self, rank: int) -> bool:  # noqa: ARG002
        return False

    def release(self, rank: int) -> bytes:  # noqa: ARG002
        return b""

    def finish(self, rank: int) -> bytes:
        return encode({"event": "closed", "rank": rank, "stream": self.stream})

    def close_line(self) -> bytes:
        return b""


@dataclass(eq=False)
class RemoteOutlet(Outlet):
    """An output stream of the conductor's."""

    size: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def window(self) -> tuple[int, int, int, int]:
        rows, columns, width, height = self.size
        return rows, columns, width, height


class Conducted:
    """What this host's launcher has in place of a user and of a rendezvous.

    Args:
        orders, told: descriptors of what comes from the conductor, and of what goes there.
        decoder: has been fed what was read of the orders so far.
        streams: those of the conductor: which of "stdout" and "stderr" each is, and whether it is a terminal.
        window: that terminal's rows and columns, and the same in pixels.
        waiting: orders that have been read, and not obeyed.

    Attributes:
        is_abandoned: nobody hears any more what is told.
    """

    def __init__(
        self,
        orders: int,
        told: int,
        decoder: Decoder,
        streams: Sequence[Message],
        window: Sequence[int],
        waiting: Sequence[Message] = (),
    ) -> None:
        self._orders = orders
        self._told = told
        self._decoder = decoder
        self._streams = streams
        self._size = list(window)
        self._waiting = waiting
        self.is_abandoned = False
        self._outlets: list[Outlet] = []
        self._is_held = False
        self._heard_s = time.monotonic()

    # -- an audience ---------------------------------------------------------------------------------------------

    def open_outlets(self, speakers: Speakers, *, apart: bool) -> list[Outlet]:  # noqa: ARG002
        waiting = bytearray()  # one connection, so one order of all that is said
        for stream in self._streams:
            carried = Enveloped(stream["names"][0], stream["is_terminal"])
            outlet = RemoteOutlet(self._told, tuple(stream["names"]), carried, waiting=waiting, size=self._size)
            self._outlets.append(outlet)
        return self._outlets

    def meet(self, spec: LaunchSpec, run_id: str, launcher: Launcher) -> Rendezvous:  # noqa: ARG002
        self._rendezvous = _Rendezvous(self, spec, launcher)
        return self._rendezvous

    def attend(self, loop: Loop, display: Display, supervisor: Supervisor) -> None:
        self._loop, self._display, self._supervisor = loop, display, supervisor
        loop.watch(self._orders, READ, self._hear)
        loop.call_later(TICK_S, self._listen_for_silence)
        for order in self._waiting:
            self._obey(order)

    def say(self, text: str, *, in_color: bool = False) -> None:
        self.tell({"event": "say", "text": text, "in_color": in_color})

    def sum_up(self, text: str, *, in_color: bool = False) -> None:
        """The conductor does that itself, once."""

    def life_ended(self, layout: Layout, endings: Sequence[Ending], logs: str) -> None:
        self.tell({"event": "life", "life": layout.life, "endings": [asdict(each) for each in endings], "logs": logs})

    @property
    def has_keys(self) -> bool:
        return any(stream["is_terminal"] for stream in self._streams if "stderr" in stream["names"])

    def on_keys(self) -> None:
        """None are typed here."""

    # -- the connection ------------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """After all that was said before."""
        self._display.put(self._outlets[0], encode({**message, "now_s": time.monotonic()}))

    def rest(self) -> bytes:
        """What was told, and is not written."""
        return bytes(self._outlets[0].waiting) if self._outlets else b""

    def _hear(self) -> None:
        try:
            data = os.read(self._orders, 1 << 16)
        except OSError:
            data = b""
        if not data:
            self._abandon()
            return
        self._heard_s = time.monotonic()
        for order in self._decoder.feed(data):
            self._obey(order)

    def _obey(self, order: Message) -> None:
        what, supervisor = order["do"], self._supervisor
        if what == "layout":
            self._rendezvous.has_met(Layout(**order["layout"]))
        elif what == "peer failed":
            supervisor.on_peer_failed(order["failure"])
        elif what == "finished":
            supervisor.on_finished()
        elif what == "lost":
            supervisor.on_lost(order["why"])
        elif what == "signal":
            supervisor.on_signals(bytes([signal.Signals[order["name"]]]))
        elif what == "window":
            self._size[:] = order["window"]
            supervisor.on_window()
        elif what == "hold":
            self._is_held = True
            supervisor.hold()
        elif what == "go on":
            self._is_held = False
            supervisor.go_on()
        elif what == "abandon":
            self._abandon()

    def _listen_for_silence(self) -> None:
        if self._is_held:
            self._heard_s = time.monotonic()
        if time.monotonic() - self._heard_s > SILENCE_S:
            self._abandon()
        elif not self.is_abandoned:
            self._loop.call_later(TICK_S, self._listen_for_silence)

    def _abandon(self) -> None:
        self.is_abandoned = True
        self._loop.unwatch(self._orders)
        if self._is_held:
            self._supervisor.go_on()
        self._supervisor.on_abandoned()


class _Rendezvous:
    """The conductor, which knows where all ranks are."""

    def __init__(self, conducted: Conducted, spec: LaunchSpec, launcher: Launcher) -> None:
        self._conducted = conducted
        self._spec = spec
        self._launcher = launcher
        self._listener: socket.socket | None = None

    def open(self, meet_apart: Callable[[], socket.socket], loop: Loop) -> None:
        pass

    def meet(self, life: int) -> None:
        """The first host opens the port of the ranks' store."""
        if self._spec.nodes.node_rank == 0:
            address = self._spec.nodes.local_address or LOOPBACK
            is_hosted = self._spec.num_ranks > 1 or not self._spec.nodes.is_alone
            self._listener = claim_port(self._spec.master_port, backlog=_BACKLOG if is_hosted else 0, address=address)
        port = 0 if self._listener is None else self._listener.getsockname()[1]
        self._conducted.tell({"event": "meet", "life": life, "port": port})

    def has_met(self, layout: Layout) -> None:
        listener, self._listener = self._listener, None
        self._launcher.on_layout(layout, listener, [])

    def fail(self, failure: Message) -> None:
        self._conducted.tell({"event": "failed", "failure": failure})

    def finish(self) -> None:
        self._conducted.tell({"event": "finished"})

    def settle(self) -> None:
        """What is told is on its way before the launcher ends."""

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
