"""What a rank has called, as bytes for the others to compare with theirs.

The invariant: bytes that all must have in common come first and end with a zero, so they compare without parsing; what
follows is for people alone.
"""

import hashlib

from paceline.comm.transport import Call

_MOST_REMEMBERED = 512


class SpelledCalls(dict[Call, tuple[bytes, bytes]]):
    """By call: what all must have in common, and all of it, which begins with that and ends with a zero.

    A dictionary, since calls come again and each one costs time.

    Args:
        most_bytes: of all of it.
        alignment: of its end, which zeros fill up to that; ``most_bytes`` is a multiple of it.
    """

    def __init__(self, most_bytes: int, alignment: int = 1) -> None:
        super().__init__()
        self._most_bytes = most_bytes
        self._alignment = alignment

    def __missing__(self, call: Call) -> tuple[bytes, bytes]:
        if len(self) >= _MOST_REMEMBERED:
            self.clear()
        common = f"{call.kind}|{call.dtype}|{call.numel}|{call.detail}".encode()
        if len(common) > self._most_bytes // 2:  # it may list a size for each rank
            common = common[: self._most_bytes // 4] + hashlib.blake2b(common, digest_size=16).hexdigest().encode()
        common += b"\0"
        text = (common + str(call).encode())[: self._most_bytes - 1] + b"\0"
        spelled = self[call] = common, padded(text, self._alignment)
        return spelled


def padded(text: bytes, alignment: int) -> bytes:
    """``text`` and as many zeros as bring its end to a multiple of ``alignment``."""
    return text.ljust(-(-len(text) // alignment) * alignment, b"\0")


def called(spelled: bytes) -> str:
    """The call, for people, from all of it."""
    return spelled.split(b"\0")[1].decode(errors="replace")
