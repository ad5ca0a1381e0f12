"""Scripts as people have them: they know torch alone, and give under paceline what one process gives.

They run as they are, and with one line changed, so that paceline's wrapper, backend or ``spawn`` takes torch's place.
"""

import contextlib
import json
import pathlib
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from support.commands import PACELINE, run_command

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"
RUN = (*PACELINE, "run", "-n", "2")
LAUNCH = (sys.executable, "-m", "paceline.launch", "--nproc_per_node=2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

AS_IT_IS = ()
OUR_WRAPPER = (
    "from torch.nn.parallel import DistributedDataParallel",
    "from paceline.parallel import DistributedDataParallel",
)
PATCHED = ("import torch\n", "import torch, paceline.parallel; paceline.parallel.patch_torch()\n")
OUR_SPAWN = ("import torch.multiprocessing as mp", "import paceline as mp")
OUR_BACKEND = ('"gloo"', '"shm"')

WHOLE = [list(range(32))]  # a batch of all samples


def alone(batches: Sequence[list[int]], *, lr: float = 0.1, momentum: float = 0.0) -> list[float]:
    """The loss of each batch in one process that trains what all the scripts train."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[batch]), x[batch].sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_script(
    command: Sequence[str], name: str, folder: pathlib.Path, *args: str, changes: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, Any], str]:
    """Run a script in ``folder``; what it has printed as JSON, and all that it has printed."""
    path = SCRIPTS / f"{name}.py"
    if changes:
        source = path.read_text()
        for torchs, ours in changes:
            assert source.count(torchs) == 1
            source = source.replace(torchs, ours)
        path = folder / f"{name}.py"
        path.write_text(source)
    environment = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    ran = run_command([*command, str(path), *args], cwd=folder, env=environment, timeout_s=100)
    assert ran.returncode == 0, ran.stderr
    (result,) = [json.loads(line[line.index("{") :]) for line in ran.stdout.splitlines() if "{" in line]
    return result, ran.stdout


@contextlib.contextmanager
def port_of_our_own() -> Iterator[str]:
    """A port that the kernel gives to nobody who does not ask for it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", 0))
        yield str(keeper.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "command", "changes"),
    [
        ("launched_local_rank", LAUNCH, AS_IT_IS),
        ("launched_local_rank_hyphenated", LAUNCH, AS_IT_IS),
        ("launched_environment", (*LAUNCH, "--use_env"), AS_IT_IS),
        ("launched_environment", TORCHRUN, [OUR_WRAPPER]),
        ("main_first", RUN, AS_IT_IS),
        ("main_first", RUN, [PATCHED]),
    ],
)
def test_scripts_for_a_launcher(tmp_path, name, command, changes):
    result, _ = run_script(command, name, tmp_path, changes=changes)
    assert result == {"loss": pytest.approx(alone(WHOLE * 3)[-1], rel=1e-5), "world_size": 2}
    if name == "main_first":
        assert (tmp_path / "downloads.log").read_text() == "downloaded\n"


@pytest.mark.slow
@pytest.mark.parametrize("changes", [AS_IT_IS, [OUR_WRAPPER]], ids=["as it is", "our wrapper"])
def test_workers_a_scaler_and_accumulation(tmp_path, changes):
    result, _ = run_script(RUN, "mixed_precision", tmp_path, changes=changes)
    assert result == {"loss": pytest.approx(alone(WHOLE * 3)[-1], rel=0.02), "world_size": 2}  # of bfloat16


@pytest.mark.slow
def test_an_optimizer_of_torchs_that_shards_its_state(tmp_path):
    result, _ = run_script(RUN, "zero", tmp_path, changes=[OUR_WRAPPER, OUR_BACKEND])
    assert result == {"loss": pytest.approx(alone(WHOLE * 3, momentum=0.9)[-1], rel=1e-5), "world_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [AS_IT_IS, [OUR_WRAPPER]], ids=["as it is", "our wrapper"])
def test_a_snapshot_is_gone_on_from_in_the_next_life(tmp_path, changes):
    command = (*RUN, "--max-restarts=1")
    result, out = run_script(command, "elastic", tmp_path, "4", "2", "--die-at=1", changes=changes)
    # Of epochs 0 to 3 every other is saved, and rank 1 dies when 1 ends.
    assert result == {"loss": pytest.approx(alone(WHOLE * 4)[-1], rel=1e-5), "world_size": 2, "first_epoch": 1}
    assert out.count("Resuming from epoch 1\n") == 2


@pytest.mark.slow
def test_a_script_that_spawns_with_our_wrapper(tmp_path):
    with port_of_our_own() as port:
        result, _ = run_script([sys.executable], "toy_ddp", tmp_path, port, changes=[OUR_WRAPPER])
    assert result == {"loss": pytest.approx(alone(WHOLE * 4)[-1], rel=1e-5), "world_size": 2}
    assert not (tmp_path / "model.checkpoint").exists()


@pytest.mark.slow
def test_a_script_that_spawns_through_us(tmp_path):
    with port_of_our_own() as port:
        arguments = ["-n", "1", "-g", "2", "-nr", "0", "--port", port]
        result, _ = run_script([sys.executable], "nodes_gpus", tmp_path, *arguments, changes=[OUR_SPAWN])
    assert result == {"loss": pytest.approx(alone(WHOLE * 3)[-1], rel=1e-5), "world_size": 2}


@pytest.mark.slow
def test_a_script_that_spawns_and_meets_at_a_port_of_its_own_may_be_launched(tmp_path):
    with port_of_our_own() as port:
        arguments = ["-n", "1", "-g", "2", "-nr", "0", "--port", port]
        result, _ = run_script([*PACELINE, "run"], "nodes_gpus", tmp_path, *arguments)
    assert result == {"loss": pytest.approx(alone(WHOLE * 3)[-1], rel=1e-5), "world_size": 2}


def batches_of_imagenet(epoch: int) -> list[list[int]]:
    """Of both ranks together: each takes four samples at a time, as torch's sampler deals them."""
    shares = []
    for rank in range(2):
        sampler = DistributedSampler(range(32), num_replicas=2, rank=rank)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    return [shares[0][i : i + 4] + shares[1][i : i + 4] for i in range(0, 16, 4)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_checkpoint_of_spawned_ranks_is_gone_on_from_by_launched_ones(tmp_path):
    losses = alone([*batches_of_imagenet(0), *batches_of_imagenet(1)], lr=0.05, momentum=0.9)
    with port_of_our_own() as port:
        spawned = ["--multiprocessing-distributed", "--world-size=1", "--rank=0", f"--dist-url=tcp://127.0.0.1:{port}"]
        result, _ = run_script([sys.executable], "imagenet", tmp_path, *spawned, "--epochs=1", changes=[PATCHED])
    assert result == {"loss": pytest.approx(sum(losses[:4]) / 4, rel=1e-5), "world_size": 2}
    launched = ["--dist-url=env://", "--resume=checkpoint.pth.tar"]
    result, _ = run_script(RUN, "imagenet", tmp_path, *launched)
    assert result == {"loss": pytest.approx(sum(losses[4:]) / 4, rel=1e-5), "world_size": 2}
