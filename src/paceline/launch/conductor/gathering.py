"""From names of hosts to hosts that can take part: connected, told what to run, at addresses that reach each other.

Each step asks all hosts at once. The invariant: what is wrong with any of them is told before anything starts, all
hosts of a step together.
"""

import itertools
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paceline
from paceline.errors import LaunchError
from paceline.launch.conductor.exports import of_interpreter
from paceline.launch.conductor.hostfile import HostSpec
from paceline.launch.conductor.job import Job
from paceline.launch.conductor.line import Line
from paceline.launch.conductor.preflight import describe_absent, describe_unreached, why_lost, why_no_agent, why_unlike
from paceline.launch.conductor.ssh import agent_script, is_this_machine, own_ssh, ssh_command
from paceline.launch.hosts.addresses import Address, candidates_of, choose_addresses, system_interfaces
from paceline.launch.wire import Message


@dataclass(frozen=True)
class Place:
    """One host of those that take part.

    Args:
        name: what it is called in what is printed.
        first_rank, num_ranks: its ranks.
        address: at which the others reach it; None where there are no others.
    """

    name: str
    first_rank: int
    num_ranks: int
    address: Address | None

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def __str__(self) -> str:
        where = "" if self.address is None else f" ({self.address.text}, {self.address.interface})"
        return f"{self.name}{where}: {self.num_ranks} rank{'' if self.num_ranks == 1 else 's'}"


class Gathering:
    """The hosts of ``job``, before anything starts.

    Args:
        run_id: tells this job from others.
        await_until: lets time pass until what it is given is true.
    """

    def __init__(self, job: Job, run_id: str, await_until: Callable[[Callable[[], bool]], None]) -> None:
        self._job = job
        self._run_id = run_id
        self._await_until = await_until
        self._lines: Sequence[Line] = ()
        self._answers: dict[int, Message] = {}  # to what was asked last, by node
        self._secrets = [secrets.token_hex(16) for _ in job.hosts]

    def commands(self) -> list[list[str]]:
        """What starts each host's agent."""
        job = self._job
        script = agent_script(job.python, job.folder, of_interpreter(job.environment), [job.script, *job.args])
        here = ["sh", "-c", script]
        return [here if is_here else ssh_command(host, script, os.environ) for host, is_here in self._hosts()]

    def gather(self, lines: Sequence[Line]) -> list[Place]:
        """All hosts, when each can take part.

        Raises:
            LaunchError: some cannot; the message names all of them.
        """
        self._lines = lines
        self._check_greetings()
        prepared = self._prepare()
        addresses = [[Address(**each) for each in answer["addresses"]] for answer in prepared]
        ports = [answer["port"] for answer in prepared]
        chosen = self._find_addresses(addresses, ports) if len(lines) > 1 else [None]
        counts = [answer["num_ranks"] for answer in prepared]
        firsts = itertools.accumulate(counts, initial=0)
        names = [line.host.name for line in lines]
        return [Place(*each) for each in zip(names, firsts, counts, chosen, strict=False)]

    def on_answer(self, line: Line, answer: Message) -> None:
        self._answers[line.node_rank] = answer

    def awaited(self) -> list[str]:
        """Those that have not answered yet, since they were asked to be there."""
        return [line.host.target for line in self._lines if line.is_open and not line.has_greeted]

    def _hosts(self) -> Sequence[tuple[HostSpec, bool]]:
        own = [address for addresses in system_interfaces().values() for address in addresses]
        return [(host, is_this_machine(host, own)) for host in self._job.hosts]

    def _check_greetings(self) -> None:
        """Each has an agent, of the same version."""
        self._await_answers()
        problems = {}
        for line, (host, is_here) in zip(self._lines, self._hosts(), strict=True):
            hello = self._answers.get(line.node_rank)
            if hello is None:
                ssh = "" if is_here else shlex.join([*own_ssh(os.environ), host.target])
                code, python, folder = line.exit_code or 0, self._job.python[0], self._job.folder
                problems[host.target] = why_no_agent(code, line.said, ssh=ssh, python=python, folder=folder)
            elif hello["version"] != paceline.__version__:
                problems[host.target] = why_unlike(hello["version"])
        self._refuse(problems)

    def _prepare(self) -> list[Message]:
        """Have each host read what it is to run; what they say of themselves."""
        for line in self._lines:
            options = self._job.options_of(line.node_rank, self._run_id)
            order = {"do": "prepare", "script": self._job.script, "args": list(self._job.args), "options": options}
            environment = dict(self._job.environment)
            line.tell({**order, "environment": environment, "secret": self._secrets[line.node_rank]})
        answers = self._ask_all()
        refusals = {
            line.host.target: answer["why"]
            for line, answer in zip(self._lines, answers, strict=True)
            if answer["event"] == "refused"
        }
        self._refuse(refusals)
        return answers

    def _find_addresses(self, addresses: Sequence[Sequence[Address]], ports: Sequence[int]) -> list[Address]:
        """An address of each host that all the others reach."""
        reached: dict[tuple[int, int], list[str]] = {}
        for attempt in itertools.count():
            tried = [candidates_of(each, attempt) for each in addresses]
            if not any(tried):
                break
            doors = {
                line.node_rank: [
                    (node, address.text)
                    for node, some in enumerate(tried)
                    for address in some
                    if node != line.node_rank
                ]
                for line in self._lines
            }
            for line in self._lines:
                asked = [(text, ports[node], self._secrets[node]) for node, text in doors[line.node_rank]]
                line.tell({"do": "probe", "doors": asked})
            for line, answer in zip(self._lines, self._ask_all(), strict=True):
                for (node, text), has_answered in zip(doors[line.node_rank], answer["answers"], strict=True):
                    if has_answered:
                        reached.setdefault((line.node_rank, node), []).append(text)
            chosen = choose_addresses(addresses, reached)
            if chosen is not None:
                return chosen
        raise LaunchError(describe_unreached([line.host.target for line in self._lines], addresses, reached))

    def _ask_all(self) -> list[Message]:
        """What each host answers to what it has just been told."""
        self._await_answers()
        lost = [line for line in self._lines if line.node_rank not in self._answers]
        self._refuse({line.host.target: why_lost(line.said) for line in lost})
        return [self._answers[line.node_rank] for line in self._lines]

    def _await_answers(self) -> None:
        self._answers = {}
        self._await_until(lambda: all(line.node_rank in self._answers or not line.is_open for line in self._lines))

    def _refuse(self, problems: dict[str, str]) -> None:
        if problems:
            raise LaunchError(describe_absent(problems, len(self._lines)))
