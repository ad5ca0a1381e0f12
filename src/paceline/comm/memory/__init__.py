"""The backend ``shm``: collectives among ranks of one host, through memory that they share.

``arena`` is that memory, and ``signals`` tell in it that something has happened. ``transport`` moves tensors through
it, as ``meetings`` and ``messages`` let it; ``averages`` works on tensors that lie there, in the ``heap``.

Nothing is imported here: what makes a group imports what it needs.
"""

__all__: list[str] = []
