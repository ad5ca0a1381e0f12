"""Timelines keep events, measure overlap, and write traces that Perfetto reads. Expected values are made by hand."""

import json
import pickle
import time

import pytest

from paceline.errors import TimelineError
from paceline.timeline import Event, Measured, Timeline, merge_traces


def one_round(number=0, rank=0, start_s=10.0):
    """Two buckets: 0 flies while backward runs, 1 is half exposed. In flight 1-4 and 5-9, exposed 7-10."""
    at = start_s.__add__
    return [
        Event("round began", at(0), rank, number, size_bytes=12),
        Event("bucket ready", at(0.5), rank, number, 0, 8, ("c", "b")),
        Event("launched", at(1), rank, number, 0, 8, ("c", "b")),
        Event("launched", at(5), rank, number, 1, 4, ("a",)),
        Event("done", at(4), rank, number, 0, 8, ("c", "b")),
        Event("done", at(9), rank, number, 1, 4, ("a",)),
        Event("control", at(7), rank, number, size_bytes=38, duration_s=3.0),
        Event("waited", at(7), rank, number, duration_s=3.0),
        Event("round ended", at(11), rank, number),
    ]


def timeline_of(*rounds, max_rounds=100):
    timeline = Timeline(max_rounds)
    for events in rounds:
        for event in events:
            timeline(event)
    return timeline


def test_a_timeline_gives_back_the_events_in_order():
    assert list(timeline_of(one_round())) == one_round()
    assert len(timeline_of(one_round())) == 9


def test_it_forgets_the_oldest_rounds_of_each_rank():
    kept = timeline_of(*(one_round(number, rank) for number in range(5) for rank in (0, 1)), max_rounds=2)
    assert [(event.rank, event.round) for event in kept if event.kind == "round began"] == [
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 4),
    ]


def test_a_cleared_timeline_is_empty():
    timeline = timeline_of(one_round())
    timeline.clear()
    assert list(timeline) == []


def test_a_timeline_that_keeps_nothing_is_refused():
    with pytest.raises(TimelineError, match=r"^max_rounds=0: expected how many rounds to keep, at least 1\.$"):
        Timeline(0)


def test_events_and_timelines_can_be_sent_to_another_rank():
    assert list(pickle.loads(pickle.dumps(timeline_of(one_round())))) == one_round()


# -- measuring -----------------------------------------------------------------------------------------------------


def test_overlap_is_the_share_of_flight_that_lies_beside_computation():
    # in flight 3 + 4 of which 7-9 is exposed
    assert timeline_of(one_round()).measure() == Measured(1, 7.0, 3.0, 1 - 2 / 7)


def test_late_and_unplanned_reductions_are_in_flight_and_exposed():
    events = one_round()
    events[-1:-1] = [
        Event("late", 20.0, 0, 0, 0, 8, ("c",), duration_s=1.0),
        Event("unplanned", 21.0, 0, 0, None, 8, ("d",), duration_s=2.0),
    ]
    assert timeline_of(events).measure() == Measured(1, 10.0, 6.0, 1 - 5 / 10)


def test_what_is_measured_is_the_median_over_rounds():
    quick = [event._replace(duration_s=min(event.duration_s, 1.0)) for event in one_round(1)]
    assert timeline_of(one_round(0), quick, one_round(2)).measure() == Measured(3, 7.0, 3.0, 1 - 2 / 7)


def test_a_backward_that_failed_does_not_count_and_the_next_has_its_number():
    assert timeline_of(one_round()[:4], one_round(start_s=30.0)).measure() == Measured(1, 7.0, 3.0, 1 - 2 / 7)
    assert timeline_of(one_round()[:4]).measure() is None


def test_nothing_is_measured_of_an_empty_timeline_or_of_another_rank():
    assert Timeline().measure() is None
    assert timeline_of(one_round()).measure(rank=1) is None


def test_a_round_without_buckets_has_no_overlap():
    assert timeline_of([one_round()[0], *one_round()[-3:]]).measure() == Measured(1, 0.0, 3.0, None)


# -- traces --------------------------------------------------------------------------------------------------------


def entries(trace, phase):
    return [
        (entry["name"], entry["pid"], entry["tid"], entry["ts"], entry.get("dur"))
        for entry in trace["traceEvents"]
        if entry["ph"] == phase
    ]


def test_a_trace_has_a_process_for_each_rank_and_a_thread_for_each_bucket():
    trace = timeline_of(one_round(rank=3)).to_chrome_trace()
    assert sorted(entries(trace, "X"), key=lambda entry: (entry[2], entry[3])) == [
        ("round 0", 3, 0, 10.0e6, 11.0e6),
        ("waited", 3, 0, 17.0e6, 3.0e6),
        ("control", 3, 1, 17.0e6, 3.0e6),
        ("packed", 3, 2, 10.5e6, 0.5e6),
        ("in flight", 3, 2, 11.0e6, 3.0e6),
        ("in flight", 3, 3, 15.0e6, 4.0e6),
    ]
    assert entries(trace, "i") == [("bucket ready", 3, 2, 10.5e6, None)]
    names = {
        (entry["name"], entry["pid"], entry["tid"]): entry["args"]
        for entry in trace["traceEvents"]
        if entry["ph"] == "M"
    }
    assert names["process_name", 3, 0] == {"name": "rank 3"}
    assert names["thread_name", 3, 0] == {"name": "backward"}
    assert names["thread_name", 3, 1] == {"name": "control message"}
    assert names["thread_name", 3, 3] == {"name": "bucket 1"}


def test_spans_of_one_thread_nest_or_follow_each_other():
    trace = timeline_of(one_round(), one_round(1, start_s=40.0)).to_chrome_trace()
    spans = entries(trace, "X")
    for _, pid, tid, begin, duration in spans:
        for _, other_pid, other_tid, other_begin, other_duration in spans:
            if (pid, tid) == (other_pid, other_tid) and begin < other_begin < begin + duration:
                assert other_begin + other_duration <= begin + duration


def test_the_parameters_of_a_bucket_are_in_its_entries():
    trace = timeline_of(one_round()).to_chrome_trace()
    (entry,) = [entry for entry in trace["traceEvents"] if entry["name"] == "in flight" and entry["tid"] == 2]
    assert entry["args"] == {"round": 0, "bytes": 8, "parameters": 2, "first": "c", "last": "b"}


def test_a_launch_that_never_ended_is_an_instant():
    trace = timeline_of(one_round()[:3]).to_chrome_trace()
    assert ("launched, and never done", 0, 2, 11.0e6, None) in entries(trace, "i")
    assert entries(trace, "X") == [("packed", 0, 2, 10.5e6, 0.5e6)]


def test_a_saved_trace_is_json_and_nothing_lies_beside_it(tmp_path):
    timeline = timeline_of(one_round())
    timeline.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == timeline.to_chrome_trace()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_cannot_be_saved_leaves_the_old_one(tmp_path):
    path = tmp_path / "trace.json"
    timeline_of(one_round()).save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        timeline_of([Event("round began", 0.0, 0, 0), Event("bucket ready", 0.0, 0, 0, 0, {1})]).save(path)
    assert path.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_traces_of_ranks_of_one_host_are_merged_as_they_are(tmp_path):
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    timelines = [timeline_of(one_round(rank=rank)) for rank in range(2)]
    for path, timeline in zip(paths, timelines, strict=True):
        timeline.save(path)
    merge_traces(paths, tmp_path / "all.json")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert merged["traceEvents"] == [
        entry for timeline in timelines for entry in timeline.to_chrome_trace()["traceEvents"]
    ]


def test_traces_of_another_host_are_placed_by_wall_time(tmp_path):
    here = timeline_of(one_round(rank=0)).to_chrome_trace()
    there = timeline_of(one_round(rank=1)).to_chrome_trace()
    here["otherData"] |= {"host": "a", "wall_offset_s": 1000.0}
    there["otherData"] |= {"host": "b", "wall_offset_s": 1002.0}  # its clock started two seconds later
    for name, trace in (("here", here), ("there", there)):
        (tmp_path / name).write_text(json.dumps(trace))
    merge_traces([tmp_path / "here", tmp_path / "there"], tmp_path / "all")
    merged = json.loads((tmp_path / "all").read_text())
    began = [(entry[1], entry[3]) for entry in entries(merged, "X") if entry[0] == "round 0"]
    assert began == [(0, 10.0e6), (1, 12.0e6)]


@pytest.mark.parametrize("text", ["nothing", "[]", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {}}'])
def test_a_file_that_is_no_trace_of_ours_is_named(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(TimelineError, match=r"other\.json: expected a trace as Timeline\.save writes it, but it is"):
        merge_traces([path], tmp_path / "all.json")


def test_merging_nothing_is_refused(tmp_path):
    with pytest.raises(TimelineError, match=r"^merge_traces got no files; expected those that the ranks have saved\.$"):
        merge_traces([], tmp_path / "all.json")


def test_a_timeline_knows_the_way_from_its_clock_to_wall_time():
    assert abs(Timeline().wall_offset_s + time.perf_counter() - time.time()) < 60.0
