"""A store that the ranks of one job share, and what they tell one another through it.

The invariant: no wait outlives the rank that it waits for. A rank that leaves says so and, if it failed, why; one that
dies without a word is missed through its pid where it can be seen, or when the store that it served falls silent.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch.distributed as dist

from paceline import waits
from paceline.errors import PeerError, RendezvousError, WorldError
from paceline.rendezvous.peers import Peer, name_ranks

_PARTING_S = 10.0  # for the others to finish; one that hangs, or died on another host, will never say so
_LAST_WORDS_S = 1.0  # for the others to read why this rank failed, before it takes the store away
_LOOK_S = 0.1  # between two looks at who is missing


@dataclass
class Meeting:
    """The store that the ranks share, and who they are.

    Attributes:
        store: keys of this life only.
        host: who serves the store, in words.
        peers: by rank, once ``await_all`` has returned.
    """

    rank: int
    world_size: int
    store: dist.Store
    host: str = "rank 0"
    peers: list[Peer] = field(default_factory=list)
    _part_by: float = 0.0

    def join(self, me: Peer) -> None:
        """Tell the others that this rank is here."""
        self.announce("joined", me.to_json())

    def await_all(self, deadline: float) -> None:
        """Wait until all ranks have joined; ``peers`` is then complete.

        Raises:
            RendezvousError: not all joined before the deadline; the message names who did not.
            PeerError: a rank joined and died before all had come.
            WorldError: a rank was told of another world size.
        """
        missing: list[int] = []
        known: dict[int, Peer] = {}

        def look(still_missing: list[int]) -> None:
            missing[:] = still_missing
            self._check_refusal()
            for rank in range(self.world_size):
                if rank not in missing and rank not in known:
                    known[rank] = Peer.from_json(self.store.get(f"joined/{rank}"))
            for rank, peer in known.items():
                if not peer.is_alive():
                    raise PeerError(
                        f"rank {self.rank}: rank {rank} (pid {peer.pid}) ended before all ranks had joined; "
                        f"{name_ranks(missing or [rank])} had not. Its own output says why."
                    )

        def late(names: str) -> Exception:
            return RendezvousError(
                f"rank {self.rank}: {names} of {self.world_size} did not join before the deadline. Look at their "
                "output, and whether they were started at all."
            )

        everyone = range(self.world_size)
        try:
            self.await_ranks(everyone, "joined", deadline - time.monotonic(), late=late, look=look)
            with self._store_answers():
                self.peers = [Peer.from_json(text) for text in self.store.multi_get([f"joined/{r}" for r in everyone])]
        except PeerError as error:
            if not missing or not isinstance(error.__context__, dist.DistError):  # see _store_answers
                raise
            raise RendezvousError(
                f"rank {self.rank}: {self.host} gave up or ended while {name_ranks(missing)} of {self.world_size} had "
                "not joined. Look at their output, and whether they were started at all."
            ) from None

    def refuse(self, reason: str) -> WorldError:
        """The error of a rank that cannot join, which the ranks that wait for it will raise too."""
        with self._store_answers():
            self.store.set("refused", reason)
        return WorldError(reason)

    def announce(self, key: str, text: str = "") -> None:
        """Say that this rank has reached ``key``."""
        with self._store_answers():
            self.store.set(f"{key}/{self.rank}", text)

    def await_ranks(
        self,
        ranks: Collection[int],
        key: str,
        timeout_s: float,
        *,
        late: Callable[[str], Exception],
        look: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Wait until each of ``ranks`` has announced ``key``.

        Args:
            late: makes the exception for the deadline, from the names of the missing ranks.
            look: called with the missing ranks now and then; it raises where waiting is in vain.
        Raises:
            PeerError: one of them left or died, or the store is gone.
        """
        keys = [f"{key}/{rank}" for rank in ranks]
        start = now = time.monotonic()
        deadline, next_look, pause_s = now + timeout_s, now, 0.0002
        with self._store_answers():
            try:
                while not self.store.check(keys):
                    now = time.monotonic()
                    if now >= next_look:
                        missing = [rank for rank in ranks if not self.store.check([f"{key}/{rank}"])]
                        (look or (lambda ranks: self._check_there(ranks, key)))(missing)
                        if missing and now >= deadline:
                            raise late(name_ranks(missing))
                        self._tell_launcher(key, missing, now - start)
                        next_look = min(now + _LOOK_S, max(now, deadline))
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 0.02)
            finally:
                waits.forget()

    def _tell_launcher(self, key: str, missing: list[int], waited_s: float) -> None:
        if missing and waits.is_told(waited_s):
            what = "the first meeting" if key == "joined" else key.replace("/#", " number ")
            who = f"{name_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not come to it"
            waits.note(f"{what} of {self.world_size} ranks", who, waited_s)

    def read(self, key: str, rank: int) -> str:
        """What ``rank`` announced with ``key``."""
        with self._store_answers():
            return self.store.get(f"{key}/{rank}").decode()

    def read_all(self, key: str) -> list[str]:
        """What each rank announced with ``key``, once all have."""
        with self._store_answers():
            return [text.decode() for text in self.store.multi_get([f"{key}/{r}" for r in range(self.world_size)])]

    def forget(self, key: str) -> None:
        """Take back what this rank announced, once nobody will ask for it."""
        with self._store_answers():
            self.store.delete_key(f"{key}/{self.rank}")

    def part(self, *, wait: bool, last_words: str = "") -> None:
        """Leave; with ``wait``, once all others that live leave too, so that nobody's last message is cut off.

        Args:
            last_words: why, if this rank failed; ranks that wait for it will report them.
        """
        self._part_by = time.monotonic() + (_PARTING_S if wait else _LAST_WORDS_S if last_words else 0.0)
        with contextlib.suppress(dist.DistError):  # the store went with the rank that served it
            self.store.set(f"left/{self.rank}", last_words)
            if wait:
                self._await_departure("left")

    def dismiss(self) -> None:
        """After ``part``: give up the store. Rank 0, which may serve it, first waits until the others have done so."""
        with contextlib.suppress(dist.DistError):
            if self.rank == 0:
                self._await_departure("gone")
            else:
                self.store.set(f"gone/{self.rank}", "")

    def _await_departure(self, key: str) -> None:
        remaining = [rank for rank in range(self.world_size) if rank != self.rank]
        pause_s = 0.0005
        while True:
            remaining = [
                rank
                for rank in remaining
                if not self.store.check([f"{key}/{rank}"]) and (not self.peers or self.peers[rank].is_alive())
            ]
            if not remaining or time.monotonic() >= self._part_by:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)

    def find_gone(self, ranks: Iterable[int]) -> Iterator[tuple[int, str | None]]:
        """Those of ``ranks`` that have left or died, with what they said: nothing, if they left in peace.

        Yields:
            Each such rank and its last words; None where it died without any.
        """
        for rank in ranks:
            is_alive = not self.peers or self.peers[rank].is_alive()
            if self.store.check([f"left/{rank}"]):  # only now: it may have said so and died in between
                yield rank, self.store.get(f"left/{rank}").decode()
            elif not is_alive:
                yield rank, None

    def who_is_gone(self) -> str:
        """Of the other ranks, in words; empty where all are there."""
        with self._store_answers():
            for rank, last_words in self.find_gone(rank for rank in range(self.world_size) if rank != self.rank):
                how = "ended; its own output says why" if last_words is None else "has left the job"
                return f"{self._name(rank)} " + (f"failed:\n{last_words}" if last_words else how)
        return ""

    def _check_there(self, ranks: list[int], key: str) -> None:
        """Raise if one of ``ranks`` will never announce ``key``."""
        awaited = key.partition("/")[0]
        for rank, last_words in self.find_gone(ranks):
            if self.store.check([f"{key}/{rank}"]):  # asked again: it may have announced it before it went
                continue
            name = self._name(rank)
            if last_words:
                raise PeerError(f"rank {self.rank}: {name} failed before it reached {awaited}:\n{last_words}")
            if last_words is None:
                raise PeerError(f"rank {self.rank}: {name} ended without reaching {awaited}. Its own output says why.")
            raise PeerError(
                f"rank {self.rank}: {name} has left the job and will not reach {awaited}. All ranks must call it "
                "equally often before shutdown()."
            )

    def _name(self, rank: int) -> str:
        return f"rank {rank} (pid {self.peers[rank].pid})" if self.peers else f"rank {rank}"

    def _check_refusal(self) -> None:
        if self.store.check(["refused"]):
            raise WorldError(f"rank {self.rank} gives up: {self.store.get('refused').decode()}")

    @contextlib.contextmanager
    def _store_answers(self) -> Iterator[None]:
        """Turn the store's silence into an error that names who served it."""
        try:
            yield
        except dist.DistError:
            raise PeerError(
                f"rank {self.rank}: {self.host}, which serves the store, has ended. Its own output says why."
            ) from None
