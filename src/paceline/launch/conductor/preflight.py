"""What keeps hosts from taking part, told before anything starts: all of them at once, a line each."""

from collections.abc import Mapping, Sequence

import paceline
from paceline.launch.conductor.ssh import NO_FOLDER, NO_INTERPRETER, SSH_FAILED
from paceline.launch.hosts.addresses import Addresses


def why_no_agent(exit_code: int, said: str, *, ssh: str, python: str, folder: str) -> str:
    """Why no agent has come up.

    Args:
        exit_code: of ssh, or of the agent's shell.
        said: what they have said.
        ssh: what connects to the host; empty where it is this machine, so that there was no ssh.
    """
    last = (said.splitlines() or ["nothing was said"])[-1].strip()
    if exit_code == NO_FOLDER:
        return f"there is no folder {folder}; make it, or name another with --workdir"
    if exit_code == NO_INTERPRETER:
        return f"there is no interpreter {python}; install it, or name another with --python"
    if exit_code == SSH_FAILED and ssh:
        return f"{last}; see whether `{ssh} true` works; PACELINE_SSH may hold options of ssh"
    return (
        f"{python} could not start paceline (exit code {exit_code}: {last}); install paceline {paceline.__version__} "
        "there, or name another interpreter with --python"
    )


def why_unlike(version: str) -> str:
    """Why a host with another version of paceline cannot take part."""
    return f"it has paceline {version}, but here is {paceline.__version__}; install the same on all hosts"


def why_lost(said: str) -> str:
    """That a host has gone, and what ssh, or its agent, said last."""
    last = said.splitlines()[-1:]
    return f"the connection was lost ({last[0].strip()})" if last else "the connection was lost"


def describe_absent(problems: Mapping[str, str], num_hosts: int) -> str:
    """All that is wrong.

    Args:
        problems: by host; hosts with the same one share a line.
    """
    alike: dict[str, list[str]] = {}
    for name, problem in problems.items():
        alike.setdefault(problem, []).append(name)
    lines = [f"{len(problems)} of {num_hosts} hosts cannot take part, so nothing was started:"]
    lines += [f"  {', '.join(names)}: {problem}" for problem, names in alike.items()]
    return "\n".join(lines)


def describe_unreached(
    names: Sequence[str], addresses: Sequence[Addresses], reached: Mapping[tuple[int, int], Sequence[str]]
) -> str:
    """Which addresses lead nowhere, where no choice of them has every host reach every other one.

    Args:
        names: of the hosts.
        addresses: that were tried of each.
        reached: by (host that tried, host that it tried): the addresses that answered.
    """
    lines = ["the hosts do not all reach each other, so nothing was started:"]
    for goal, name in enumerate(names):
        for address in addresses[goal]:
            absent = [
                other
                for by, other in enumerate(names)
                if by != goal and address.text not in reached.get((by, goal), ())
            ]
            by_whom = f"is not reached from {', '.join(absent)}" if absent else "is reached from all others"
            lines.append(f"  {name}: {address.text} ({address.interface}) {by_whom}")
    lines.append("open the hosts' ports to one another, or name an interface that leads there: GLOO_SOCKET_IFNAME=eth0")
    return "\n".join(lines)
