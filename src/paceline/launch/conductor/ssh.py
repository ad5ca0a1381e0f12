"""How an agent is started on a host: over the user's own ssh, or here where the host is this machine.

The remote shell may be any: it is only asked to start ``sh``, with quoted words that mean the same in all shells.
"""

import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence

from paceline.errors import LaunchError
from paceline.launch.conductor.hostfile import HostSpec

# What the agent's shell ends with where it cannot start it. ssh itself ends with 255.
NO_FOLDER, NO_INTERPRETER, SSH_FAILED = 91, 92, 255

# Ours come last, since ssh heeds the first of several: those in PACELINE_SSH win.
_OPTIONS = (
    "BatchMode=yes",  # several hosts cannot ask for passwords at once
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=2",
    "ControlMaster=no",  # a connection that others share would outlive the command; one that is there is used
)

# The current folder must not shadow what python and paceline import.
_BOOT = "import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; from paceline.cli import main; main(['agent'])"


# What single quotes do not protect in every login shell: fish reads backslashes in them, csh takes "!" for its history,
# and takes no line end.
_UNSAFE = re.compile(rb"['\\!]|[^ -~]")


def agent_script(python: Sequence[str], folder: str, environment: Mapping[str, str], program: Sequence[str]) -> str:
    """What starts an agent on its host: a script for ``sh``.

    Args:
        python: the interpreter and its flags.
        folder: where the script is to run.
        environment: variables that the interpreter itself needs; others are sent to the agent, since a command line can
            be read by everybody.
        program: the script and its arguments, for those who look for the processes of a script.
    """
    settings = [f"{name}={value}" for name, value in environment.items()]
    start = shlex.join([*(["env", *settings] if settings else []), *python, "-c", _BOOT, *program])
    return (
        f"cd {shlex.quote(_as_path(folder))} || exit {NO_FOLDER}; "
        f"command -v {shlex.quote(python[0])} > /dev/null || exit {NO_INTERPRETER}; "
        f"exec {start}"
    )


def ssh_command(host: HostSpec, script: str, environ: Mapping[str, str]) -> list[str]:
    """What has ``sh`` run ``script`` on ``host``.

    Args:
        environ: PACELINE_SSH there is ssh and options of the user's own, as a shell reads them.
    Raises:
        LaunchError: PACELINE_SSH cannot be read, or does not begin with a program.
    """
    options = [word for option in _OPTIONS for word in ("-o", option)]
    return [*own_ssh(environ), *options, "-T", host.target, spell_for_any_shell(script)]


def spell_for_any_shell(script: str) -> str:
    """A command line that has ``sh`` run ``script``, whatever shell reads it: sh, bash, zsh, fish, csh."""
    octal = _UNSAFE.sub(lambda found: b"\\0%03o" % found[0][0], os.fsencode(script)).decode("ascii")
    return f"""sh -c 'eval "$(printf %b "$1")"' sh '{octal}'"""


def own_ssh(environ: Mapping[str, str]) -> list[str]:
    """The user's own ssh.

    Raises:
        LaunchError: PACELINE_SSH cannot be read, or does not begin with a program.
    """
    text = environ.get("PACELINE_SSH", "")
    try:
        words = shlex.split(text) or ["ssh"]
    except ValueError as error:
        raise LaunchError(f"PACELINE_SSH={text!r} cannot be read as a shell reads it: {error}") from None
    if words[0].startswith("-"):
        raise LaunchError(f"PACELINE_SSH={text!r} begins with an option; expected a program first, as in 'ssh {text}'")
    return words


def is_this_machine(host: HostSpec, own_addresses: Sequence[str]) -> bool:
    """Whether ``host`` needs no ssh. Names are not looked up: an alias of the user's ssh config may hide behind one."""
    own_name = socket.gethostname()
    names = {"localhost", own_name, own_name.partition(".")[0], "127.0.0.1", "::1", *own_addresses}
    return host.user is None and host.name in names


def current_folder(environ: Mapping[str, str]) -> str:
    """This folder as the user came to it: on another host a link may lead elsewhere.

    Raises:
        LaunchError: it has been removed.
    """
    logical = environ.get("PWD", "")
    try:
        is_here = os.path.isabs(logical) and os.path.isdir(logical) and os.path.samefile(logical, ".")
        return logical if is_here else os.getcwd()
    except FileNotFoundError:
        raise LaunchError("this folder has been removed; change to another, or name one with --workdir") from None


def _as_path(folder: str) -> str:
    """``cd`` takes ``-`` and its like for something else."""
    return f"./{folder}" if folder.startswith("-") else folder
