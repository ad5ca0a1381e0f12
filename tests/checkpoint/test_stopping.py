"""A launcher that is told to end has all ranks save at one step, and the next run goes on from there."""

import os
import signal

import pytest
import torch

from paceline.checkpoint import retention
from support.commands import PACELINE, start, wait_until, write_script

TRAIN = """
    import pathlib, sys, time
    import paceline

    class Total:
        value = 0
        def state_dict(self): return {"value": self.value}
        def load_state_dict(self, state): self.value = state["value"]

    folder = pathlib.Path(sys.argv[1])
    with paceline.init() as world:
        total = Total()
        with paceline.Checkpointer(folder / "runs", every=10**9, total=total) as checkpoints:
            first, is_over = checkpoints.resume(), False
            while not is_over:
                total.value += checkpoints.num_steps + 1
                is_over = checkpoints.step()
                (folder / f"at-{world.rank}").write_text(str(checkpoints.num_steps))
                time.sleep(0.002 * world.rank)  # ranks are never at one step at the same time
        print(f"rank {world.rank}: from {first} to {checkpoints.num_steps}, {total.value}, {is_over}")
"""


def run_until_told(folder, signum):
    """What the two ranks of a run say that is told to end once both have done a step."""
    script = write_script(folder, TRAIN)
    launcher = start([*PACELINE, "run", "-n", "2", script, str(folder)])
    marks = [folder / f"at-{rank}" for rank in range(2)]
    try:
        wait_until(lambda: all(mark.exists() for mark in marks), 60.0)
        launcher.send_signal(signum)
        out, err = launcher.communicate(timeout=60)
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.communicate()
    for mark in marks:
        mark.unlink()
    assert "rank 0: " in out, err
    return out


@pytest.mark.slow
def test_a_signal_to_the_launcher_is_one_checkpoint_at_one_step_and_the_next_run_goes_on(tmp_path):
    first = 0
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        out = run_until_told(tmp_path, signum)
        step, *_ = retention.steps_among(os.listdir(tmp_path / "runs"))
        assert step > first
        for rank in range(2):
            assert f"rank {rank}: from {first} to {step}, {step * (step + 1) // 2}, True" in out
        assert torch.load(tmp_path / "runs" / retention.name_of(step))["parts"]["total"] == {
            "value": step * (step + 1) // 2
        }
        first = step
    assert len(os.listdir(tmp_path / "runs")) == 2
