"""The launcher's own process: forwards output and signals, stops the others when one rank fails, and says why.

One thread, one loop, one life of the ranks after another:

    meet the other hosts  ->  bear the ranks  ->  all have ended, all output is drained  ->  sweep  -+-> the verdict
            ^                                                                                        |
            +---------------------------------- a failure, and restarts are left --------------------+

It decides how a life ends exactly once, and always ends it the same way: all ranks ended, all output drained, nothing
of theirs left. The verdict is printed last.
"""

import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence

from paceline.launch.dispositions import ENDING, FORWARDED, OF_TERMINAL, signals_as_bytes
from paceline.launch.failures.ending import SETTLE_S, first_failure
from paceline.launch.failures.words import describe_layout, describe_meeting, explain_sigkill
from paceline.launch.hangs.telling import Whereabouts
from paceline.launch.layout import Layout
from paceline.launch.lives.birth import Nursery
from paceline.launch.lives.life import Life
from paceline.launch.loop import READ, Loop
from paceline.launch.output.display import LAST_WORDS_S
from paceline.launch.output.files import Logs
from paceline.launch.output.forwarding import Forwarder
from paceline.launch.output.interleaving import Speakers
from paceline.launch.output.plumbing import open_standard_streams, why_unwritable
from paceline.launch.server.client import ForkServer
from paceline.launch.spec.launch import LaunchSpec
from paceline.launch.supervisor.audience import Audience, Terminal
from paceline.launch.supervisor.claims import Claims
from paceline.launch.supervisor.course import Course
from paceline.launch.supervisor.current import Current
from paceline.launch.supervisor.signalled import Signalled
from paceline.launch.supervisor.stopping import Stopping
from paceline.launch.supervisor.verdict import Verdict
from paceline.launch.wire import Message

_PATIENCE_S = 3.0  # for other hosts to come, before it is said that they are waited for


def launch(spec: LaunchSpec, audience: Audience | None = None) -> int:
    """Run ``spec`` to its end, from the main thread.

    Args:
        audience: who is told; by default the user at this terminal.
    Returns:
        The exit code: 0, that of the rank that failed first, or 128 plus the signal that ended the launch.
    Raises:
        LaunchError: the ranks could not be started or held together.
    """
    open_standard_streams()
    asked = tuple(signal.Signals[name] for name in spec.signals)
    with signals_as_bytes([*ENDING, *FORWARDED, *OF_TERMINAL, *asked]) as wake_fd:
        return _Supervisor(spec, audience or Terminal(), wake_fd).run()


class _Supervisor:
    def __init__(self, spec: LaunchSpec, audience: Audience, wake_fd: int) -> None:
        self._spec = spec
        self._audience = audience
        self._run_id = spec.nodes.run_id or (secrets.token_hex(8) if spec.nodes.is_alone else "none")  # as torchrun's
        self._logs = Logs(spec.logs, self._run_id)
        self._speakers = Speakers(spec.num_ranks)
        self._loop = Loop()
        outlets = audience.open_outlets(self._speakers, apart=not spec.logs.is_plain)
        self._outlets = outlets
        self._forwarder = Forwarder(self._loop, outlets, self._on_output_closed, self._on_file_error)
        self._course = Course()
        self._verdict = Verdict(spec, audience, self._course, self._logs.directory)
        self._current: Current | None = None
        self._num_lives = 0
        self._num_restarts = 0
        self._is_server_gone = False
        self._port_of_rank: socket.socket | None = None  # kept for a single rank's own store
        self._succeeded: Life | None = None  # while other hosts' ranks are waited for
        self._rendezvous = audience.meet(spec, self._run_id, self)
        self._claims = Claims(self._loop, self._rendezvous, self._course, is_alone=spec.nodes.is_alone)
        self._signalled = Signalled(
            audience, self._course, self._rendezvous, self._forwarder, lambda: self._current, self._stop
        )
        self._server = ForkServer(spec)
        self._nursery = Nursery(spec, self._server, outlets, self._logs)
        self._loop.watch(wake_fd, READ, lambda: self.on_signals(os.read(wake_fd, 4096)))
        self._loop.watch(self._server.control.fileno(), READ, self._on_server)
        audience.attend(self._loop, self._forwarder.display, self)

    def run(self) -> int:
        try:
            while self._verdict.exit_code is None:
                self._loop.turn()
                if self._current is not None and self._is_over(self._current.life):
                    self._end_life(self._current.life)
            self._rendezvous.settle()
            self._forwarder.display.flush(LAST_WORDS_S)
            return self._verdict.exit_code
        except BaseException:
            self._server.kill()
            raise
        finally:
            self._server.end()
            self._rendezvous.close()
            if self._port_of_rank is not None:
                self._port_of_rank.close()
            self._loop.close()

    # -- lives ---------------------------------------------------------------------------------------------------

    def on_layout(self, layout: Layout, listener: socket.socket | None, hosts: Sequence[str]) -> None:
        """The hosts have met: bear all ranks, at a store of their own."""
        if self._port_of_rank is not None:
            self._port_of_rank.close()
        if listener is not None and layout.has_hosted_store:
            with listener:
                self._server.host_store(listener, layout.address, layout.port)
        else:
            self._port_of_rank = listener
        if hosts:
            own = None if self._spec.nodes.shares_output else layout.node_rank
            self._audience.sum_up(describe_layout(layout, hosts, own=own))
        self._num_lives = layout.life + 1
        self._speakers.num_ranks = layout.world_size
        self._course.peer_failure, self._course.is_changing = None, False
        life = Life(layout, self._loop, self._forwarder, self._stop_soon)
        self._current = Current(
            life,
            Stopping(life, self._loop, self._spec, self._audience, self._course),
            Whereabouts(self._loop, life, self._spec, self._audience.say),
        )
        for local_rank in range(layout.num_ranks):
            self._nursery.bear(life, local_rank)

    def _say_who_is_awaited(self, life: int) -> None:
        """Where the other hosts take their time to come to this life."""
        if self._num_lives == life and self._verdict.exit_code is None:
            nodes = self._spec.nodes
            self._audience.sum_up(describe_meeting(nodes.least, nodes.most, self._spec.meeting_point))

    def _is_over(self, life: Life) -> bool:
        may_be_explained = self._course.peer_failure is None and self._course.ending_signal is None
        if not life.has_ended or (may_be_explained and time.monotonic() < life.explained_by_s):
            return False
        return self._course.is_hurried or (self._forwarder.is_drained and self._forwarder.is_flushed)

    def _end_life(self, life: Life) -> None:
        """All have ended: begin the next life, or say how it ended."""
        self._claims.claim(life)
        life.close()
        self._audience.life_ended(life.layout, life.endings(), self._logs.directory)
        self._current = None
        has_failed = first_failure(life.endings()) is not None or self._course.peer_failure is not None
        if self._course.may_go_on and not has_failed and not self._course.is_changing:
            self._succeeded = life
            self._rendezvous.finish()
        else:
            self._end_or_restart(life)

    def _end_or_restart(self, life: Life) -> None:
        is_changing = self._course.is_changing
        may_restart = is_changing or self._num_restarts < self._spec.max_restarts
        if not (may_restart and self._course.may_go_on and not self._is_server_gone):
            self._verdict.conclude(life, self._num_restarts)
            return
        if is_changing:
            self._audience.sum_up("paceline: hosts have come or gone; all ranks start again\n")
        else:
            self._num_restarts += 1
            number = f"{self._num_restarts} of {self._spec.max_restarts}"
            self._verdict.tell_failure(life)
            self._audience.sum_up(f"paceline: all ranks start again (restart {number})\n")
        self._server.sweep()  # the next life begins when that is done

    # -- what other hosts tell -----------------------------------------------------------------------------------

    def on_peer_failed(self, failure: Message) -> None:
        """Ranks of another host have failed: those of this one end too."""
        self._course.peer_failure = failure
        if self._succeeded is not None:
            life, self._succeeded = self._succeeded, None
            self._end_or_restart(life)
        elif self._current is not None:  # else this one has failed as well, and all meet again
            self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_changed(self) -> None:
        """A host has come: begin a new life with it."""
        if self._current is not None:
            self._course.is_changing = True
            self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_finished(self) -> None:
        """The ranks of all hosts have succeeded."""
        life, self._succeeded = self._succeeded, None
        self._verdict.conclude(life, self._num_restarts)

    def on_lost(self, why: str) -> None:
        """The other hosts are out of reach."""
        self._course.broken = self._course.broken or f"the other hosts could not be met: {why}"
        if self._current is None:
            self._verdict.conclude(None, self._num_restarts)
        else:
            self._stop(signal.SIGTERM, signal.SIGKILL)

    # -- what the fork server tells ------------------------------------------------------------------------------

    def _on_server(self) -> None:
        messages = self._server.receive()
        if messages is None:
            self._loop.unwatch(self._server.control.fileno())
            self._on_server_gone()
        for message in messages or ():
            self._hear(message)

    def _hear(self, message: Message) -> None:
        current = self._current
        if message["event"] in ("ready", "swept"):
            if not self._course.is_wanted:
                self._verdict.conclude(None, self._num_restarts)
                return
            if message["event"] == "ready":
                self._rendezvous.open(lambda: self._server.open_meeting(self._spec, self._run_id), self._loop)
            life = self._num_lives
            self._rendezvous.meet(life)  # which a host that is alone does at once
            self._loop.call_later(_PATIENCE_S, lambda: self._say_who_is_awaited(life))
        elif message["event"] == "error":
            self._course.broken = self._course.broken or message["text"]
            self._stop(signal.SIGTERM, signal.SIGKILL)
        elif current is not None and message["event"] == "born":
            current.life.born(message["rank"], message["pid"])
            current.stopping.catch_up(message["rank"])
        elif current is not None:
            current.life.ended(message["rank"], message["code"], message["at_s"])

    def _on_server_gone(self) -> None:
        life = None if self._current is None else self._current.life
        self._is_server_gone = True
        has_begun = life is not None and life.has_begun
        if life is not None and not life.has_ended:
            self._signalled.signal_groups(signal.SIGKILL)
            life.lost()
        elif life is not None or self._verdict.exit_code is not None:
            return
        code = self._server.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL and life is not None:
            how += explain_sigkill(life.oom_kills())
        which = "its ranks were stopped" if has_begun else "no rank was started; what it said stands above"
        if self._course.is_wanted:  # else it was ended on purpose
            self._course.broken = self._course.broken or f"the fork server {how}; {which}"
        if life is None:
            self._verdict.conclude(None, self._num_restarts)

    # -- what cannot go on ---------------------------------------------------------------------------------------

    def _stop_soon(self) -> None:
        """A rank has failed: stop the others, but not at once, since what it caused, or was caused by, is seen soon."""
        assert self._current is not None
        life, stopping = self._current.life, self._current.stopping
        self._claims.claim_soon(life)
        self._loop.call_later(SETTLE_S, lambda: stopping.stop(signal.SIGTERM, signal.SIGKILL))

    def _on_output_closed(self) -> None:
        if why := why_unwritable(self._outlets):
            self._course.broken = self._course.broken or why
        else:
            self._course.output_closed = True
        self._stop(signal.SIGTERM, signal.SIGKILL)

    def _on_file_error(self, error: OSError) -> None:
        self._course.broken = self._course.broken or (
            f"a log in {self._logs.directory} cannot be written: {error.strerror}"
        )
        self._stop(signal.SIGTERM, signal.SIGKILL)

    # -- what it is told to do -----------------------------------------------------------------------------------

    def on_abandoned(self) -> None:
        """Nobody is left who would hear how it ends."""
        self._course.is_hurried = self._course.output_closed = True
        self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_signals(self, signums: bytes) -> None:
        """Signals have come, one a byte."""
        self._signalled.on_signals(signums)

    def hold(self) -> None:
        """The ranks are to stand still, until ``go_on``."""
        self._signalled.signal_groups(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signalled.signal_groups(signal.SIGCONT)

    def on_window(self) -> None:
        """The terminal has changed its size."""
        self._signalled.on_window()

    def _stop(self, *signals: signal.Signals) -> None:
        """Stop the ranks: each signal in turn, a grace apart."""
        if self._current is None:
            self._server.kill()  # seen on the control socket
        else:
            self._current.stopping.stop(*signals)
