"""The file by which ranks find rank 0: its addresses, its port, and a token that tells one meeting from another.

The invariant: a file that paceline has not written is neither overwritten nor removed, and one that a dead run left
behind never leads anybody astray. The file appears whole, by renaming, and goes once all ranks have met.
"""

import json
import pathlib
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from paceline.environment import Placement
from paceline.errors import WorldError
from paceline.rendezvous.peers import Peer, host_identity


@dataclass
class AddressFile:
    """The file as one meeting sees it; ``token`` is that of this meeting where this is rank 0's."""

    path: pathlib.Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    def check(self) -> None:
        """Refuse to overwrite what paceline has not written.

        Raises:
            WorldError: the file holds something else, or cannot be used.
        """
        if not self.path.parent.is_dir():
            raise WorldError(f"init_method: {self.path.parent} is not a directory; create it, or name another file.")
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise WorldError(
                f"init_method: {self.path} cannot be read ({error.strerror}); name another file."
            ) from None
        if text.strip() and not _parse(text):
            raise WorldError(
                f"init_method: {self.path} exists and holds something else than an address. Name a file that does not "
                "exist; if an interrupted job of another library left this one, delete it."
            )

    def holder(self) -> Peer | None:
        """The process whose address the file holds, if it certainly runs."""
        record = self._record()
        peer = Peer(**record["peer"]) if record else None
        return peer if peer is not None and peer.is_visible() and peer.is_alive() else None

    def write(self, port: int) -> None:
        """Publish this process's addresses.

        Raises:
            WorldError: the directory cannot be written to.
        """
        me = Peer.myself(Placement())
        record = {"paceline": self.token, "peer": vars(me), "port": port, "addresses": sorted(_addresses())}
        draft = self.path.with_name(f".{self.path.name}.{self.token}")
        try:
            draft.write_text(json.dumps(record))
            draft.replace(self.path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise WorldError(f"init_method: {self.path} cannot be written ({error.strerror}).") from None

    def find(self) -> tuple[str, list[tuple[str, int]]]:
        """The token, and where rank 0 may answer; nothing while nothing, or a dead run's address, is written."""
        record = self._record()
        if not record or not Peer(**record["peer"]).is_alive():
            return "", []
        if record["peer"]["node"] == host_identity():
            return record["paceline"], [("127.0.0.1", record["port"])]
        mine = set(_addresses())  # such as a container bridge's, which every host has
        return record["paceline"], [(host, record["port"]) for host in record["addresses"] if host not in mine]

    def still_says(self, token: str) -> bool:
        return bool(self._record().get("paceline") == token)

    def remove(self) -> None:
        """Remove the file, if it is still this meeting's."""
        if self.still_says(self.token):
            self.path.unlink(missing_ok=True)

    def _record(self) -> dict[str, Any]:
        try:
            return _parse(self.path.read_bytes())
        except OSError:
            return {}


def _parse(text: bytes) -> dict[str, Any]:
    """The record, if it is one that ``write`` has written; else nothing."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and "paceline" in record else {}


def _addresses() -> Iterator[str]:
    """This host's addresses that another host might reach."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            is_local = entry.address.startswith(("127.", "fe80:")) or entry.address == "::1"
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not is_local:
                yield entry.address
