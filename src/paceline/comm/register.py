"""Making the backends known to c10d, once paceline and torch are both there, in whichever order they were imported.

torch calls ``register`` itself when it is imported, through the entry point ``torch.backends`` of the installed
package; ``import paceline`` does where torch had been imported before.

The invariant: this costs no import of more than torch.distributed; what makes a group is imported when one is made.
"""

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Let ``torch.distributed`` know ``shm`` and its kin. Twice does no harm."""
    if not dist.is_available() or "shm" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("shm", _make_shm, extended_api=True, devices=["cpu"])
    dist.Backend.register_backend("hier", _make_hier, extended_api=True, devices=["cpu"])


def _make_shm(options: Any, _: object) -> dist.ProcessGroup:
    from paceline.comm.make import make_shm

    return make_shm(options)


def _make_hier(options: Any, _: object) -> dist.ProcessGroup:
    from paceline.comm.make import make_hier

    return make_hier(options)
