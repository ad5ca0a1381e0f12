"""Process groups: shared memory within a host, messages between hosts, and what c10d asks of them.

Nothing is imported here: torch looks in, for ``register``, whenever it is imported.
"""

__all__: list[str] = []
