"""Where ranks are, in words, from dumps as faulthandler writes them."""

import pathlib
import sysconfig
import textwrap

import pytest

import paceline
from paceline.launch.hangs.stacks import Answer, Frame, collective_of, describe_stacks, is_in_backward, parse, shorten
from paceline.waits import Wait

TORCH = f"{sysconfig.get_path('purelib')}/torch"
STDLIB = sysconfig.get_path("stdlib")
OWN = str(pathlib.Path(paceline.__file__).parent)

# Rank 0 of two in a barrier over Gloo, with a thread of the user's and one of a library's.
BARRIER = textwrap.dedent(f"""\
    Thread 0x00007f0000000001 (most recent call first):
      File "/job/train.py", line 5 in watch
      File "{STDLIB}/threading.py", line 982 in run
      File "{STDLIB}/threading.py", line 1045 in _bootstrap_inner
      File "{STDLIB}/threading.py", line 1002 in _bootstrap

    Thread 0x00007f0000000002 (most recent call first):
      <no Python frame>

    Thread 0x00007f0000000003 [tqdm] (most recent call first):
      File "{STDLIB}/threading.py", line 331 in wait
      File "{STDLIB}/threading.py", line 1002 in _bootstrap

    Current thread 0x00007f0000000009 (most recent call first):
      File "{TORCH}/distributed/distributed_c10d.py", line 5356 in barrier
      File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
      File "/job/train.py", line 15 in step
      File "{TORCH}/nn/modules/module.py", line 1779 in _call_impl
      File "/job/train.py", line 19 in <module>
      File "{OWN}/launch/ranks/program.py", line 50 in run
      File "<string>", line 1 in <module>
    """)
MAIN = 0x00007F0000000009


def no_source(path: str, line: int) -> str:
    return ""


def frames(*places: tuple[str, str]) -> tuple[Frame, ...]:
    return tuple(Frame(path, n, function) for n, (path, function) in enumerate(places, 1))


def describe(*answers: Answer) -> tuple[str, str]:
    return describe_stacks(answers, now_s=100.0, folder="/job", source=no_source)


def test_the_main_thread_is_told_from_the_users_others_and_libraries_are_dropped():
    main, others = parse(BARRIER, MAIN)
    assert [frame.function for frame in main] == [
        "barrier", "wrapper", "step", "_call_impl", "<module>", "run", "<module>",
    ]  # fmt: skip
    assert [[frame.function for frame in stack] for stack in others] == [
        ["watch", "run", "_bootstrap_inner", "_bootstrap"]
    ]


def test_what_is_no_dump_has_no_stack():
    assert parse("", MAIN) == ((), ())
    assert parse('Current thread 0x0000000000000009 (most recent call first):\n  File "/a.py", li', 9) == ((), ())


def test_the_users_calls_stay_and_the_librarys_that_they_made():
    main, _ = parse(BARRIER, MAIN)
    assert [(frame.module or frame.path, frame.function) for frame in shorten(main)] == [
        ("torch/distributed/distributed_c10d.py", "barrier"),
        ("/job/train.py", "step"),
        ("/job/train.py", "<module>"),
    ]


def test_a_stack_of_libraries_alone_stays_whole():
    stack = frames((f"{STDLIB}/threading.py", "wait"), (f"{STDLIB}/threading.py", "_shutdown"))
    assert shorten(stack) == stack


def test_a_stack_without_end_is_cut():
    assert len(shorten(frames(*[("/job/train.py", "f")] * 100))) == 30


@pytest.mark.parametrize(
    ("places", "source", "call"),
    [
        ([(f"{TORCH}/distributed/distributed_c10d.py", "all_reduce")], "", "torch.distributed.all_reduce"),
        (
            [
                (f"{TORCH}/distributed/rendezvous.py", "_create_c10d_store"),
                (f"{TORCH}/distributed/distributed_c10d.py", "init_process_group"),
            ],
            "",
            "torch.distributed.init_process_group",
        ),
        ([(f"{TORCH}/futures/__init__.py", "wait")], "", "torch.futures.wait"),
        ([(f"{TORCH}/distributed/checkpoint/filesystem.py", "write")], "", ""),
        ([(f"{TORCH}/nn/functional.py", "linear")], "", ""),
        (
            [
                (f"{OWN}/comm/engine/engine.py", "_wait_until"),
                (f"{OWN}/comm/group/work.py", "wait"),
                (f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"),
            ],
            "",
            "paceline.comm.wait",
        ),
        ([(f"{OWN}/parallel/reducer.py", "arrived")], "", ""),
        ([("/job/train.py", "step")], "    work.wait()\n", "wait()"),
        ([("/job/train.py", "culprit")], "    time.sleep(60)\n", ""),
        ([], "", ""),
    ],
)
def test_the_collective_is_named_after_the_call_that_the_user_knows(places, source, call):
    assert collective_of(frames(*places), lambda path, line: source) == call


def test_a_backward_is_known_by_its_innermost_frame():
    assert is_in_backward(frames((f"{TORCH}/autograd/graph.py", "_engine_run_backward"), ("/job/train.py", "step")))
    assert not is_in_backward(frames(("/job/train.py", "hook"), (f"{TORCH}/autograd/graph.py", "backward")))


def test_equal_stacks_are_told_once_and_who_waits_for_nobody_comes_last():
    main, threads = parse(BARRIER, MAIN)
    culprit = frames(("/job/data.py", "culprit"), ("/job/train.py", "<module>"))
    answers = [Answer(rank, culprit if rank == 1 else main, threads if rank == 3 else ()) for rank in range(5)]
    assert describe(*answers) == (
        "paceline: ranks 0, 2-4 in torch.distributed.barrier\n"
        "  torch/distributed/distributed_c10d.py:5356 in barrier\n"
        "  train.py:15 in step\n"
        "  train.py:19 in <module>\n"
        "  another thread of rank 3\n"
        "    train.py:5 in watch\n",
        "paceline: rank 1 in no collective\n  data.py:1 in culprit\n  train.py:2 in <module>\n",
    )


def test_waits_that_ranks_tell_of_are_told_with_who_has_not_come():
    stack = frames(("/job/train.py", "step"))
    waits = [Wait("all_reduce(sum)", "rank 2 has not come to it", since_s, 9) for since_s in (60.0, 70.0)]
    waiting, others = describe(*[Answer(rank, stack, waits=(waits[rank],)) for rank in range(2)], Answer(2, stack))
    assert waiting == (
        "paceline: ranks 0-1 for 40 s, in all_reduce(sum): rank 2 has not come to it\n  train.py:1 in step\n"
    )
    assert others == "paceline: rank 2 in no collective\n  train.py:1 in step\n"


def test_a_backward_counts_as_waiting_once_it_stands_still():
    stack = frames((f"{TORCH}/autograd/graph.py", "_engine_run_backward"))
    assert describe(Answer(0, stack))[1].startswith("paceline: rank 0 in no collective\n")
    assert describe(Answer(0, stack, stands_still=True))[0].startswith(
        "paceline: rank 0 in a backward that stands still\n"
    )


def test_a_rank_that_cannot_be_asked_says_why():
    assert describe(Answer(4, silence="not yet in its script")) == ("paceline: rank 4 not yet in its script\n", "")
