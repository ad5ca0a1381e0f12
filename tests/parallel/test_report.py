"""What a reducer tells its observers, and what a wrapper reports of itself.

Two ranks unless stated; each parameter is a bucket of its own, so the second layer's weight is bucket 0 and the first's
is bucket 1.
"""

import copy
import io
import re
from collections import Counter
from typing import ClassVar

import pytest
import rich.console
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel
from paceline.errors import ObserverError
from paceline.parallel.ddp.report import size_text
from paceline.timeline import Event, Timeline
from support.models import TwoLayers, inputs
from support.ranks import expect_errors, run_ranks


def wrap(module, **kwargs):
    return DistributedDataParallel(module, bucket_cap_mb=0, **kwargs)


def told(events, number):
    """Kinds and buckets of one round."""
    return [(event.kind, event.bucket) for event in events if event.round == number]


def step(wrapped, loss):
    wrapped.zero_grad()
    loss().backward()


LAUNCHES = [("bucket ready", 0), ("launched", 0), ("bucket ready", 1), ("launched", 1)]
WAIT = [("control", None), ("done", 0), ("done", 1), ("waited", None)]
PLAIN = [("round began", None), *LAUNCHES, *WAIT, ("round ended", None)]

# -- sequences of events -------------------------------------------------------------------------------------------


def plain(world):
    timeline = Timeline()
    wrapped = wrap(TwoLayers(), observer=timeline)
    for _ in range(3):
        step(wrapped, lambda: wrapped(inputs(world)))
    return list(timeline)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_round_of_two_buckets(backend):
    for rank, events in enumerate(run_ranks(2, plain, backend=backend)):
        assert told(events, 0) == [*PLAIN[:-1], ("replanned", None), PLAIN[-1]]  # the order has been learnt
        assert told(events, 1) == told(events, 2) == PLAIN
        assert {event.rank for event in events} == {rank}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_events_say_of_buckets_bytes_and_times(backend):
    for events in run_ranks(2, plain, backend=backend):
        last = {(event.kind, event.bucket): event for event in events if event.round == 2}
        for kind in ("bucket ready", "launched", "done"):
            assert (last[kind, 0].params, last[kind, 0].size_bytes) == (("second.weight",), 4)
            assert (last[kind, 1].params, last[kind, 1].size_bytes) == (("first.weight",), 4)
        assert last["round began", None].size_bytes == 8
        assert last["control", None].size_bytes == 2 + 2 + 3 + 32  # used, late, three flags, digests and their mirrors
        for bucket in (0, 1):
            times = [last[kind, bucket].time_s for kind in ("bucket ready", "launched", "done")]
            assert times == sorted(times)
        assert last["waited", None].time_s >= last["launched", 1].time_s
        assert last["done", 1].time_s <= last["waited", None].end_s <= last["round ended", None].time_s


def unused(world):
    timeline = Timeline()
    model = TwoLayers()
    wrapped = wrap(model, observer=timeline)
    for _ in range(3):
        step(wrapped, lambda: model.second(inputs(world)))
    return list(timeline), wrapped.report().unused


def test_an_unused_parameters_bucket_is_launched_at_the_end_and_then_not_waited_for():
    for events, names in run_ranks(2, unused):
        expected = [("round began", None), ("bucket ready", 0), ("launched", 0), ("launched", 1)]
        expected += [*WAIT, ("round ended", None)]
        assert told(events, 1) == told(events, 2) == expected
        assert names == ("first.weight",)


class Late(TwoLayers):
    """Backward meets a checkpoint that runs ``first`` again, after ``first`` has had its gradient."""

    def forward(self, x):
        return self.second(self.first(checkpoint(self.first, x, use_reentrant=True)))


def late(world):
    timeline = Timeline()
    wrapped = wrap(Late(), observer=timeline)
    for _ in range(2):
        step(wrapped, lambda: wrapped(inputs(world).requires_grad_()))
    return list(timeline), [param.grad.item() for param in wrapped.parameters()], wrapped.report().num_late


def test_a_late_gradient_is_told_with_its_name():
    for events, grads, num_late in run_ranks(2, late):
        assert told(events, 1) == [*PLAIN[:-1], ("late", 1), PLAIN[-1]]
        assert [event.params for event in events if event.kind == "late"] == [("first.weight",)] * 2
        assert grads == [3.0, 1.5]  # d(w2 w1 w1 x) / dw1 = 2x; 1.5 on average
        assert num_late == 2


def late_on_one(world):
    timeline = Timeline()
    wrapped = wrap(Late() if world.is_main else TwoLayers(), observer=timeline)
    step(wrapped, lambda: wrapped(inputs(world).requires_grad_()))
    return [(event.kind, event.bucket, event.params) for event in timeline if event.kind == "late"]


def test_a_gradient_that_is_late_on_one_rank_is_told_on_all_and_named_on_that_one():
    assert run_ranks(2, late_on_one) == [[("late", 1, ("first.weight",))], [("late", 1, ())]]


def accumulated(world):
    timeline = Timeline()
    wrapped = wrap(TwoLayers(), observer=timeline)
    step(wrapped, lambda: wrapped(inputs(world)))
    before = len(timeline)
    with wrapped.no_sync():
        wrapped(inputs(world)).backward()
    within = len(timeline) - before
    wrapped(inputs(world)).backward()
    return within, list(timeline)


def test_backwards_in_no_sync_tell_nothing():
    for within, events in run_ranks(2, accumulated):
        assert within == 0
        assert told(events, 1) == PLAIN


def replaced(world):
    timeline = Timeline()
    model = TwoLayers()
    wrapped = wrap(model, observer=timeline)
    step(wrapped, lambda: wrapped(inputs(world)))
    model.second.weight = nn.Parameter(torch.ones(1, 1))
    for _ in range(2):
        step(wrapped, lambda: wrapped(inputs(world)))
    report = wrapped.report()
    return list(timeline), (report.num_rounds, report.num_replans, report.num_late, report.num_unplanned)


def test_a_replaced_weight_is_agreed_on_and_averaged_beside_the_plan():
    for events, counts in run_ranks(2, replaced):
        assert told(events, 1) == [
            ("round began", None),
            # of the old second layer's weight nothing comes, and the first's waits for it
            ("bucket ready", 1),
            ("launched", 0),
            ("launched", 1),
            *WAIT,
            ("replanned", None),
            ("control", None),
            ("unplanned", None),
            ("round ended", None),
        ]
        (unplanned,) = [event for event in events if event.kind == "unplanned"]
        assert (unplanned.params, unplanned.size_bytes) == (("second.weight",), 4)
        assert told(events, 2) == [*PLAIN[:-1], ("replanned", None), PLAIN[-1]]  # the order is learnt anew
        assert counts == (3, 3, 0, 1)


def sparse(world):
    timeline = Timeline()
    model = nn.Sequential(nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1, bias=False))
    wrapped = wrap(model, observer=timeline)
    for _ in range(2):
        step(wrapped, lambda: wrapped(torch.tensor([world.rank])).sum())
    return list(timeline), [bucket.kind for bucket in wrapped.report().buckets]


def test_a_sparse_gradient_is_launched_in_the_wait():
    for events, kinds in run_ranks(2, sparse):
        expected = [("round began", None), ("bucket ready", 0), ("launched", 0), ("bucket ready", 1)]
        expected += [("control", None), ("done", 0), ("launched", 1), ("done", 1), ("waited", None)]
        assert told(events, 1) == [*expected, ("round ended", None)]
        assert kinds == ["shared", "sparse"]


def hooked(world):
    timeline = Timeline()
    wrapped = wrap(TwoLayers(), observer=timeline)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        step(wrapped, lambda: wrapped(inputs(world)))
    report = wrapped.report()
    return list(timeline), [bucket.kind for bucket in report.buckets], report.detects_drift


def test_a_hooks_reductions_are_told_like_others():
    for events, kinds, detects_drift in run_ranks(2, hooked):
        assert told(events, 0)[0] == ("replanned", None)
        assert told(events, 1) == PLAIN
        assert kinds == ["hooked", "hooked"]
        assert not detects_drift


def joined(world):
    timeline = Timeline()
    wrapped = wrap(TwoLayers(), observer=timeline)
    with wrapped.join():
        for _ in range(1 + world.rank):
            step(wrapped, lambda: wrapped(inputs(world)))
    return [event.round for event in timeline if event.kind == "round ended"]


def test_a_rank_that_has_run_out_of_data_tells_of_the_others_rounds():
    assert run_ranks(2, joined) == [[0, 1]] * 2


# -- setting and clearing ------------------------------------------------------------------------------------------


def set_and_cleared(world):
    first, second = [], []
    wrapped = wrap(TwoLayers(), observer=first.append)
    for observer in (first.append, second.append, None):
        wrapped.observe(observer)
        step(wrapped, lambda: wrapped(inputs(world)))
    return [{event.round for event in events} for events in (first, second)]


def test_an_observer_hears_of_the_rounds_between_setting_and_clearing():
    assert run_ranks(2, set_and_cleared) == [[{0}, {1}]] * 2


def cleared_within(world):
    events = []
    wrapped = wrap(TwoLayers())

    def observe(event):
        events.append((event.kind, event.bucket))
        if event.kind == "launched":
            wrapped.observe(None)

    wrapped.observe(observe)
    for _ in range(2):
        step(wrapped, lambda: wrapped(inputs(world)))
    return events, [param.grad.item() for param in wrapped.parameters()]


def test_an_observer_may_take_itself_away():
    expected = [("round began", None), ("bucket ready", 0), ("launched", 0)]
    assert run_ranks(2, cleared_within) == [(expected, [1.5, 1.5])] * 2


def replaced_within(world):
    later = []
    wrapped = wrap(Late())

    def observe(event):
        if event.kind == "launched":
            wrapped.observe(later.append)

    wrapped.observe(observe)
    for _ in range(2):
        step(wrapped, lambda: wrapped(inputs(world).requires_grad_()))
    return [event.kind for event in later if event.round == 0], told(later, 1)


def test_an_observer_that_is_set_within_a_round_hears_of_the_next():
    assert run_ranks(2, replaced_within) == [(["replanned"], [*PLAIN[:-1], ("late", 1), PLAIN[-1]])] * 2


def profiled(world):
    outer = []
    wrapped = wrap(TwoLayers(), observer=outer.append)
    step(wrapped, lambda: wrapped(inputs(world)))
    unmeasured = wrapped.report().measured
    with wrapped.profile() as timeline:
        for _ in range(3):
            step(wrapped, lambda: wrapped(inputs(world)))
    step(wrapped, lambda: wrapped(inputs(world)))
    rounds = [sorted({event.round for event in events}) for events in (timeline, outer)]
    return rounds, unmeasured, wrapped.report().measured


def test_profile_measures_the_rounds_in_its_block_beside_another_observer():
    for rounds, unmeasured, measured in run_ranks(2, profiled):
        assert rounds == [[1, 2, 3], [0, 1, 2, 3, 4]]
        assert unmeasured is None
        assert measured.num_rounds == 3
        assert measured.in_flight_s > 0
        assert measured.exposed_s > 0
        assert 0 <= measured.overlap <= 1


def copied(world):
    wrapped = wrap(TwoLayers(), observer=Timeline())
    step(wrapped, lambda: wrapped(inputs(world)))
    twin = copy.deepcopy(wrapped)
    before = str(twin.report())
    step(twin, lambda: twin(inputs(world)))
    return before, twin.report().measured, twin.report().num_rounds


def test_a_copy_is_observed_by_nobody_and_says_that_it_has_not_joined():
    expected = (
        "DistributedDataParallel, rank 1 of 2, gradients over gloo\n"
        "buckets: none yet; this copy joins the other ranks in its first training forward"
    )
    assert run_ranks(2, copied, backend="gloo")[1] == (expected, None, 1)


class Counting(nn.Parameter):
    """A parameter that counts how often its attributes are looked at."""

    seen: ClassVar[Counter] = Counter()

    def __getattribute__(self, name):
        Counting.seen[name] += 1
        return super().__getattribute__(name)


def looked_at(world):
    """How often attributes of 40 parameters are looked at in a backward: never observed, observed, and not any more."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(40)]
    for layer in layers:
        layer.weight = Counting(layer.weight.detach())
    wrapped = DistributedDataParallel(nn.Sequential(*layers))
    counts = []
    for observer in (None, None, None, Timeline(), None):
        wrapped.observe(observer)
        output = wrapped(torch.ones(1, 2)).sum()
        wrapped.zero_grad()
        Counting.seen.clear()
        output.backward()
        counts.append(Counting.seen.copy())
    return counts[2:]


def test_observing_looks_at_no_parameter_in_a_round():
    for never, observed, no_more in run_ranks(2, looked_at):
        assert never == no_more
        # Sizes are noted when an observer first sees a plan; each of these calls asks for __torch_function__.
        assert observed - never == Counter({"numel": 40, "element_size": 40, "__torch_function__": 80})


# -- exceptions in observers ---------------------------------------------------------------------------------------


def angry(event):
    if (event.kind, event.bucket, event.rank) == ("launched", 1, 0):
        raise ValueError("no more events, please")


def disturbed(world):
    wrapped = wrap(TwoLayers(), observer=angry)
    message, cause = "", None
    try:
        step(wrapped, lambda: wrapped(inputs(world)))
    except ObserverError as error:
        message, cause = str(error), type(error.__cause__).__name__
    grads = [param.grad.item() for param in wrapped.parameters()]
    wrapped.observe(None)
    step(wrapped, lambda: wrapped(inputs(world)))
    return message, cause, grads, [param.grad.item() for param in wrapped.parameters()]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_an_observer_that_raises_is_named_when_the_round_has_ended_and_training_goes_on(backend):
    first, second = run_ranks(2, disturbed, backend=backend)
    assert first[0] == (
        "rank 0: the observer 'angry' raised ValueError at 'launched' of bucket 1 in round 0: no more events, please. "
        "The gradients are averages all the same; after that event no observer was told anything more of the round. "
        "Mend it, or take it away with observe(None)."
    )
    assert first[1:] == ("ValueError", [1.5, 1.5], [1.5, 1.5])
    assert second == ("", None, [1.5, 1.5], [1.5, 1.5])


class Furious:
    def __call__(self, event):
        raise KeyError("x")


def two_wrappers(world):
    models = [TwoLayers(), TwoLayers()]
    wrapped = [wrap(model, observer=Furious()) for model in models]
    try:
        sum(model(inputs(world)) for model in wrapped).backward()
    finally:
        world.print([param.grad.item() for model in models for param in model.parameters()])
        assert all(param.grad.item() == 1.5 for model in models for param in model.parameters())


def test_all_wrappers_of_a_backward_finish_before_an_observers_error_is_raised():
    for message in expect_errors(2, two_wrappers):
        assert re.match(
            r"ObserverError: rank \d: the observer 'Furious' raised KeyError at 'round began' in round 0: 'x'\.",
            message,
        )


def disturbed_shadow(world):
    wrapped = wrap(TwoLayers(), observer=Furious() if world.is_main else None)
    message = ""
    with wrapped.join():
        for _ in range(2 * world.rank):
            step(wrapped, lambda: wrapped(inputs(world)))
    return message


def test_an_observer_that_raises_on_a_rank_without_data_is_named_too():
    with pytest.raises(AssertionError, match="ObserverError: rank 0: the observer 'Furious' raised KeyError"):
        run_ranks(2, disturbed_shadow)


# -- reports -------------------------------------------------------------------------------------------------------


def reported(world):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1))
    wrapped = DistributedDataParallel(model, bucket_cap_mb_list=[0.001, 0.25])
    before = str(wrapped.report())
    with wrapped.profile():
        for _ in range(2):
            step(wrapped, lambda: wrapped.module[1:](torch.ones(4, 256)).sum())
    console = rich.console.Console(file=io.StringIO(), width=100, color_system=None)
    console.print(wrapped.report())
    return before, str(wrapped.report()), console.file.getvalue(), wrapped.report()


def test_a_report_lists_buckets_and_says_how_it_went():
    before, after, by_rich, report = run_ranks(2, reported, backend="gloo")[1]
    assert before == (
        "DistributedDataParallel, rank 1 of 2, gradients over gloo\n"
        "bucket  parameters          number     size  dtype    kind\n"
        "     0  2.bias .. 1.bias         3    2 KiB  float32  dense\n"
        "     1  1.weight                 1  256 KiB  float32  dense\n"
        "     2  0.bias .. 0.weight       2  257 KiB  float32  dense\n"
        "caps: 1 KiB, 256 KiB\n"
        "rounds: 0, new plans 0, buckets reduced again 0, rounds with unplanned gradients 0\n"
        "drift detection: on\n"
        "overlap: not measured; use `with model.profile() as timeline: ...` around some steps"
    )
    assert "rounds: 2, new plans 1, buckets reduced again 0, rounds with unplanned gradients 0\n" in after
    assert "unused in the last round: 0.bias, 0.weight\n" in after
    assert re.search(
        r"overlap: communication \d+\.\d\d ms a round, \d+% of it hidden; "
        r"exposed wait \d+\.\d\d ms \(medians of 2 rounds\)$",
        after,
    )
    assert re.search(r"│ +1 │ 1.weight +│ +1 │ +256 KiB │ float32 │ dense +│", by_rich)
    assert "drift detection: on" in by_rich
    assert (report.rank, report.world_size, report.backend, report.caps_bytes) == (1, 2, "gloo", (1048, 262144))
    assert (report.buckets[0].first, report.buckets[0].last) == ("2.bias", "1.bias")


def test_a_world_of_one_has_nothing_to_reduce(world_of_one):
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    with wrapped.profile() as timeline:
        wrapped(torch.ones(1, 1)).backward()
    assert str(wrapped.report()) == "DistributedDataParallel in a world of one: there is nothing to reduce."
    assert list(timeline) == []
    console = rich.console.Console(file=io.StringIO(), width=100)
    console.print(wrapped.report())
    assert console.file.getvalue().strip() == str(wrapped.report())


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (25 << 20, "25 MiB"), (5 << 30, "5 GiB"), (3 << 40, "3072 GiB")],
)
def test_sizes_are_told_in_the_largest_unit(size_bytes, text):
    assert size_text(size_bytes) == text


def test_an_observer_is_anything_that_takes_an_event():
    events = []
    observer = events.append
    observer(Event("round began", 0.0, 0, 0))
    assert events[0].end_s == 0.0
