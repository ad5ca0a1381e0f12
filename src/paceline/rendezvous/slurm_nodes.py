"""Where Slurm's nodes are reached: a node's name need not be one that name servers know.

The invariant: Slurm is asked only about names that lead nowhere, and a node that it does not know keeps its name.
"""

import re
import socket
import subprocess

_ASKING_S = 10.0


def address_of_node(name: str) -> str:
    """``name`` if it leads somewhere; else the address at which Slurm's own daemons reach the node of that name."""
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror:
        return _address_in_slurm(name) or name
    return name


def _address_in_slurm(name: str) -> str | None:
    command = ["scontrol", "--oneliner", "show", "node", name]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASKING_S)
    except (OSError, subprocess.TimeoutExpired):  # such as in a container without Slurm's tools
        return None
    found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return found[1] if found and found[1] != "(null)" else None
