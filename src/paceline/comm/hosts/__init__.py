"""The backend ``hier``: collectives among ranks of several hosts, each of which has a memory that its ranks share.

``transport`` keeps blocks of tensors going, each on its way as ``flows`` has it. A collective begins in ``meetings``;
what crosses the wire are frames, which ``wire`` names and ``post`` carries. ``across`` sums gradients between hosts.

Nothing is imported here: what makes a group imports what it needs.
"""

__all__: list[str] = []
