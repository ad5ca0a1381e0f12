"""Older scripts take their local rank as an option, as ``torch.distributed.launch`` passed it; newer ones refuse it.

A script is given ``--local-rank`` in the spelling that it declares, and only if it declares it.
"""

import ast

_SPELLINGS = ("--local-rank", "--local_rank")
_DECLARING = ("add_argument", "add_option", "option")


def declared_spelling(script: str) -> str | None:
    """The option for the local rank that the source of ``script`` declares to argparse, optparse or click, if any."""
    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # not source; python will say so where it runs
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in _DECLARING:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and argument.value in _SPELLINGS:
                    return str(argument.value)
    return None


def local_rank_args(option: str | None, args: tuple[str, ...], local_rank: int) -> list[str]:
    """``args`` with the option in front, unless the user has given it."""
    if option is None or any(arg.partition("=")[0] in _SPELLINGS for arg in args):
        return list(args)
    return [f"{option}={local_rank}", *args]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
