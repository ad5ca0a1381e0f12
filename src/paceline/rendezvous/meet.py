"""How the ranks of a job meet.

Every job has one key-value store that all ranks reach. A launcher may serve it; else rank 0 does, at a given address
(``tcp://``, ``env://``) or at one that it writes into a given file (``file://``).

The invariant: two jobs, or two lives of one job, never meet by mistake. Rank 0 opens each life under a new number and
closes it once all have joined; each rank has one seat in it. Rank 0 takes its port by binding it.
"""

import contextlib
import functools
import json
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, unquote, urlparse

import torch.distributed as dist

from paceline.environment import Placement, meeting_point
from paceline.errors import RendezvousError, WorldError
from paceline.ports import spell_endpoint
from paceline.rendezvous.address_file import AddressFile
from paceline.rendezvous.meeting import Meeting
from paceline.rendezvous.peers import Peer
from paceline.rendezvous.slurm_nodes import address_of_node
from paceline.rendezvous.stores import connect, serve

_POLL_S = 0.01
_CONNECT_S = 5.0  # to an address from a file, which may be out of date


@dataclass(frozen=True)
class Method:
    """``init_method``, understood.

    Attributes:
        text: as it was given.
        address: of ``tcp://``.
        path: of ``file://``.
        given: ``rank`` and ``world_size``, where the method carries them.
    """

    text: str
    address: tuple[str, int] | None
    path: pathlib.Path | None
    given: dict[str, int]

    @property
    def is_env(self) -> bool:
        return self.address is None and self.path is None


def parse_method(text: str | None) -> Method:
    """Understand ``env://`` (also None), ``tcp://HOST:PORT`` or ``file:///PATH``, each with ``?rank=0&world_size=2``.

    Raises:
        WorldError: ``text`` is none of these.
    """
    text = text or "env://"
    url = urlparse(text)
    query = parse_qs(url.query)
    try:
        given: dict[str, int] = {name: int(query[name][0]) for name in ("rank", "world_size") if name in query}
    except ValueError:
        raise WorldError(f"init_method={text!r}: rank and world_size must be integers.") from None
    address, path = None, None
    if url.scheme == "tcp":
        try:
            address = (url.hostname or "", url.port or 0)
        except ValueError:
            address = ("", 0)
        if not all(address):
            raise WorldError(f"init_method={text!r}: expected tcp://HOST:PORT, such as tcp://127.0.0.1:29500.")
    elif url.scheme == "file":
        if url.netloc or not url.path.startswith("/") or url.path.endswith("/"):
            raise WorldError(f"init_method={text!r}: expected file:///absolute/path, with three slashes.")
        path = pathlib.Path(unquote(url.path))
    elif url.scheme != "env":
        raise WorldError(f"init_method={text!r}: expected env://, tcp://HOST:PORT or file:///PATH.")
    return Method(text, address, path, given)


def meet(placement: Placement, method: Method, timeout_s: float) -> Meeting:
    """Meet the other ranks and return once all are there.

    Args:
        placement: with ``rank`` and ``world_size`` settled.
        timeout_s: for the whole meeting.
    Raises:
        RendezvousError: not all came in time; the message names who did not.
        PeerError: a rank came, and died before all had.
        WorldError: the address or the file is taken, or the ranks were told of different world sizes.
    """
    deadline = time.monotonic() + timeout_s
    if placement.world_size == 1 and method.is_env:
        meeting, close = Meeting(0, 1, dist.HashStore()), _nothing
    elif method.path is not None:
        meeting, close = _meet_by_file(AddressFile(method.path), placement, deadline)
    else:
        meeting, close = _meet_at(method.address or meeting_point(placement), placement, deadline)
    try:
        meeting.join(Peer.myself(placement))
        meeting.await_all(deadline)
    finally:
        with contextlib.suppress(dist.DistError):  # a launcher's store, gone with the launcher
            close()  # nobody joins this life any more
    meeting.store.set_timeout(timedelta(seconds=timeout_s))
    return meeting


def _meet_at(address: tuple[str, int], placement: Placement, deadline: float) -> tuple[Meeting, Callable[[], None]]:
    is_hosted = placement.store_is_hosted and address == (placement.address, placement.port)
    host = "the launcher" if is_hosted else "rank 0"
    if placement.launcher == "slurm":
        address = address_of_node(address[0]), address[1]
    if placement.rank == 0 and not is_hosted:
        store: dist.Store = serve(address, deadline)
    else:
        store = connect(address, placement.rank, deadline)
    store = dist.PrefixStore(f"paceline/{placement.attempt}", store)
    if placement.rank == 0:
        return _open_life(store, placement, host)
    meeting = _join_life(store, placement, deadline, host)
    if meeting is None:
        raise RendezvousError(
            f"rank {placement.rank}: rank 0 did not come to {spell_endpoint(*address)} before the deadline. If it did, "
            f"its job was complete already: were two processes given RANK={placement.rank}?"
        )
    return meeting, _nothing


def _meet_by_file(file: AddressFile, placement: Placement, deadline: float) -> tuple[Meeting, Callable[[], None]]:
    file.check()
    if placement.rank == 0:
        while (holder := file.holder()) is not None:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank 0: {file.path} is in use by a job whose rank 0 is pid {holder.pid} and which is still "
                    "waiting for its ranks. Give each job its own file; were two processes given RANK=0?"
                )
            time.sleep(_POLL_S)
        store = serve(None, deadline)
        meeting, close = _open_life(dist.PrefixStore(f"paceline/{file.token}", store), placement, "rank 0")
        file.write(store.port)

        def end() -> None:
            file.remove()
            close()

        return meeting, end
    while time.monotonic() < deadline:
        token, addresses = file.find()
        for address in addresses:
            with contextlib.suppress(RendezvousError):  # out of date, or not reached from this host
                found = connect(address, placement.rank, min(deadline, time.monotonic() + _CONNECT_S))
                scoped = dist.PrefixStore(f"paceline/{token}", found)
                still_there = functools.partial(file.still_says, token)
                joined = _join_life(scoped, placement, deadline, "rank 0", while_=still_there)
                if joined is not None:
                    return joined, _nothing
        time.sleep(_POLL_S)
    raise RendezvousError(
        f"rank {placement.rank}: rank 0 did not write an address that answers to {file.path} before the deadline. If "
        f"rank 0 runs, its job was complete already: were two processes given RANK={placement.rank}?"
    )


def _open_life(store: dist.Store, placement: Placement, host: str) -> tuple[Meeting, Callable[[], None]]:
    life = store.add("lives", 1)
    meeting = Meeting(0, placement.world_size, dist.PrefixStore(f"life {life}", store), host)
    record = {"life": life, "size": placement.world_size, "opened_by": Peer.myself(placement).to_json()}
    store.set("open", json.dumps(record))
    return meeting, lambda: store.set("open", "")


def _join_life(
    store: dist.Store, placement: Placement, deadline: float, host: str, while_: Callable[[], bool] = lambda: True
) -> Meeting | None:
    """Take this rank's seat in a life that rank 0 has opened; None once ``while_`` is false or time is up."""
    taken = 0
    while while_() and time.monotonic() < deadline:
        try:
            text = store.get("open") if store.check(["open"]) else b""
            record = json.loads(text or "{}")
            # On a launcher's store the last life is still open if its rank 0 was killed before all had joined.
            if not record or record["life"] == taken or not Peer.from_json(record["opened_by"]).is_alive():
                time.sleep(_POLL_S)
                continue
            meeting = Meeting(
                placement.rank, placement.world_size, dist.PrefixStore(f"life {record['life']}", store), host
            )
            if record["size"] != placement.world_size:
                raise meeting.refuse(
                    f"rank {placement.rank} was told that the world has {placement.world_size} processes, but rank 0 "
                    f"was told {record['size']}. Give all of them the same WORLD_SIZE."
                )
            if meeting.store.add(f"seat/{placement.rank}", 1) == 1:
                return meeting
        except dist.DistError:
            return None  # rank 0 has ended
        taken = record["life"]  # by this rank's earlier life, which rank 0 has not closed yet; or by a double
    if taken:
        raise RendezvousError(
            f"rank {placement.rank} has joined this job already. Two processes were given the same RANK, or another "
            "job meets at this address: give each process its own RANK and each job its own MASTER_PORT."
        )
    return None


def _nothing() -> None:
    pass
