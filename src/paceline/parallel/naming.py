"""Names in state dicts: those of a wrapper, and those of its module.

The invariant: a wrapper loads either, and never a mixture of both.
"""

from typing import Any


def accept_plain_names(state_dict: dict[str, Any], prefix: str) -> None:
    """Give a module's own state the names that it has in a wrapper; a wrapper's state is left as it is.

    Args:
        state_dict: changed in place.
        prefix: what the wrapper's names begin with in it.
    """
    own = [name for name in state_dict if name.startswith(prefix)]
    if not any(name.startswith(f"{prefix}module.") for name in own):
        for name in own:
            state_dict[f"{prefix}module.{name[len(prefix) :]}"] = state_dict.pop(name)
