"""The command that runs a job on several hosts: one terminal for all of them.

    gather the hosts  ->  each launches its ranks, one life after another  ->  all have said how it ended  ->  verdict

On each host an agent holds an ordinary launcher, which has this command in place of a user. What ranks say is joined
here; what fails first anywhere is told everywhere; it is decided here, once, how all of it ended.

The invariant: nothing of the user's starts before all hosts can take part; and whatever becomes of this command, the
lines to the agents end with it, and thereby the agents and their ranks.
"""

import os
import secrets
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass

from paceline.errors import LaunchError
from paceline.launch.agent.conducted import TICK_S
from paceline.launch.audience import leave_line_of_keys, say
from paceline.launch.conductor.gathering import Gathering, Place
from paceline.launch.conductor.job import Job
from paceline.launch.conductor.line import Line
from paceline.launch.conductor.preflight import why_lost
from paceline.launch.conductor.tally import Tally
from paceline.launch.dispositions import ENDING, FORWARDED, OF_TERMINAL, signals_as_bytes
from paceline.launch.failure import describe_layout
from paceline.launch.hosts.layout import LOOPBACK, Layout, place_among
from paceline.launch.loop import READ, Loop
from paceline.launch.output.display import LAST_WORDS_S, Display
from paceline.launch.output.interleaving import Speakers
from paceline.launch.output.plumbing import open_outlets, open_standard_streams, why_unwritable
from paceline.launch.wire import Message

_PATIENCE_S = 5.0  # for hosts to answer, before it is said that they are waited for
_HURRY_S = 5.0  # for agents to end their ranks at once, before their lines are cut
_CLOSE_S = 5.0  # for agents to go, once all is said


def conduct(job: Job) -> int:
    """Run ``job`` to its end, from the main thread.

    Returns:
        The exit code: 0, that of the rank that failed first, or 128 plus the signal that ended the job.
    Raises:
        LaunchError: some host cannot take part, or was lost.
    """
    open_standard_streams()
    asked = [signal.Signals[name] for name in job.signals]
    with signals_as_bytes([*ENDING, *FORWARDED, *OF_TERMINAL, *asked]) as wake_fd:
        return _Conductor(job, wake_fd).run()


class _UnwantedError(Exception):
    """The user wants no more, before anything was started."""


@dataclass(frozen=True)
class _Cause:
    """Why a life cannot go on.

    Args:
        host: where it began.
        failure: what its launcher tells of its ranks.
        why: where the host itself has failed.
    """

    host: str
    failure: Message | None = None
    why: str = ""


class _Conductor:
    def __init__(self, job: Job, wake_fd: int) -> None:
        self._job = job
        self._run_id = job.options["rdzv_id"] or secrets.token_hex(8)
        self._loop = Loop()
        self._speakers = Speakers(num_ranks=1)
        self._outlets = open_outlets(self._speakers, apart=job.has_streams_apart)
        self._outlet_of = {name: outlet for outlet in self._outlets for name in outlet.streams}
        self._display = Display(
            self._loop, self._outlets, self._on_output_closed, lambda _: self._hold(), lambda _: self._resume()
        )
        self._gathering = Gathering(job, self._run_id, self._await_until)
        self._tally = Tally([host.name for host in job.hosts])
        self._lines: list[Line] = []
        self._places: list[Place] = []  # known as soon as the ranks may start
        self._met: dict[int, Message] = {}  # who is ready for the next life
        self._finished: set[int] = set()  # whose ranks have succeeded, in this life
        self._over: dict[int, Message] = {}  # whose launcher has ended
        self._cause: _Cause | None = None
        self._has_told_to_end = False
        self._num_restarts = 0
        self._ending_signal: signal.Signals | None = None
        self._had_failed = False  # ranks were being stopped already when it came
        self._output_closed = False
        self._is_hurried = False
        self._has_given_up = False
        self._loop.watch(wake_fd, READ, lambda: self._on_signals(os.read(wake_fd, 4096)))

    def run(self) -> int:
        try:
            self._connect()
            self._start(self._gathering.gather(self._lines))
            self._await_until(lambda: self._is_over)
            self._await_until(lambda: self._display.is_flushed or self._is_hurried)
            self._hang_up()
            status = self._conclude()
            self._display.flush(LAST_WORDS_S)
            return status
        except _UnwantedError:
            return self._conclude_early()
        finally:
            self._hang_up()
            for line in self._lines:
                line.end()
            self._loop.close()

    def _connect(self) -> None:
        for node, (host, command) in enumerate(zip(self._job.hosts, self._gathering.commands(), strict=True)):
            try:
                line = Line(host, node, command, self._loop, self._hear, self._on_stderr, self._on_end)
            except OSError as error:
                raise LaunchError(
                    f"{command[0]} cannot be started: {error.strerror}; install it, or name another in PACELINE_SSH"
                ) from None
            self._lines.append(line)
        self._loop.call_later(TICK_S, self._tick)
        self._loop.call_later(_PATIENCE_S, self._say_who_is_awaited)

    def _say_who_is_awaited(self) -> None:
        if awaited := self._gathering.awaited():
            self._say(f"paceline: waiting for {', '.join(awaited)} to answer\n")

    # -- lives ---------------------------------------------------------------------------------------------------

    def _start(self, places: list[Place]) -> None:
        """Have each host launch its ranks; they wait for their first life."""
        self._places = places
        self._speakers.num_ranks = sum(place.num_ranks for place in places)
        if len(places) > 1:
            self._speakers.hosts = [place.name for place in places for _ in place.ranks]
        streams = [{"names": list(outlet.streams), "is_terminal": outlet.is_terminal} for outlet in self._outlets]
        for line, place in zip(self._lines, places, strict=True):
            address = asdict(place.address) if place.address is not None else None
            line.tell({"do": "start", "address": address, "streams": streams, "window": self._window()})

    def _begin_life(self) -> None:
        """All hosts have come so far: tell each where its ranks are among all."""
        life = self._met[0]["life"]
        if life > 0:
            self._num_restarts = life
            self._say(self._describe(), in_color=True)
            self._say(f"paceline: all ranks start again (restart {life} of {self._job.max_restarts})\n")
        first = self._places[0].address
        layouts = [
            Layout(
                run_id=self._run_id,
                life=life,
                **place_among([each.num_ranks for each in self._places], [""] * len(self._places), node),
                address=LOOPBACK if first is None else first.text,
                port=self._met[0]["port"],
            )
            for node in range(len(self._places))
        ]
        if life == 0:
            self._say(describe_layout(layouts[0], [str(place) for place in self._places]))
        for line, layout in zip(self._lines, layouts, strict=True):
            line.tell({"do": "layout", "layout": asdict(layout)})
        self._met.clear()
        self._finished.clear()
        self._tally.clear()
        self._cause = None

    @property
    def _is_over(self) -> bool:
        return self._has_given_up or all(line.node_rank in self._over or not line.is_open for line in self._lines)

    # -- what hosts say ------------------------------------------------------------------------------------------

    def _hear(self, line: Line, message: Message) -> None:
        node, event = line.node_rank, message["event"]
        if "now_s" in message:
            self._tally.note_clock(node, message["now_s"])
        if event == "said":
            data = message["text"].encode(errors="surrogateescape")
            self._display.show(self._outlet_of[message["stream"]], message["rank"], data)
        elif event == "closed":
            self._display.finish(self._outlet_of[message["stream"]], message["rank"])
        elif event == "say":
            self._say(message["text"], in_color=message["in_color"])
        elif event == "meet":
            self._met[node] = message
            if len(self._met) == len(self._lines):
                self._begin_life()
        elif event == "failed":
            self._on_failed(line, message["failure"])
        elif event == "life":
            self._tally.add(node, message["endings"], message["logs"])
        elif event == "finished":
            self._finished.add(node)
            if len(self._finished) == len(self._lines):
                self._tell_all({"do": "finished"})
        elif event == "over":
            self._on_over(line, message)
        else:
            self._gathering.on_answer(line, message)

    def _on_failed(self, line: Line, failure: Message) -> None:
        """All other hosts hear of the first that says so, and end their ranks."""
        if self._cause is None:
            failure = {**failure, "host": line.host.name}
            self._cause = _Cause(line.host.name, failure)
            self._tell_all({"do": "peer failed", "failure": failure}, but=line)
        elif self._cause.failure is not None:
            line.tell({"do": "peer failed", "failure": self._cause.failure})

    def _on_over(self, line: Line, message: Message) -> None:
        self._over[line.node_rank] = message
        if "why" in message:
            self._cause = self._cause or _Cause(line.host.name, why=message["why"])
        if len(self._finished) < len(self._lines):
            self._tell_to_end(f"{line.host.name} has ended its ranks for good")

    def _on_end(self, line: Line) -> None:
        """The connection has ended: as it should once all is over, and not before."""
        if not self._places or line.node_rank in self._over:
            return
        self._cause = self._cause or _Cause(line.host.name, why=why_lost(line.said))
        for rank in self._places[line.node_rank].ranks:
            for outlet in self._outlets:
                self._display.finish(outlet, rank)
        self._tell_to_end(f"the connection to {line.host.name} was lost")

    def _on_stderr(self, line: Line, text: str) -> None:
        if self._places:
            self._say(f"[{line.host.name}]: {text}\n")

    # -- what they are told --------------------------------------------------------------------------------------

    def _tell_to_end(self, why: str) -> None:
        """One is missing for good, so there will be no further life."""
        if not self._has_told_to_end:
            self._has_told_to_end = True
            self._tell_all({"do": "lost", "why": why})

    def _tell_all(self, message: Message, but: Line | None = None) -> None:
        for line in self._lines:
            if line is not but and line.node_rank not in self._over:
                line.tell(message)

    def _tick(self) -> None:
        self._tell_all({"do": "tick"})
        self._loop.call_later(TICK_S, self._tick)

    # -- output and signals --------------------------------------------------------------------------------------

    def _hold(self) -> None:
        for line in self._lines:
            line.hold()

    def _resume(self) -> None:
        if not any(each.is_full for each in self._outlets):
            for line in self._lines:
                line.resume()

    def _on_output_closed(self) -> None:
        self._output_closed = True
        self._tell_all({"do": "abandon"})

    def _on_signals(self, signums: bytes) -> None:
        for signum in map(signal.Signals, signums):
            if signum in ENDING:
                self._on_ending_signal(signum)
            elif signum == signal.SIGTSTP:
                self._tell_all({"do": "hold"})
                os.kill(os.getpid(), signal.SIGSTOP)
                self._tell_all({"do": "go on"})
            elif signum == signal.SIGWINCH:
                self._tell_all({"do": "window", "window": self._window()})
            else:
                self._tell_all({"do": "signal", "name": signum.name})

    def _on_ending_signal(self, signum: signal.Signals) -> None:
        if signum in (signal.SIGINT, signal.SIGQUIT):
            leave_line_of_keys(self._outlets)
        is_stopping = self._ending_signal is not None or self._cause is not None
        if self._ending_signal is None:
            self._had_failed = is_stopping
        if self._ending_signal is None or signum == signal.SIGINT:
            self._tell_all({"do": "signal", "name": signum.name})
        if is_stopping and signum == signal.SIGINT and not self._is_hurried:  # the second Ctrl-C: no more patience
            self._is_hurried = True
            self._loop.call_later(_HURRY_S, self._give_up)
        self._ending_signal = self._ending_signal or signum

    def _give_up(self) -> None:
        self._has_given_up = True

    def _window(self) -> list[int]:
        return next((list(outlet.window()) for outlet in self._outlets if outlet.is_terminal), [0, 0, 0, 0])

    # -- the end -------------------------------------------------------------------------------------------------

    def _await_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self._places and (self._ending_signal is not None or self._output_closed):
                raise _UnwantedError
            self._loop.turn()

    def _hang_up(self) -> None:
        """Close the lines, and wait until the agents have gone."""
        for line in self._lines:
            line.close()
            if not line.has_greeted:
                line.end()
        is_late: list[bool] = []
        self._loop.call_later(0.0 if self._has_given_up else _CLOSE_S, lambda: is_late.append(True))
        while any(line.is_open for line in self._lines) and not is_late:
            self._loop.turn()

    def _conclude(self) -> int:
        """Say how it ended, and with what exit code."""
        if self._ending_signal is not None:
            gone = [line.host.name for line in self._lines if line.node_rank not in self._over]
            if gone:
                self._say(f"paceline: {', '.join(gone)} could not be heard any more; what runs there ends by itself\n")
            if self._had_failed:
                self._say(self._describe(), in_color=True)
            self._say(f"paceline: interrupted by {self._ending_signal.name}, all ranks have ended\n")
            status = 128 + self._ending_signal
        elif self._output_closed:
            if why := why_unwritable(self._outlets):
                raise LaunchError(why)
            status = 128 + signal.SIGPIPE
        elif self._cause is None:
            status = max(int(over["exit_status"]) for over in self._over.values())
        elif self._cause.failure is None:
            raise LaunchError(f"host {self._cause.host}: {self._cause.why}; the ranks of the other hosts were stopped")
        else:
            first = self._tally.first()
            status = self._cause.failure["exit_status"] if first is None else first.exit_status
            self._say(self._describe(), in_color=True)
        if self._job.report_path and not self._tally.is_empty:
            self._write_report(status)
        return status

    def _conclude_early(self) -> int:
        if self._ending_signal is None:
            return 128 + signal.SIGPIPE
        self._say(f"paceline: interrupted by {self._ending_signal.name}, nothing was started\n")
        return 128 + self._ending_signal

    def _describe(self) -> str:
        """How this life has failed, all hosts together; if no rank has failed by itself, what its host told."""
        told = self._tally.describe()
        if told is None and self._cause is not None and self._cause.failure is not None:
            told = f"paceline: on {self._cause.host}:\n{self._cause.failure['text']}"
        return told or ""

    def _write_report(self, status: int) -> None:
        try:
            with open(self._job.report_path, "w") as file:
                file.write(self._tally.as_json(status, self._num_restarts))
        except OSError as error:
            self._say(f"paceline: the report {self._job.report_path} cannot be written: {error.strerror}\n")

    def _say(self, text: str, *, in_color: bool = False) -> None:
        say(self._outlets, text, in_color=in_color)
