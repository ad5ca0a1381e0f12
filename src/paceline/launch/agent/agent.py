"""What a conductor starts on each host: says that it is there, checks and tries what it is asked, launches the ranks.

    it hears                                                it says
                                                            hello (paceline's version)
    prepare (script, options, variables, a secret)          prepared (ranks, addresses, port), or refused (why)
    probe (addresses of other hosts)                        probed (which answered)
    start (its address, the conductor's streams)            what agent/conducted.py says, then over (exit status)

Nothing of the user's runs before "start". When the connection is lost, or nothing is heard on it for half a minute, it
ends.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import paceline
from paceline.errors import LaunchError
from paceline.launch.agent.conducted import SILENCE_S, Conducted
from paceline.launch.agent.probing import Door, knock
from paceline.launch.hosts.addresses import Address, interface_variables, own_addresses, system_interfaces
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.supervisor.supervisor import launch
from paceline.launch.wire import Decoder, Message, encode, write_all

MakeSpec = Callable[[str, tuple[str, ...], Mapping[str, Any]], LaunchSpec]


def serve(make_spec: MakeSpec) -> int:
    """Obey the conductor at the other end of stdin and stdout.

    Args:
        make_spec: what a script, its arguments and the options of ``paceline run`` come to on this host.
    Returns:
        The exit code: 0, since how the ranks ended is told.
    """
    agent = _Agent(*_take_over_streams(), make_spec)
    with contextlib.suppress(BrokenPipeError):  # the conductor has gone
        agent.serve()
    return 0


class _Agent:
    def __init__(self, orders: int, told: int, make_spec: MakeSpec) -> None:
        self._orders = orders
        self._told = told
        self._make_spec = make_spec
        self._decoder = Decoder()
        self._spec: LaunchSpec | None = None
        self._door: Door | None = None
        self._is_held = False  # the conductor stands still, for no fault of the connection's

    def serve(self) -> None:
        self._tell({"event": "hello", "version": paceline.__version__})
        while data := self._hear():
            orders = iter(self._decoder.feed(data))
            for order in orders:
                if order["do"] == "prepare":
                    self._prepare(order)
                elif order["do"] == "probe":
                    self._tell({"event": "probed", "answers": knock(order["doors"])})
                elif order["do"] in ("hold", "go on"):
                    self._is_held = order["do"] == "hold"
                elif order["do"] == "start":
                    self._start(order, list(orders))
                    return

    def _hear(self) -> bytes:
        """What comes next; nothing where the connection has ended, or has been silent as no live one is."""
        patience_s = None if self._is_held else SILENCE_S
        ready, _, _ = select.select([self._orders], [], [], patience_s)
        return os.read(self._orders, 1 << 16) if ready else b""

    def _prepare(self, order: Message) -> None:
        os.environ.update(order["environment"])
        try:
            self._spec = self._make_spec(order["script"], tuple(order["args"]), order["options"])
            wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
            addresses = own_addresses(system_interfaces(), wanted) if not self._spec.nodes.is_alone else []
        except LaunchError as error:
            self._tell({"event": "refused", "why": str(error)})
            return
        self._door = Door(order["secret"])
        self._tell(
            {
                "event": "prepared",
                "num_ranks": self._spec.num_ranks,
                "addresses": [asdict(address) for address in addresses],
                "port": self._door.port,
            }
        )

    def _start(self, order: Message, waiting: list[Message]) -> None:
        assert self._spec is not None
        assert self._door is not None
        self._door.close()  # and with it its thread, before processes are started
        spec = self._spec
        if order["address"] is not None:
            address = Address(**order["address"])
            os.environ.update(interface_variables(address.interface, os.environ))
            spec = replace(spec, nodes=replace(spec.nodes, local_address=address.text))
        conducted = Conducted(self._orders, self._told, self._decoder, order["streams"], order["window"], waiting)
        os.set_blocking(self._told, False)
        try:
            over = {"event": "over", "exit_status": launch(spec, conducted)}
        except LaunchError as error:
            over = {"event": "over", "why": str(error)}
        if not conducted.is_abandoned:
            self._tell_last(conducted.rest() + encode(over))

    def _tell(self, message: Message) -> None:
        write_all(self._told, encode({**message, "now_s": time.monotonic()}))

    def _tell_last(self, data: bytes) -> None:
        """Without waiting for a conductor that has gone."""
        while data:
            heard, ready, _ = select.select([self._orders], [self._told], [])
            if ready:
                data = data[os.write(self._told, data[: select.PIPE_BUF]) :]
            elif heard and not os.read(self._orders, 1 << 16):
                return


def _take_over_streams() -> tuple[int, int]:
    """Descriptors of stdin and stdout; whatever else reads or prints here finds nothing, and prints on stderr."""
    orders, told = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return orders, told
