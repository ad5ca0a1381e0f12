"""The lines to all hosts of a job: what is told to every agent, and their end."""

from collections.abc import Callable, Iterator, Sequence

from paceline.errors import LaunchError
from paceline.launch.agent.conducted import TICK_S
from paceline.launch.conductor.hostfile import HostSpec
from paceline.launch.conductor.line import Line
from paceline.launch.loop import Loop
from paceline.launch.wire import Message

_CLOSE_S = 5.0  # for agents to go, once all is said


class Lines:
    """The lines to the hosts.

    Attributes:
        all: by number of host; none before ``connect``.
        over: what those have told last whose launcher has ended.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.all: list[Line] = []
        self.over: dict[int, Message] = {}

    def connect(
        self,
        hosts: Sequence[HostSpec],
        commands: Sequence[Sequence[str]],
        on_message: Callable[[Line, Message], None],
        on_stderr: Callable[[Line, str], None],
        on_end: Callable[[Line], None],
    ) -> None:
        """Start an agent on each host; from now on each hears something every few seconds.

        Raises:
            LaunchError: there is no ssh.
        """
        for node, (host, command) in enumerate(zip(hosts, commands, strict=True)):
            try:
                line = Line(host, node, command, self._loop, on_message, on_stderr, on_end)
            except OSError as error:
                raise LaunchError(
                    f"{command[0]} cannot be started: {error.strerror}; install it, or name another in PACELINE_SSH"
                ) from None
            self.all.append(line)
        self._loop.call_later(TICK_S, self._tick)

    def unheard(self) -> Iterator[Line]:
        """Those whose launcher has not said that it has ended."""
        return (line for line in self.all if line.node_rank not in self.over)

    def tell(self, message: Message, but: Line | None = None) -> None:
        """Have all know whose launcher has not ended, except one."""
        for line in self.unheard():
            if line is not but:
                line.tell(message)

    @property
    def are_over(self) -> bool:
        """Whether nothing more will be heard of any launcher."""
        return not any(line.is_open for line in self.unheard())

    def hold(self) -> None:
        """Listen to none, until ``resume``."""
        for line in self.all:
            line.hold()

    def resume(self) -> None:
        for line in self.all:
            line.resume()

    def hang_up(self, *, at_once: bool) -> None:
        """Close the lines, and wait until the agents have gone, unless there is no more patience."""
        for line in self.all:
            line.close()
            if not line.has_greeted:
                line.end()
        is_late: list[bool] = []
        self._loop.call_later(0.0 if at_once else _CLOSE_S, lambda: is_late.append(True))
        while any(line.is_open for line in self.all) and not is_late:
            self._loop.turn()

    def end(self) -> None:
        """Leave nothing of them."""
        for line in self.all:
            line.end()

    def _tick(self) -> None:
        self.tell({"do": "tick"})
        self._loop.call_later(TICK_S, self._tick)
