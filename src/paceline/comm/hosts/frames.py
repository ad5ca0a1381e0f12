"""What goes over a connection between two ranks, and in which bytes.

    hello (token, rank, channel) | frame | frame | ...        ->
                                                              <-  notice (why the other one takes part no more)

A frame is a head (key, bytes, extra) and as many bytes.

The invariant: whatever comes tells its length before its content, so a connection can be read without any guess.
"""

import struct

import torch
from torch import Tensor

TOKEN_BYTES = 32
HELLO = struct.Struct(f"!{TOKEN_BYTES}sii")
HEAD = struct.Struct("!qqq")
WORDS_BYTES = 8192  # of a notice, at most
_NOTICE = struct.Struct("!?i")


class Parcel:
    """A frame on its way: to be sent, or expected.

    Attributes:
        head: the bytes that go before ``memory``; of one that is expected there are none.
    """

    __slots__ = ("extra", "head", "is_done", "memory", "peer")

    def __init__(self, peer: int, memory: memoryview | None, head: bytes = b"") -> None:
        self.peer = peer
        self.memory = memory
        self.extra = 0
        self.is_done = False
        self.head = head


def pack_notice(has_failed: bool, words: str) -> bytes:
    text = words.encode()[-WORDS_BYTES:]
    return _NOTICE.pack(has_failed, len(text)) + text


def unpack_notice(data: bytes) -> tuple[bool, str] | None:
    """Whether a rank has failed, and its last words; None while not all of the notice has come."""
    if len(data) < _NOTICE.size:
        return None
    has_failed, length = _NOTICE.unpack_from(data)
    if len(data) < _NOTICE.size + length:
        return None
    return has_failed, data[_NOTICE.size : _NOTICE.size + length].decode(errors="replace").strip()


def memory_of(tensor: Tensor) -> memoryview | None:
    """The bytes of a flat tensor; None where it is empty."""
    return memoryview(tensor.view(torch.uint8).numpy()) if tensor.numel() else None  # type: ignore[arg-type]
