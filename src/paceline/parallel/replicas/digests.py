"""A digest of what must be the same on all ranks."""

import hashlib

DIGEST_BYTES = 8
NO_DIGEST = bytes(DIGEST_BYTES)


def digest_of(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
