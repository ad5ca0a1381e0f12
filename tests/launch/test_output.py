import pytest

from paceline.launch.output.interleaving import Interleaver, Speakers


def said(interleaver: Interleaver, *pieces: tuple[int, bytes]) -> bytes:
    return b"".join(interleaver.feed(rank, data) for rank, data in pieces)


PIECES = (b"loss ", b"0.5\n", b"\r10%", b"\r20%", b"\x1b[1mbold", b"\xff\x00")


def test_the_only_rank_passes_through_untouched_and_at_once():
    interleaver = Interleaver(Speakers(1))
    for piece in PIECES:
        assert interleaver.feed(0, piece) == piece
    assert interleaver.finish(0) == b""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_rank_0_alone_passes_through_untouched_once_its_lines_are_whole_or_wait_too_long(is_terminal):
    interleaver = Interleaver(Speakers(4), is_terminal)
    assert interleaver.feed(0, b"loss ") == b""
    assert interleaver.holds_start(0)
    assert interleaver.release(0) == b"loss "
    assert interleaver.release(0) == b""
    assert said(interleaver, *((0, piece) for piece in PIECES[1:])) + interleaver.finish(0) == b"".join(PIECES[1:])


def test_lines_are_marked_once_another_than_rank_0_speaks():
    interleaver = Interleaver(Speakers(4))
    assert said(interleaver, (0, b"alone\n"), (1, b"I too\n"), (0, b"a\nb\n")) == b"alone\n[1]: I too\n[0]: a\n[0]: b\n"


def test_marks_are_of_one_width():
    interleaver = Interleaver(Speakers(11))
    assert said(interleaver, (0, b"a\n"), (10, b"b\n"), (3, b"c\n")) == b"a\n[10]: b\n[ 3]: c\n"


def test_lines_of_two_ranks_never_mix():
    interleaver = Interleaver(Speakers(2))
    out = said(interleaver, (0, b"x\n"), (1, b"y\n"), (0, b"he"), (1, b"wor"), (0, b"llo\n"), (1, b"ld\n"))
    assert out == b"x\n[1]: y\n[0]: hello\n[1]: world\n"


def test_the_first_speakers_open_line_is_ended_first():
    interleaver = Interleaver(Speakers(2))
    assert interleaver.feed(0, b"wait") + interleaver.release(0) == b"wait"
    assert said(interleaver, (1, b"y\n"), (0, b"ing\n")) == b"\n[1]: y\n[0]: ing\n"


def test_a_line_that_another_rank_comes_into_is_marked_as_a_whole():
    interleaver = Interleaver(Speakers(2))
    assert said(interleaver, (0, b"wait"), (1, b"y\n"), (0, b"ing\n")) == b"[1]: y\n[0]: waiting\n"
    assert not interleaver.holds_start(0)


def test_a_line_without_end_is_said_when_its_rank_ends():
    interleaver = Interleaver(Speakers(2))
    assert said(interleaver, (0, b"x\n"), (1, b"y")) == b"x\n"
    assert interleaver.finish(1) == b"[1]: y\n"
    assert interleaver.finish(1) == b""


def test_marks_begin_on_both_streams_together():
    speakers = Speakers(2)
    out, err = Interleaver(speakers), Interleaver(speakers)
    assert out.feed(0, b"a\n") + err.feed(1, b"b\n") + out.feed(0, b"c\n") == b"a\n[1]: b\n[0]: c\n"


def test_a_carriage_return_ends_a_line_on_a_terminal():
    interleaver = Interleaver(Speakers(2), is_terminal=True)
    out = said(interleaver, (0, b"\r10%"), (1, b"\r10%"), (1, b"\r20%"), (0, b"\r20%\r30%"), (1, b"\r\nend\r\n"))
    assert out == b"\r\n[1]: 10%\r[0]: 10%\r[0]: 20%\r[1]: 20%\r\n[1]: end\r\n"


def test_a_carriage_return_is_nothing_special_in_a_file():
    interleaver = Interleaver(Speakers(2))
    assert said(interleaver, (0, b"x\n"), (1, b"\r10%\r20%\n")) == b"x\n[1]: \r10%\r20%\n"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_endless_line_is_cut_rather_than_held(is_terminal):
    interleaver = Interleaver(Speakers(2), is_terminal)
    interleaver.feed(0, b"x\n")
    assert interleaver.feed(1, b"y" * (1 << 20)) == b""
    assert interleaver.feed(1, b"z") == b"[1]: " + b"y" * (1 << 20) + b"z\n"
