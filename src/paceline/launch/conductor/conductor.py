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
from dataclasses import asdict

from paceline.launch.conductor.gathering import Gathering, Place
from paceline.launch.conductor.job import Job
from paceline.launch.conductor.line import Line
from paceline.launch.conductor.lines import Lines
from paceline.launch.conductor.preflight import why_lost
from paceline.launch.conductor.tally import Tally
from paceline.launch.conductor.verdict import Cause, Course, Verdict
from paceline.launch.dispositions import ENDING, FORWARDED, OF_TERMINAL, signals_as_bytes
from paceline.launch.failures.words import describe_layout
from paceline.launch.layout import LOOPBACK, Layout, place_among
from paceline.launch.loop import READ, Loop
from paceline.launch.output.display import LAST_WORDS_S, Display
from paceline.launch.output.interleaving import Speakers
from paceline.launch.output.plumbing import open_outlets, open_standard_streams
from paceline.launch.supervisor.audience import leave_line_of_keys, say
from paceline.launch.wire import Message

_PATIENCE_S = 5.0  # for hosts to answer, before it is said that they are waited for
_HURRY_S = 5.0  # for agents to end their ranks at once, before their lines are cut


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


class _Conductor:
    def __init__(self, job: Job, wake_fd: int) -> None:
        self._job = job
        self._run_id = job.options["rdzv_id"] or secrets.token_hex(8)
        self._loop = Loop()
        self._speakers = Speakers(num_ranks=1)
        self._outlets = open_outlets(self._speakers, apart=job.has_streams_apart)
        self._outlet_of = {name: outlet for outlet in self._outlets for name in outlet.streams}
        self._lines = Lines(self._loop)
        self._display = Display(
            self._loop, self._outlets, self._on_output_closed, lambda _: self._lines.hold(), lambda _: self._resume()
        )
        self._gathering = Gathering(job, self._run_id, self._await_until)
        self._tally = Tally([host.name for host in job.hosts])
        self._course = Course()
        self._verdict = Verdict(self._course, self._lines, self._tally, self._say, job.report_path)
        self._places: list[Place] = []  # known as soon as the ranks may start
        self._met: dict[int, Message] = {}  # who is ready for the next life
        self._finished: set[int] = set()  # whose ranks have succeeded, in this life
        self._has_told_to_end = False
        self._loop.watch(wake_fd, READ, lambda: self._on_signals(os.read(wake_fd, 4096)))

    def run(self) -> int:
        try:
            commands = self._gathering.commands()
            self._lines.connect(self._job.hosts, commands, self._hear, self._on_stderr, self._on_end)
            self._loop.call_later(_PATIENCE_S, self._say_who_is_awaited)
            self._start(self._gathering.gather(self._lines.all))
            self._await_until(lambda: self._course.has_given_up or self._lines.are_over)
            self._await_until(lambda: self._display.is_flushed or self._course.is_hurried)
            self._hang_up()
            status = self._verdict.conclude(self._outlets)
            self._display.flush(LAST_WORDS_S)
            return status
        except _UnwantedError:
            return self._verdict.conclude_early()
        finally:
            self._hang_up()
            self._lines.end()
            self._loop.close()

    def _await_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self._places and not self._course.is_wanted:
                raise _UnwantedError
            self._loop.turn()

    def _hang_up(self) -> None:
        self._lines.hang_up(at_once=self._course.has_given_up)

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
        for line, place in zip(self._lines.all, places, strict=True):
            address = asdict(place.address) if place.address is not None else None
            line.tell({"do": "start", "address": address, "streams": streams, "window": self._window()})

    def _begin_life(self) -> None:
        """All hosts have come so far: tell each where its ranks are among all."""
        life = self._met[0]["life"]
        if life > 0:
            self._course.num_restarts = life
            self._say(self._verdict.describe_failure(), in_color=True)
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
        for line, layout in zip(self._lines.all, layouts, strict=True):
            line.tell({"do": "layout", "layout": asdict(layout)})
        self._met.clear()
        self._finished.clear()
        self._tally.clear()
        self._course.cause = None

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
            if len(self._met) == len(self._lines.all):
                self._begin_life()
        elif event == "failed":
            self._on_failed(line, message["failure"])
        elif event == "life":
            self._tally.add(node, message["endings"], message["logs"])
        elif event == "finished":
            self._finished.add(node)
            if len(self._finished) == len(self._lines.all):
                self._lines.tell({"do": "finished"})
        elif event == "over":
            self._on_over(line, message)
        else:
            self._gathering.on_answer(line, message)

    def _on_failed(self, line: Line, failure: Message) -> None:
        """All other hosts hear of the first that says so, and end their ranks."""
        if self._course.cause is None:
            failure = {**failure, "host": line.host.name}
            self._course.cause = Cause(line.host.name, failure)
            self._lines.tell({"do": "peer failed", "failure": failure}, but=line)
        elif self._course.cause.failure is not None:
            line.tell({"do": "peer failed", "failure": self._course.cause.failure})

    def _on_over(self, line: Line, message: Message) -> None:
        self._lines.over[line.node_rank] = message
        if "why" in message:
            self._course.cause = self._course.cause or Cause(line.host.name, why=message["why"])
        if len(self._finished) < len(self._lines.all):
            self._tell_to_end(f"{line.host.name} has ended its ranks for good")

    def _on_end(self, line: Line) -> None:
        """The connection has ended: as it should once all is over, and not before."""
        if not self._places or line.node_rank in self._lines.over:
            return
        self._course.cause = self._course.cause or Cause(line.host.name, why=why_lost(line.said))
        for rank in self._places[line.node_rank].ranks:
            for outlet in self._outlets:
                self._display.finish(outlet, rank)
        self._tell_to_end(f"the connection to {line.host.name} was lost")

    def _on_stderr(self, line: Line, text: str) -> None:
        if self._places:
            self._say(f"[{line.host.name}]: {text}\n")

    def _tell_to_end(self, why: str) -> None:
        """One is missing for good, so there will be no further life."""
        if not self._has_told_to_end:
            self._has_told_to_end = True
            self._lines.tell({"do": "lost", "why": why})

    # -- output and signals --------------------------------------------------------------------------------------

    def _say(self, text: str, *, in_color: bool = False) -> None:
        say(self._outlets, text, in_color=in_color)

    def _resume(self) -> None:
        if not any(each.is_full for each in self._outlets):
            self._lines.resume()

    def _on_output_closed(self) -> None:
        self._course.output_closed = True
        self._lines.tell({"do": "abandon"})

    def _on_signals(self, signums: bytes) -> None:
        for signum in map(signal.Signals, signums):
            if signum in ENDING:
                self._on_ending_signal(signum)
            elif signum == signal.SIGTSTP:
                self._lines.tell({"do": "hold"})
                os.kill(os.getpid(), signal.SIGSTOP)
                self._lines.tell({"do": "go on"})
            elif signum == signal.SIGWINCH:
                self._lines.tell({"do": "window", "window": self._window()})
            else:
                self._lines.tell({"do": "signal", "name": signum.name})

    def _on_ending_signal(self, signum: signal.Signals) -> None:
        course = self._course
        if signum in (signal.SIGINT, signal.SIGQUIT):
            leave_line_of_keys(self._outlets)
        is_stopping = course.ending_signal is not None or course.cause is not None
        if course.ending_signal is None:
            course.had_failed = is_stopping
        if course.ending_signal is None or signum == signal.SIGINT:
            self._lines.tell({"do": "signal", "name": signum.name})
        if is_stopping and signum == signal.SIGINT and not course.is_hurried:  # the second Ctrl-C: no more patience
            course.is_hurried = True
            self._loop.call_later(_HURRY_S, self._give_up)
        course.ending_signal = course.ending_signal or signum

    def _give_up(self) -> None:
        self._course.has_given_up = True

    def _window(self) -> list[int]:
        return next((list(outlet.window()) for outlet in self._outlets if outlet.is_terminal), [0, 0, 0, 0])
