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
from collections import deque
from collections.abc import Sequence

from paceline.errors import LaunchError
from paceline.launch.audience import Audience, Terminal
from paceline.launch.birth import Nursery
from paceline.launch.dispositions import ENDING, FORWARDED, OF_TERMINAL, signals_as_bytes
from paceline.launch.failure import (
    SETTLE_S,
    as_json,
    describe,
    describe_interrupt,
    describe_layout,
    describe_wait,
    explain_sigkill,
    first_failure,
)
from paceline.launch.hangs.asking import survives
from paceline.launch.hangs.telling import Whereabouts
from paceline.launch.hosts.layout import Layout
from paceline.launch.life import Life
from paceline.launch.loop import READ, Loop
from paceline.launch.output.display import LAST_WORDS_S
from paceline.launch.output.forwarding import Forwarder
from paceline.launch.output.interleaving import Speakers
from paceline.launch.output.logs import Logs
from paceline.launch.output.plumbing import open_standard_streams, why_unwritable
from paceline.launch.server.client import ForkServer
from paceline.launch.spec import LaunchSpec
from paceline.launch.wire import Message

_CLAIM_S = 0.5  # before a host says that it failed first, where its ranks have merely raised
_PATIENCE_S = 1.0  # for ranks to end, before it is said that they are waited for


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
        self._outlets = audience.open_outlets(self._speakers, apart=not spec.logs.is_plain)
        self._forwarder = Forwarder(self._loop, self._outlets, self._on_output_closed, self._on_file_error)
        self._life: Life | None = None
        self._whereabouts: Whereabouts | None = None  # of the ranks of this life
        self._num_lives = 0
        self._restarts_left = spec.max_restarts
        self._verdict: int | None = None
        self._ending_signal: signal.Signals | None = None
        self._had_failed = False  # ranks were being stopped already when it came
        self._is_hurried = False  # output that nobody reads is given up
        self._output_closed = False
        self._is_server_gone = False
        self._broken: str | None = None  # why the launcher itself cannot go on
        self._last_signal = signal.SIGTERM
        self._escalation: deque[signal.Signals] = deque()
        self._peer_failure: Message | None = None  # of another host, in this life
        self._is_changing = False  # hosts come or go: the next life costs no restart
        self._claimed: Life | None = None  # whose failure the other hosts have been told
        self._succeeded: Life | None = None  # while other hosts' ranks are waited for
        self._rendezvous = audience.meet(spec, self._run_id, self)
        self._server = ForkServer(spec)
        self._nursery = Nursery(spec, self._server, self._outlets, self._logs)
        self._loop.watch(wake_fd, READ, lambda: self.on_signals(os.read(wake_fd, 4096)))
        self._loop.watch(self._server.control.fileno(), READ, self._on_server)
        audience.attend(self._loop, self._forwarder.display, self)

    def run(self) -> int:
        try:
            while self._verdict is None:
                self._loop.turn()
                if self._life is not None and self._is_over(self._life):
                    self._end_life(self._life)
            self._rendezvous.settle()
            self._forwarder.display.flush(LAST_WORDS_S)
            return self._verdict
        except BaseException:
            self._server.kill()
            raise
        finally:
            self._server.end()
            self._rendezvous.close()
            self._loop.close()

    # -- lives ---------------------------------------------------------------------------------------------------

    def on_layout(self, layout: Layout, listener: socket.socket | None, hosts: Sequence[str]) -> None:
        """The hosts have met: bear all ranks, at a store of their own."""
        if listener is not None:
            with listener:
                self._server.host_store(listener, layout.address, layout.port)
        if hosts:
            own = None if self._spec.nodes.shares_output else layout.node_rank
            self._audience.sum_up(describe_layout(layout, hosts, own=own))
        self._num_lives = layout.life + 1
        self._speakers.num_ranks = layout.world_size
        self._peer_failure, self._is_changing = None, False
        self._life = Life(layout, self._loop, self._forwarder, self._stop_soon)
        self._whereabouts = Whereabouts(self._loop, self._life, self._spec, self._audience.say)
        for local_rank in range(layout.num_ranks):
            self._nursery.bear(self._life, local_rank)

    def on_peer_failed(self, failure: Message) -> None:
        """Ranks of another host have failed: those of this one end too."""
        self._peer_failure = failure
        if self._succeeded is not None:
            life, self._succeeded = self._succeeded, None
            self._end_or_restart(life)
        elif self._life is not None:  # else this one has failed as well, and all meet again
            self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_changed(self) -> None:
        """A host has come: begin a new life with it."""
        if self._life is not None:
            self._is_changing = True
            self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_finished(self) -> None:
        """The ranks of all hosts have succeeded."""
        life, self._succeeded = self._succeeded, None
        self._conclude(life)

    def on_lost(self, why: str) -> None:
        """The other hosts are out of reach."""
        self._broken = self._broken or f"the other hosts could not be met: {why}"
        if self._life is None:
            self._conclude(None)
        else:
            self._stop(signal.SIGTERM, signal.SIGKILL)

    def _is_over(self, life: Life) -> bool:
        may_be_explained = self._peer_failure is None and self._ending_signal is None
        if not life.has_ended or (may_be_explained and time.monotonic() < life.explained_by_s):
            return False
        return self._is_hurried or (self._forwarder.is_drained and self._forwarder.is_flushed)

    def _end_life(self, life: Life) -> None:
        """All have ended: begin the next life, or say how it ended."""
        self._claim_failure(life)
        life.close()
        self._audience.life_ended(life.layout, life.endings(), self._logs.directory)
        self._life = self._whereabouts = None
        is_own = self._ending_signal is None and not self._output_closed and self._broken is None
        has_failed = first_failure(life.endings()) is not None
        if is_own and not has_failed and not self._is_changing and self._peer_failure is None:
            self._succeeded = life
            self._rendezvous.finish()
        else:
            self._end_or_restart(life)

    def _end_or_restart(self, life: Life) -> None:
        if not self._may_restart():
            self._conclude(life)
            return
        if self._is_changing:
            self._audience.sum_up("paceline: hosts have come or gone; all ranks start again\n")
        else:
            self._restarts_left -= 1
            number = self._spec.max_restarts - self._restarts_left
            self._tell_failure(life)
            self._audience.sum_up(f"paceline: all ranks start again (restart {number} of {self._spec.max_restarts})\n")
        self._server.sweep()  # the next life begins when that is done

    def _may_restart(self) -> bool:
        is_wanted = self._ending_signal is None and not self._output_closed and self._broken is None
        return is_wanted and not self._is_server_gone and (self._is_changing or self._restarts_left > 0)

    # -- what the fork server tells ------------------------------------------------------------------------------

    def _on_server(self) -> None:
        messages = self._server.receive()
        if messages is None:
            self._loop.unwatch(self._server.control.fileno())
            self._on_server_gone()
        for message in messages or ():
            self._hear(message)

    def _hear(self, message: Message) -> None:
        life = self._life
        if message["event"] in ("ready", "swept"):
            if self._ending_signal is None and not self._output_closed:
                if message["event"] == "ready":
                    self._rendezvous.open(self._server, self._loop)
                self._rendezvous.meet(self._num_lives)
            else:
                self._conclude(None)
        elif message["event"] == "error":
            self._broken = self._broken or message["text"]
            self._stop(signal.SIGTERM, signal.SIGKILL)
        elif life is not None and message["event"] == "born":
            life.born(message["rank"], message["pid"])
            if life.is_stopping:
                life.signal_group(message["rank"], self._last_signal)
        elif life is not None:
            life.ended(message["rank"], message["code"], message["at_s"])

    def _on_server_gone(self) -> None:
        life = self._life
        self._is_server_gone = True
        has_begun = life is not None and life.has_begun
        if life is not None and not life.has_ended:
            self._signal_groups(signal.SIGKILL)
            life.lost()
        elif life is not None or self._verdict is not None:
            return
        code = self._server.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL and life is not None:
            how += explain_sigkill(life.oom_kills())
        which = "its ranks were stopped" if has_begun else "no rank was started; what it said stands above"
        self._broken = self._broken or f"the fork server {how}; {which}"
        if life is None:
            self._conclude(None)

    def _stop_soon(self) -> None:
        """Stop the ranks, but not at once: what this failure caused, or was caused by, is seen in a moment."""
        life = self._life
        assert life is not None
        first = first_failure(life.endings_so_far())
        has_raised = first is not None and first.report is not None and first.report.kind == "raised"
        # Of several hosts, that of a rank that died or has left speaks first: it explains what others have raised.
        delay_s = _CLAIM_S if has_raised and not self._spec.nodes.is_alone else 0.0
        life.explained_by_s = time.monotonic() + delay_s
        self._loop.call_later(delay_s, lambda: self._claim_failure(life))
        self._loop.call_later(SETTLE_S, lambda: self._stop(signal.SIGTERM, signal.SIGKILL, life=life))

    def _claim_failure(self, life: Life) -> None:
        """Tell the other hosts what has failed here, once for each life, unless it is over."""
        if life is not self._life or life is self._claimed or self._peer_failure is not None:
            return
        first = first_failure(life.endings_so_far())
        if first is not None:
            self._claimed = life
            text = describe([first], first)
            self._rendezvous.fail({"host": socket.gethostname(), "exit_status": first.exit_status, "text": text})

    # -- output and signals --------------------------------------------------------------------------------------

    def _on_output_closed(self) -> None:
        if why := why_unwritable(self._outlets):
            self._broken = self._broken or why
        else:
            self._output_closed = True
        self._stop(signal.SIGTERM, signal.SIGKILL)

    def _on_file_error(self, error: OSError) -> None:
        self._broken = self._broken or f"a log in {self._logs.directory} cannot be written: {error.strerror}"
        self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_abandoned(self) -> None:
        """Nobody is left who would hear how it ends."""
        self._is_hurried = self._output_closed = True
        self._stop(signal.SIGTERM, signal.SIGKILL)

    def on_signals(self, signums: bytes) -> None:
        for signum in map(signal.Signals, signums):
            if signum in ENDING:
                self._on_ending_signal(signum)
            elif signum == signal.SIGTSTP:
                self._pause()
            elif signum == signal.SIGWINCH:
                self.on_window()
            elif self._life is not None:
                for _, pid in self._life.living():
                    if signum != signal.SIGUSR2 or survives(pid, signum):
                        os.kill(pid, signum)
                if signum == signal.SIGUSR2 and self._whereabouts is not None:
                    self._whereabouts.tell()

    def _on_ending_signal(self, signum: signal.Signals) -> None:
        if signum in (signal.SIGINT, signal.SIGQUIT):
            self._audience.on_keys()
        is_stopping = self._ending_signal is not None or (self._life is not None and self._life.is_stopping)
        if self._ending_signal is None:
            self._had_failed = is_stopping
        if is_stopping and signum == signal.SIGINT:  # the second Ctrl-C: no more patience
            self._is_hurried = True
            self._ending_signal = self._ending_signal or signum
            self._escalation = deque([signal.SIGKILL])
            self._escalate(self._life)
        elif self._ending_signal is None:
            self._ending_signal = signum
            text = f"paceline: the launcher was interrupted by {signum.name}\n"
            self._rendezvous.fail({"host": socket.gethostname(), "exit_status": 128 + signum, "text": text})
            first = signum if signum in (signal.SIGINT, signal.SIGQUIT) else signal.SIGTERM
            self._stop(*dict.fromkeys((first, signal.SIGTERM, signal.SIGKILL)))

    def _pause(self) -> None:
        """Ctrl-Z: the ranks are not in the terminal's foreground, so they are told; both go on together."""
        self.hold()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.go_on()

    def hold(self) -> None:
        self._signal_groups(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_groups(signal.SIGCONT)

    def on_window(self) -> None:
        """The terminal has changed its size."""
        self._forwarder.follow_window()
        self._signal_groups(signal.SIGWINCH)

    # -- stopping ------------------------------------------------------------------------------------------------

    def _stop(self, *signals: signal.Signals, life: Life | None = None) -> None:
        """Stop the life that there is, or ``life``: each signal in turn, a grace apart. The first call decides."""
        life = life or self._life
        if life is None:
            self._server.kill()  # seen on the control socket
        elif life is self._life and not life.is_stopping:
            life.stop_at_s = time.monotonic()
            self._escalation = deque(signals)
            self._escalate(life)
            self._loop.call_later(_PATIENCE_S, lambda: self._say_who_is_awaited(life))

    def _say_who_is_awaited(self, life: Life) -> None:
        """Where ranks take their time to end: why they are to, and which they are."""
        if life is self._life and not life.has_ended:
            ranks = [life.layout.first_rank + rank for rank, _ in life.living()]
            self._audience.say(describe_wait(life.reports, ranks, has_keys=self._audience.has_keys))

    def _escalate(self, life: Life | None) -> None:
        if self._escalation and life is not None and life is self._life:
            self._last_signal = self._escalation.popleft()
            self._signal_groups(self._last_signal)
            self._loop.call_later(self._spec.grace_s, lambda: self._escalate(life))

    def _signal_groups(self, signum: signal.Signals) -> None:
        life = self._life
        for local_rank, _ in list(life.living()) if life is not None else ():
            # A rank that has reported its failure is on its way out, and its exit code is wanted.
            if signum == signal.SIGTERM and life and local_rank in life.reports and self._ending_signal is None:
                continue
            if life is not None:
                life.signal_group(local_rank, signum)

    # -- the verdict ---------------------------------------------------------------------------------------------

    def _conclude(self, life: Life | None) -> None:
        """Say how it ended, and with what exit code."""
        if self._ending_signal is not None:
            reports = {} if life is None else life.reports
            first_rank = 0 if life is None else life.layout.first_rank
            self._audience.say(describe_interrupt({first_rank + rank: report for rank, report in reports.items()}))
            if self._had_failed and life is not None:
                self._tell_failure(life)
            self._audience.sum_up(f"paceline: interrupted by {self._ending_signal.name}, all ranks have ended\n")
            self._verdict = 128 + self._ending_signal
        elif self._output_closed:
            self._verdict = 128 + signal.SIGPIPE
        elif self._broken is not None or life is None:
            raise LaunchError(self._broken or "no rank was started")
        else:
            first = first_failure(life.endings())
            own = 0 if first is None else first.exit_status
            self._verdict = own if self._peer_failure is None else self._peer_failure["exit_status"]
            if self._verdict:
                self._tell_failure(life)
        if self._spec.report_path and life is not None:
            self._write_report(life)

    def _tell_failure(self, life: Life) -> None:
        """Of several launchers that are read together, the one whose rank has failed first tells: it knows most."""
        if not self._spec.nodes.shares_output:
            self._audience.sum_up(self._describe(life), in_color=True)
        elif self._peer_failure is None:
            self._audience.say(f"paceline: on {socket.gethostname()}:\n{self._describe(life)}", in_color=True)

    def _describe(self, life: Life) -> str:
        """How a life has failed; where another host failed first, that."""
        if self._peer_failure is not None:
            return f"paceline: on {self._peer_failure['host']}:\n{self._peer_failure['text']}"
        endings = life.endings()
        first = first_failure(endings)
        return "" if first is None else describe(endings, first, logs=self._logs.directory)

    def _write_report(self, life: Life) -> None:
        assert self._verdict is not None
        restarts = self._spec.max_restarts - self._restarts_left
        text = as_json(
            life.endings(), self._verdict, host=socket.gethostname(), logs=self._logs.directory, num_restarts=restarts
        )
        try:
            with open(self._spec.report_path, "w") as file:
                file.write(text)
        except OSError as error:
            self._audience.say(f"paceline: the report {self._spec.report_path} cannot be written: {error.strerror}\n")
