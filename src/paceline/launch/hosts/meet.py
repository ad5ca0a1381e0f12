"""The process in which this host meets the others: torch.distributed.elastic's rendezvous, and what hosts tell there.

It is forked from the fork server, which has torch, and has the threads that the fork server must not have. For each
life it finds out how many ranks each host has, and node 0 opens a port for the ranks' store, a new one each time: what
an earlier life has left in its store cannot mislead the next.

    LIFE/node/R   of node R: its ranks, address and name
    LIFE/port     of the ranks' store, on node 0
    LIFE/failed   what failed first, on some host
    LIFE/done/R   all ranks of node R have succeeded; then, LIFE/left/R: its launcher goes

The invariant: no wait here is without a deadline, or without a look at whether a host has failed or gone.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from datetime import timedelta
from typing import Any, NoReturn

from paceline.launch.layout import name_hosts, place_among
from paceline.launch.wire import Message, Receiver, send
from paceline.ports import spell_endpoint
from paceline.rendezvous.slurm_nodes import address_of_node

_LOOK_S = 0.2  # between two looks at the other hosts
_MEET_S = 30.0  # for the others to say how many ranks they have, once all are there
_LEAVE_S = 5.0  # for other launchers to go, before this one does
_USUAL_PORT = 29400  # torch's, of an endpoint that names none
_DONE_S = 300.0  # for ranks of other hosts to end, once those of this one have


def serve(connection: socket.socket, nodes: Message, num_ranks: int) -> NoReturn:
    """Obey the supervisor until it hangs up."""
    # Each life has a store of its own. torch's would be shared by all lives, and a host that comes later would wait for
    # an address that the first one has told in an earlier round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        if nodes["backend"] == "static":
            host, port = _parse(nodes["endpoint"])
            nodes = nodes | {"endpoint": spell_endpoint(address_of_node(host), port)}
        _Meeting(connection, nodes, num_ranks).serve()
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(connection, {"event": "failed", "text": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


class _Meeting:
    def __init__(self, connection: socket.socket, nodes: Message, num_ranks: int) -> None:
        self._connection = connection
        self._receiver = Receiver(connection)
        self._nodes = nodes
        self._num_ranks = num_ranks
        self._handler = _handler_of(nodes)
        self._store: Any = None
        self._life = 0
        self._rank = 0
        self._num_nodes = 0
        self._is_watching = False

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while True:
                if selector.select(_LOOK_S):
                    received = self._receiver.receive()
                    if received is None:
                        return
                    for order, _ in received:
                        self._obey(order)
                if self._is_watching:
                    self._look()

    def _obey(self, order: Message) -> None:
        if order["do"] == "meet":
            self._meet(order["life"])
        elif order["do"] == "fail":
            self._fail(order["failure"])
            send(self._connection, {"event": "told"})
        elif order["do"] == "finish":
            self._finish()

    def _meet(self, life: int) -> None:
        """Wait for the other hosts; tell the supervisor where its ranks are among all."""
        while (told := self._introduce(life)) is None:
            pass
        listener = None
        if self._rank == 0:
            listener = _listen(sum(each["num_ranks"] for each in told))
            self._store.set(f"{self._life}/port", str(listener.getsockname()[1]))
        counts, keys = [each["num_ranks"] for each in told], [each["host"] for each in told]
        layout = {
            "run_id": self._handler.get_run_id(),
            "life": told[0]["life"],  # a host that has just come has not counted
            **place_among(counts, keys, self._rank),
            "address": told[0]["address"],
            "port": int(self._store.get(f"{self._life}/port")),
        }
        hosts: dict[str, list[Any]] = {}  # what is said of each, and its ranks
        for each, host in zip(told, name_hosts(keys), strict=True):
            hosts.setdefault(host, [f"{each['name']} ({each['address']})", 0])[1] += each["num_ranks"]
        message = {"event": "layout", "layout": layout, "hosts": list(hosts.values())}
        send(self._connection, message, [listener.fileno()] if listener is not None else [])
        if listener is not None:
            listener.close()
        self._is_watching = True

    def _introduce(self, life: int) -> list[Message] | None:
        """Meet, and hear of each host; None where one has gone meanwhile, so that the others must meet again."""
        info = self._handler.next_rendezvous()
        self._store, self._rank, self._num_nodes = info.store, info.rank, info.world_size
        is_static = self._nodes["backend"] == "static"
        # A store of torch's is new in each life, but for a static one; there all hosts count lives alike.
        self._life = life if is_static else 0
        self._store.set_timeout(timedelta(seconds=_MEET_S))
        address = _address_of(self._nodes, self._rank)
        mine = {"num_ranks": self._num_ranks, "address": address, "life": life, "name": socket.gethostname()}
        mine["host"] = self._nodes["host"]
        self._store.set(f"{self._life}/node/{self._rank}", json.dumps(mine))
        keys = [f"{self._life}/node/{node}" for node in range(self._num_nodes)]
        deadline = time.monotonic() + _MEET_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                if is_static:
                    raise TimeoutError(f"not all of {self._num_nodes} hosts have said how many ranks they have")
                return None
            time.sleep(_LOOK_S / 4)
        return [json.loads(self._store.get(key)) for key in keys]

    def _look(self) -> None:
        """Has a host failed, or come?"""
        if self._store.check([f"{self._life}/failed"]):
            self._is_watching = False
            failure = json.loads(self._store.get(f"{self._life}/failed"))
            send(self._connection, {"event": "peer failed", "failure": failure})
        elif self._handler.num_nodes_waiting() > 0:
            self._is_watching = False
            send(self._connection, {"event": "changed"})

    def _fail(self, failure: Message) -> None:
        """Tell the others, unless one of them has failed first: then hear of that."""
        if self._is_watching:  # else this host knows already
            self._is_watching = False
            mine = json.dumps(failure)
            first = self._store.compare_set(f"{self._life}/failed", "", mine).decode()
            if first != mine:
                send(self._connection, {"event": "peer failed", "failure": json.loads(first)})

    def _finish(self) -> None:
        """All ranks of this host have succeeded: wait for the others'."""
        if not self._await_all("done", _DONE_S):
            self._look()
            return
        self._is_watching = False
        self._handler.shutdown()
        with contextlib.suppress(Exception):  # whoever hosts the store waits for those who still look into it
            self._await_all("left", _LEAVE_S)
            time.sleep(_LOOK_S)
        send(self._connection, {"event": "finished"})

    def _await_all(self, what: str, timeout_s: float) -> bool:
        """Say that this host has come so far, and wait for the others; false where one has failed instead."""
        self._store.set(f"{self._life}/{what}/{self._rank}", "")
        keys = [f"{self._life}/{what}/{node}" for node in range(self._num_nodes)]
        deadline = time.monotonic() + timeout_s
        while not self._store.check(keys) and time.monotonic() < deadline:
            if self._store.check([f"{self._life}/failed"]):
                return False
            time.sleep(_LOOK_S / 4)
        return True


def _handler_of(nodes: Message) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters, registry
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    configs = _parse_rendezvous_config(nodes["conf"])
    if nodes["backend"] == "static":
        configs["rank"] = nodes["node_rank"]

    def make(**more: str) -> Any:
        parameters = RendezvousParameters(
            backend=nodes["backend"],
            endpoint=nodes["endpoint"],
            run_id=nodes["run_id"],
            min_nodes=nodes["least"],
            max_nodes=nodes["most"],
            local_addr=nodes["local_address"] or None,
            **configs,
            **more,
        )
        return registry.get_rendezvous_handler(parameters)

    # torch knows an address for this host's only if the host's name leads to it, which few names do on private networks
    # and with IPv6; then nobody would host the store.
    if nodes["backend"] == "c10d" and "is_host" not in configs and _is_here(nodes["endpoint"]):
        with contextlib.suppress(RendezvousConnectionError):  # another launcher of this host does already
            return make(is_host="true")
        return make(is_host="false")
    return make()


def _parse(endpoint: str) -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    return parse_rendezvous_endpoint(endpoint, _USUAL_PORT)


def _resolve(endpoint: str) -> "list[tuple[socket.AddressFamily, Any]]":
    """Families and addresses of a HOST:PORT; for UDP, in which connecting sends nothing."""
    host, port = _parse(endpoint)
    with contextlib.suppress(socket.gaierror):  # those who need it will say so
        return [(found[0], found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)]
    return []


def _is_here(endpoint: str) -> bool:
    """Whether it is at an address of this host."""
    for family, address in _resolve(endpoint):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False


def _address_of(nodes: Message, node_rank: int) -> str:
    """How the other hosts reach this one: by the interface that leads to where all meet."""
    if nodes["local_address"]:
        return str(nodes["local_address"])
    if nodes["backend"] == "static" and node_rank == 0:
        return _parse(nodes["endpoint"])[0]
    for family, address in _resolve(nodes["endpoint"]):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # the kernel chooses the interface
            return str(probe.getsockname()[0])
    return socket.gethostname()


def _listen(num_ranks: int) -> socket.socket:
    """A port on all interfaces, of both families where this host has both; for a single rank it is only kept."""
    is_dual = socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if is_dual else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_dual:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.bind(("", 0))
    if num_ranks > 1:
        listener.listen(max(128, num_ranks))
    return listener
