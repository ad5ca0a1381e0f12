"""Frames between ranks of several hosts: both ends in one process, over the loopback."""

import contextlib
import json
import os
import re
import socket
import struct
import time

import pytest
import torch

from paceline.comm.hosts.frames import memory_of
from paceline.comm.hosts.post import Post
from paceline.errors import CommunicationError

SOON_S = 5.0  # what takes longer hangs


class Recorder:
    """A channel that takes everything, or nothing while ``is_open`` is false."""

    def __init__(self, post):
        self.is_open = True
        self.frames = []
        post.open(0, self.place, self.arrived)

    def place(self, source, key, num_bytes, extra):
        if not self.is_open:
            return None
        self.memory = bytearray(num_bytes)
        self.head = source, key, extra
        return memoryview(self.memory)

    def arrived(self, source, key):
        self.frames.append((*self.head, bytes(self.memory)))


@pytest.fixture
def posts(monkeypatch):
    """Two ranks' ends, in one process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    both = [Post(rank) for rank in range(2)]
    whereabouts = [json.loads(json.dumps(post.whereabouts())) for post in both]
    for post in both:
        post.learn(whereabouts)
    yield both
    for post in both:
        post.close()


def drive(posts, until, timeout_s=SOON_S):
    deadline = time.monotonic() + timeout_s
    while not until() and time.monotonic() < deadline:
        for post in posts:
            post.poll()
    return until()


def test_frames_of_any_size_arrive_in_order(posts):
    recorder = Recorder(posts[1])
    texts = [b"", b"abc", os.urandom(1 << 14), os.urandom(5_000_001), b"", b"end"]
    parcels = [posts[0].send(0, 1, key, memoryview(text) if text else None, 7) for key, text in enumerate(texts)]
    assert drive(posts, lambda: len(recorder.frames) == len(texts))
    assert recorder.frames == [(0, key, 7, text) for key, text in enumerate(texts)]
    assert all(parcel.is_done for parcel in parcels)
    assert posts[0].num_unsent == 0


def test_while_nobody_takes_a_frame_its_sender_waits(posts):
    recorder = Recorder(posts[1])
    recorder.is_open = False
    Recorder(posts[0])
    parcel = posts[0].send(0, 1, 1, memoryview(bytes(64_000_000)))
    assert not drive(posts, lambda: parcel.is_done, timeout_s=0.3)
    recorder.is_open = True
    posts[1].resume(0)
    assert drive(posts, lambda: len(recorder.frames) == 1)
    assert parcel.is_done


def test_last_words_are_heard_while_a_frame_is_under_way(posts):
    Recorder(posts[0])
    Recorder(posts[1]).is_open = False
    posts[0].send(0, 1, 1, memoryview(bytes(64_000_000)))
    drive(posts, lambda: False, timeout_s=0.2)
    posts[1].announce(has_failed=True, words="out of memory")
    assert drive(posts, lambda: 1 in posts[0].gone and posts[0].gone[1].has_spoken)
    assert (posts[0].gone[1].has_failed, posts[0].gone[1].words) == (True, "out of memory")


def test_strangers_are_shown_out(posts):
    recorder = Recorder(posts[1])
    told = posts[1].whereabouts()
    with socket.create_connection((told["host"], told["port"]), timeout=SOON_S) as stranger:
        stranger.sendall(struct.pack("!32sii", b"0" * 32, 0, 0) + b"hello" * 100)
        drive(posts, lambda: False, timeout_s=0.1)
        stranger.settimeout(SOON_S)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    posts[0].send(0, 1, 5, memory_of(torch.tensor([1, 2], dtype=torch.uint8)))
    assert drive(posts, lambda: recorder.frames)
    assert recorder.frames == [(0, 5, 0, b"\1\2")]
    assert posts[1].gone == {}


def test_who_cannot_be_reached_is_gone(posts):
    posts[1].close()
    parcel = posts[0].send(0, 1, 1, None)
    assert drive(posts[:1], lambda: 1 in posts[0].gone)
    assert re.match(r"no connection to 127\.0\.0\.1:\d+: Connection refused", posts[0].gone[1].sign)
    assert not parcel.is_done


def test_where_no_way_leads_is_said_at_once(posts):
    told = [posts[0].whereabouts(), posts[1].whereabouts() | {"host": "255.255.255.255"}]
    posts[0].learn(told)
    posts[0].send(0, 1, 1, None)
    assert drive(posts[:1], lambda: 1 in posts[0].gone)
    assert posts[0].gone[1].sign.startswith("no connection to 255.255.255.255:")
    assert posts[0].num_unsent == 0


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "dummy7")
    with pytest.raises(CommunicationError, match=r"^GLOO_SOCKET_IFNAME='dummy7': this host has no such interface.* lo"):
        Post(0)
