"""The page on which a rank tells what it waits for."""

import os
import threading

import pytest

from paceline import waits
from paceline.waits import Page, Wait, Words


@pytest.fixture
def page(monkeypatch):
    page = Page.make()
    monkeypatch.setattr(waits, "_page", None)
    yield page
    page.close()


def test_a_page_on_which_nothing_was_written_tells_nothing(page):
    assert page.read() is None


def test_what_was_written_is_read_through_another_mapping(page):
    words = Words(7, 8, [Wait("barrier()", "rank 1 has not come to it", 2.5, 8), Wait("recv", "\u00e9", 3.0, 9)])
    page.write(words)
    other = Page(os.dup(page.fd))
    assert other.read() == words
    assert other.read().of_main_thread() == words.waits[:1]
    page.write(Words(7, 8))
    assert other.read() == Words(7, 8)
    other.close()


def test_what_is_only_partly_written_tells_nothing(page):
    page.write(Words(7, 8, [Wait("barrier()", "rank 1", 2.5, 8)]))
    page._memory[20:24] = b"????"
    assert page.read() is None


def test_the_stack_lies_behind_the_page_and_goes_when_it_is_cleared(page):
    page.write(Words(7, 8))
    os.write(page.fd, b"one\n")
    os.write(page.fd, b"two\n")
    assert page.read_stack() == "one\ntwo\n"
    page.clear_stack()
    assert page.read_stack() == ""
    os.write(page.fd, b"three\n")
    assert (page.read_stack(), page.read()) == ("three\n", Words(7, 8))


def test_nothing_is_told_before_a_wait_is_long_or_where_nobody_reads(page):
    assert not waits.is_told(60.0)
    waits.tell(page)
    assert (waits.is_told(0.9), waits.is_told(1.0)) == (False, True)


def test_each_threads_wait_is_told_until_it_is_over(page):
    waits.tell(page)
    me = threading.get_ident()
    assert page.read() == Words(page.fd, me)
    waits.note("barrier()", "ranks 1 and 2", 5.0)
    (first,) = page.read().waits
    waits.note("barrier()", "rank 2", 6.0)
    assert page.read().waits == [Wait("barrier()", "rank 2", first.since_s, me)]

    def other() -> None:
        waits.note("recv()", "rank 3", 1.0)
        assert [wait.what for wait in page.read().waits] == ["barrier()", "recv()"]
        assert len(page.read().of_main_thread()) == 1
        waits.forget()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [wait.what for wait in page.read().waits] == ["barrier()"]
    waits.forget()
    assert page.read().waits == []


def test_long_texts_are_cut_to_what_the_page_holds(page):
    waits.tell(page)
    waits.note("\u00e9" * 10_000, "\u00e9" * 10_000, 1.0)
    assert page.read().waits[0].what == "\u00e9" * 500
    waits.forget()


def test_a_process_forked_from_a_rank_tells_nothing(page):
    waits.tell(page)
    pid = os.fork()
    if not pid:
        told = waits.is_told(5.0)
        waits.note("barrier()", "rank 1", 5.0)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert page.read().waits == []
