"""What a rank tells of an exception."""

import os

import pytest

from paceline.launch.ranks.report import Reporter
from paceline.launch.wire import Decoder


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError(), "ValueError"),
        (ValueError("rank 1 failed:\nIts words"), "ValueError: rank 1 failed"),
        (ValueError("\nIts words"), "ValueError"),
    ],
)
def test_the_summary_is_one_line_and_leads_to_nothing(error, expected):
    reader, writer = os.pipe()
    try:
        assert Reporter(writer, 0).raised(error, None)
        (report,) = Decoder().feed(os.read(reader, 1 << 16))
    finally:
        os.close(reader)
        os.close(writer)
    assert report["summary"] == expected
