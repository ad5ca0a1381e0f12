"""What ranks have called, as bytes: equal where they have called alike, different where they have not."""

import torch

from paceline.comm.calls import SpelledCalls, called
from paceline.comm.transport import Call


def test_calls_have_in_common_all_but_the_line():
    spelled = SpelledCalls(512)
    common, text = spelled[Call("all_reduce", torch.float32, 7, "sum", "train.py:3")]
    assert common == b"all_reduce|torch.float32|7|sum\0"
    assert text == common + b"all_reduce(sum, of 7 elements, float32) at train.py:3\0"
    assert spelled[Call("all_reduce", torch.float32, 7, "sum", "train.py:90")][0] == common
    assert called(text) == "all_reduce(sum, of 7 elements, float32) at train.py:3"


def test_a_call_that_lists_very_many_sizes_fits_and_still_differs_from_others():
    sizes = ", ".join(["1000"] * 500)
    spelled = SpelledCalls(512, alignment=64)
    one, another = (spelled[Call("all_gather", torch.int64, -1, f"sizes {sizes}, {last}")] for last in (1, 2))
    assert one[0] != another[0]
    assert one[0].startswith(b"all_gather|torch.int64|-1|sizes 1000, 1000, ")
    for common, text in (one, another):
        assert text.startswith(common)
        assert common.endswith(b"\0")
        assert len(text) == 512


def test_what_is_shorter_is_aligned_with_zeros():
    common, text = SpelledCalls(512, alignment=64)[Call("barrier")]
    assert common == b"barrier|None|0|\0"
    assert text == (common + b"barrier()").ljust(64, b"\0")


def test_not_all_calls_that_ever_were_are_kept():
    spelled = SpelledCalls(512)
    for numel in range(2000):
        spelled[Call("broadcast", torch.float32, numel, "from rank 0")]
    assert 1 <= len(spelled) <= 512
