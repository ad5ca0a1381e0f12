"""The two ends of a line between conductor and agent, each by itself."""

import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass, field

import pytest

from paceline.launch.agent import agent, conducted
from paceline.launch.agent.conducted import Conducted, Enveloped
from paceline.launch.conductor.hostfile import HostSpec
from paceline.launch.conductor.line import Line
from paceline.launch.loop import Loop
from paceline.launch.output.display import Display
from paceline.launch.output.interleaving import Speakers
from paceline.launch.wire import Decoder, encode


@dataclass
class Heard:
    """What a supervisor is told; its own part is another test's."""

    told: list[str] = field(default_factory=list)

    def on_abandoned(self):
        self.told.append("abandoned")

    def on_signals(self, signums):
        self.told.append(f"signals {list(signums)}")

    def hold(self):
        self.told.append("hold")

    def go_on(self):
        self.told.append("go on")

    def on_lost(self, why):
        self.told.append(f"lost {why}")


@dataclass
class Rig:
    """An agent's end of a line, and what its conductor holds."""

    loop: Loop
    heard: Heard
    conducted: Conducted
    orders: int
    told: int

    def turn_until(self, condition, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        self.loop.call_later(timeout_s, lambda: None)
        while not condition():
            assert time.monotonic() < deadline
            self.loop.turn()


@pytest.fixture
def waiting():
    """Orders that came with the one to start."""
    return []


@pytest.fixture
def rig(waiting):
    (orders, ordering), (hearing, told) = os.pipe(), os.pipe()
    loop, heard = Loop(), Heard()
    streams = [{"names": ["stdout", "stderr"], "is_terminal": False}]
    agent = Conducted(orders, told, Decoder(), streams, [0, 0, 0, 0], waiting)
    outlets = agent.open_outlets(Speakers(1), apart=False)
    agent.attend(loop, Display(loop, outlets, heard.on_abandoned, lambda _: None, lambda _: None), heard)
    made = Rig(loop, heard, agent, ordering, hearing)
    yield made
    loop.close()
    for fd in (orders, told, hearing, made.orders):
        if fd >= 0:
            os.close(fd)


def test_an_agent_whose_line_is_closed_is_abandoned(rig):
    os.write(rig.orders, encode({"do": "signal", "name": "SIGUSR1"}) + encode({"do": "lost", "why": "so"}))
    os.close(rig.orders)
    rig.orders = -1
    rig.turn_until(lambda: rig.conducted.is_abandoned)
    assert rig.heard.told == [f"signals [{int(signal.SIGUSR1)}]", "lost so", "abandoned"]


@pytest.mark.parametrize("waiting", [[{"do": "signal", "name": "SIGINT"}, {"do": "tick"}]])
def test_orders_that_came_with_the_one_to_start_are_obeyed(rig):
    assert rig.heard.told == [f"signals [{int(signal.SIGINT)}]"]


def test_an_agent_that_hears_nothing_is_abandoned_unless_all_stand_still(rig, monkeypatch):
    monkeypatch.setattr(conducted, "SILENCE_S", 0.2)
    monkeypatch.setattr(conducted, "TICK_S", 0.05)
    os.write(rig.orders, encode({"do": "hold"}))
    rig.turn_until(lambda: rig.heard.told == ["hold"])
    still_until_s = time.monotonic() + 0.5
    rig.turn_until(lambda: time.monotonic() > still_until_s)
    assert not rig.conducted.is_abandoned
    os.write(rig.orders, encode({"do": "go on"}))
    rig.turn_until(lambda: rig.conducted.is_abandoned)
    assert rig.heard.told == ["hold", "go on", "abandoned"]


def test_an_agent_that_hears_nothing_before_it_is_told_to_start_ends_unless_all_stand_still(monkeypatch):
    monkeypatch.setattr(agent, "SILENCE_S", 0.2)
    (orders, ordering), (hearing, told) = os.pipe(), os.pipe()
    served = threading.Thread(target=agent._Agent(orders, told, lambda *_: None).serve)
    os.write(ordering, encode({"do": "hold"}))
    served.start()
    served.join(0.5)
    assert served.is_alive()
    os.write(ordering, encode({"do": "go on"}))
    served.join(30)
    assert not served.is_alive()
    for fd in (orders, ordering, hearing, told):
        os.close(fd)


def test_what_an_agent_tells_comes_in_order(rig):
    rig.conducted.say("one", in_color=True)
    rig.conducted.say("two")
    rig.turn_until(lambda: not rig.conducted.rest())
    told = Decoder().feed(os.read(rig.told, 1 << 16))
    assert [(each["event"], each["text"], each["in_color"]) for each in told] == [
        ("say", "one", True),
        ("say", "two", False),
    ]


def test_any_bytes_survive_the_envelope():
    pieces = [bytes(range(256)), "naïve ✓".encode()[:-1], b"\xed\xa0\x80\xed\xb0\x80", random.Random(0).randbytes(5000)]
    for piece in pieces:
        (message,) = Decoder().feed(Enveloped("stdout", is_terminal=False).feed(3, piece))
        assert (message["rank"], message["stream"]) == (3, "stdout")
        assert message["text"].encode(errors="surrogateescape") == piece
    assert Enveloped("stdout", is_terminal=False).feed(3, b"") == b""


def line_to(code):
    """A line to an agent that is python running ``code``, and what was heard on it; a greeting is answered."""
    loop, heard = Loop(), []

    def hear(line, message):
        heard.append(message)
        if message["event"] == "hello":
            line.tell({"do": "go on"})

    line = Line(
        HostSpec("b"),
        1,
        [sys.executable, "-c", code],
        loop,
        hear,
        lambda _, text: heard.append(text),
        lambda _: heard.append("ended"),
    )
    while line.is_open:
        loop.turn()
    line.end()
    loop.close()
    return line, heard


def test_what_a_shell_prints_before_the_agent_speaks_is_passed_over():
    line, heard = line_to("""if True:
        import os
        os.write(1, b'welcome\\n{"event": "he')
        os.write(1, b'{"event": "hello"}\\n{"event": "say"}\\n')
    """)
    assert heard == [{"event": "hello"}, {"event": "say"}, "ended"]
    assert (line.has_greeted, line.exit_code) == (True, 0)


def test_what_is_printed_between_messages_ends_the_line_since_it_may_have_torn_one():
    line, heard = line_to("""if True:
        import os, time
        os.write(1, b'{"event": "hello"}\\nlate banner\\n{"event": "say"}\\n')
        time.sleep(600)
    """)
    assert heard == [{"event": "hello"}, "ended"]
    assert line.said == "'late banner' was printed into it, where only paceline may; have that printed on stderr"


def test_a_line_without_an_agent_tells_what_was_said_and_the_exit_code():
    line, heard = line_to("import sys; print('welcome'); sys.exit('no route')")
    assert (heard, line.has_greeted, line.exit_code, line.said) == (["ended"], False, 1, "no route")


def test_what_others_say_beside_the_agent_is_passed_on_line_by_line():
    line, heard = line_to("""if True:
        import os, sys
        os.write(1, b'{"event": "hello"}\\n')
        sys.stdin.readline()  # it has been heard
        os.write(2, b'a warning\\r\\n\\nan end')
    """)
    assert heard == [{"event": "hello"}, "a warning", "ended"]
    assert line.said.endswith("an end")
