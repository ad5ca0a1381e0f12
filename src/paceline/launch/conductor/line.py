"""The conductor's line to the agent of one host: what is said to it, what it says, and how it was lost.

The invariant: saying something never waits, and an agent whose line is closed ends with all that it has started.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from paceline.launch.conductor.hostfile import HostSpec
from paceline.launch.loop import READ, WRITE, Loop
from paceline.launch.wire import Decoder, Message, decode, encode
from paceline.processes import own_mark

_READ_BYTES = 1 << 16
_KEPT_CHARACTERS = 2000  # of what ssh, or a host's shell, says before the agent does
_HELLO = b'{"event": "hello"'
_SHOWN_BYTES = 200  # of what was printed where only messages may be
_END_S = 5.0  # for ssh to end once the agent has


class Line:
    """A running agent, or an attempt to have one.

    Args:
        node_rank: the host's number, from 0.
        command: what starts the agent.
        on_message: called with each message.
        on_stderr: called with each line of others on that host, once the agent is there.
        on_end: called once, when the connection has ended.

    Attributes:
        host, node_rank, loop: as given.
        is_open: whether the agent may still say something.
        has_greeted: whether the agent is there.
        said: what others than the agent have said before that, or the last of it since.
        exit_code: of the agent, or of ssh, once it has ended.
    """

    def __init__(
        self,
        host: HostSpec,
        node_rank: int,
        command: Sequence[str],
        loop: Loop,
        on_message: Callable[["Line", Message], None],
        on_stderr: Callable[["Line", str], None],
        on_end: Callable[["Line"], None],
    ) -> None:
        self.host = host
        self.node_rank = node_rank
        self._loop = loop
        self._on_message = on_message
        self._on_stderr = on_stderr
        self._on_end = on_end
        self._decoder = Decoder()
        self._before = b""
        self._stderr = b""
        self._outgoing = bytearray()
        self._is_held = False
        self.is_open = True
        self.has_greeted = False
        self.said = ""
        self.exit_code: int | None = None
        # A session of its own: what the terminal sends on Ctrl-C is passed on by the conductor alone.
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **own_mark()},  # by which `paceline ps` knows whose they are
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._stdin, self._stdout, self._errors = self._process.stdin, self._process.stdout, self._process.stderr
        for stream in (self._stdin, self._stdout, self._errors):
            os.set_blocking(stream.fileno(), False)
        loop.watch(self._stdout.fileno(), READ, self._read)
        loop.watch(self._errors.fileno(), READ, self._read_errors)

    def tell(self, message: Message) -> None:
        """Have the agent know; nothing happens where it has gone."""
        if self._stdin.closed:
            return
        self._outgoing += encode(message)
        self._write()

    def hold(self) -> None:
        """Listen no more, until ``resume``: nobody reads what the ranks say."""
        self._is_held = True
        self._loop.unwatch(self._stdout.fileno())

    def resume(self) -> None:
        if self._is_held and self.is_open:
            self._loop.watch(self._stdout.fileno(), READ, self._read)
        self._is_held = False

    def close(self) -> None:
        """Hang up: the agent ends with its ranks. What it still says is heard, until :meth:`end`."""
        if not self._stdin.closed:
            self._loop.unwatch(self._stdin.fileno())
            with contextlib.suppress(OSError):
                self._stdin.close()

    def end(self) -> None:
        """End ssh, if it has not ended by itself."""
        self.close()
        if self.is_open:
            self._kill()
            self._ended()
        for stream in (self._stdout, self._errors):
            if not stream.closed:
                self._loop.unwatch(stream.fileno())
                stream.close()

    def _write(self) -> None:
        fd = self._stdin.fileno()
        try:
            del self._outgoing[: os.write(fd, self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # it has ended, which is seen where it is listened to
            self._outgoing.clear()
        if self._outgoing and not self._loop.is_watched(fd):
            self._loop.watch(fd, WRITE, self._write)
        elif not self._outgoing:
            self._loop.unwatch(fd)

    def _read(self) -> None:
        data = os.read(self._stdout.fileno(), _READ_BYTES)
        if not data:
            self._ended()
            self._on_end(self)
            return
        if not self.has_greeted:
            data = self._await_hello(data)
        for line in self._decoder.split(data) if data else ():
            try:
                message = decode(line)
            except ValueError:
                self._spoiled(line)
                return
            self._on_message(self, message)

    def _spoiled(self, line: bytes) -> None:
        """Others have printed between the messages, and may have torn one: there may be a wait for it without end."""
        self.end()
        text = line[:_SHOWN_BYTES].decode(errors="replace").strip()
        self.said = f"{text!r} was printed into it, where only paceline may; have that printed on stderr"
        self._on_end(self)

    def _await_hello(self, data: bytes) -> bytes:
        """What follows upon what a shell's start-up files may have printed."""
        self._before += data
        start = self._before.find(_HELLO)
        if start < 0:
            self._before = self._before[-len(_HELLO) :]
            return b""
        self.has_greeted = True
        self.said = ""
        data, self._before = self._before[start:], b""
        return data

    def _read_errors(self) -> None:
        data = os.read(self._errors.fileno(), _READ_BYTES)
        if not data:
            self._loop.unwatch(self._errors.fileno())
        *lines, self._stderr = (self._stderr + data).split(b"\n")
        for line in [each.decode(errors="replace").rstrip("\r") for each in lines]:
            self.said = f"{self.said}\n{line}"[-_KEPT_CHARACTERS:]
            if self.has_greeted and line.strip():
                self._on_stderr(self, line)

    def _kill(self) -> None:
        """Kill ssh, and what a script in its place has started. It is not reaped yet, so the group is still its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self) -> None:
        self.is_open = False
        self._loop.unwatch(self._stdout.fileno())
        try:
            self.exit_code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self.exit_code = self._process.wait()
        with contextlib.suppress(BlockingIOError):
            while self._loop.is_watched(self._errors.fileno()):
                self._read_errors()  # why it has ended was said before
        self.said = "\n".join([self.said, self._stderr.decode(errors="replace")]).strip()
