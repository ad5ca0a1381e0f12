"""Every example learns, and ends with the same weights however it is started."""

import gzip
import importlib.util
import re
import shlex
import signal

import numpy
import pytest
import torch

from support.commands import PACELINE, processes_with, start, wait_until
from support.examples import EXAMPLES, PROJECT, commands_of, largest_difference, run_as_typed, run_forked

pytestmark = pytest.mark.slow

# What makes an example small, the pattern of its last figure, and the least that this is.
SMALL = {
    "dataparallel": (["--epochs=2"], r"epoch 1: .* ([\d.]+)% of 359 test digits right", 85),
    "digits": (["--epochs=3"], r"epoch 2: ([\d.]+)% of 359 test digits right", 80),
    "mnist": (["--epochs=2", "--batch-size=40", "--dtype=float64"], r"epoch 1: .* ([\d.]+)% of 200 test images", 50),
    "pipeline": (["--epochs=1", "--dtype=float64"], r"epoch 0: .* ([\d.]+)% of 359 test digits right", 85),
    "unet": (
        ["--epochs=4", "--images=64", "--size=24", "--dtype=float64"],
        r"epoch 3: Dice of discs .*, of squares ([\d.]+), of 101 test images",
        0.6,
    ),
}
CURVES = {"mnist": [b"loss", b"accuracy"], "unet": [b"Dice/discs", b"Dice/squares", b"images and classes found"]}


@pytest.mark.parametrize("name", SMALL)
def test_it_learns_and_ends_with_the_same_weights_however_it_is_started(tmp_path, name):
    small, figure, least = SMALL[name]
    weights = []
    for command in commands_of(EXAMPLES / f"{name}.py"):
        weights.append(tmp_path / f"{len(weights)}.pt")
        more = [*small, "--save", weights[-1]]
        starts_ranks_itself = "--ranks" in command
        if name == "mnist":
            more += ["--data", write_mnist(tmp_path, as_keras=starts_ranks_itself)]
        if name in CURVES and command.startswith("paceline") and importlib.util.find_spec("tensorboard"):
            more += ["--logs", tmp_path / "curves"]
        is_typed = starts_ranks_itself or (command.startswith("paceline") and name != "mnist")
        out = (run_as_typed if is_typed else run_forked)(command, *more)
        (found,) = re.findall(figure, out)  # one rank prints
        assert float(found) >= least, out
    assert len(weights) > 1
    assert max(largest_difference(weights[0], other) for other in weights[1:]) < 1e-5
    for file in (tmp_path / "curves").glob("*"):  # where tensorboard is installed
        assert all(tag in file.read_bytes() for tag in CURVES[name])


def write_mnist(folder, *, as_keras):
    """600 of scikit-learn's digits as if they were MNIST's: its four files, packed and not, or the one of Keras."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = numpy.kron(digits.images[:600] * 15, numpy.ones((3, 3)))
    images = numpy.pad(images, [(0, 0), (2, 2), (2, 2)]).astype(numpy.uint8)
    labels = digits.target[:600].astype(numpy.uint8)
    if as_keras:
        parts = {"x_train": images[:400], "y_train": labels[:400], "x_test": images[400:], "y_test": labels[400:]}
        numpy.savez(folder / "mnist.npz", **parts)
        return folder / "mnist.npz"
    (folder / "idx").mkdir(exist_ok=True)
    for name, part in (("train", slice(400)), ("t10k", slice(400, 600))):
        size = len(images[part]).to_bytes(4, "big")
        data = b"\0\0\x08\x03" + size + (28).to_bytes(4, "big") * 2 + images[part].tobytes()
        (folder / "idx" / f"{name}-images-idx3-ubyte").write_bytes(data)
        packed = gzip.compress(b"\0\0\x08\x01" + size + labels[part].tobytes())
        (folder / "idx" / f"{name}-labels-idx1-ubyte.gz").write_bytes(packed)
    return folder / "idx"


def test_mnist_has_digits_where_it_is_given_none():
    out = run_forked("python examples/mnist.py", "--epochs=1")
    assert float(re.fullmatch(r"epoch 0: loss [\d.]+, ([\d.]+)% of 297 test images right\n", out)[1]) > 60


def test_digits_takes_images_and_labels_of_your_own_and_compare_tells_how_far_runs_are_apart(tmp_path):
    random = numpy.random.default_rng(0)
    images = random.integers(0, 256, (50, 28, 28), dtype=numpy.uint8)
    numpy.savez(tmp_path / "own.npz", images=images, labels=random.integers(0, 10, 50))
    more = ["--epochs=1", "--batch-size=20", "--data", tmp_path / "own.npz", "--save", tmp_path / "own.pt"]
    out = run_forked("python examples/digits.py", *more)
    assert re.fullmatch(r"epoch 0: [\d.]+% of 10 test digits right\n[\d,]+ samples/s on 1 x (cpu|cuda)\n", out)
    same = run_forked("python examples/compare.py", tmp_path / "own.pt", tmp_path / "own.pt")
    assert same == "largest relative difference of the final parameters: 0.0e+00 (equal up to rounding)\n"
    torch.save({"weight": torch.tensor([1.0, 4.0])}, tmp_path / "a.pt")
    torch.save({"weight": torch.tensor([1.0, 2.0])}, tmp_path / "b.pt")
    with pytest.raises(AssertionError, match=r"SystemExit: True"):
        run_forked("python examples/compare.py", tmp_path / "a.pt", tmp_path / "b.pt")


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_script_for_apex_learns_on_every_level(level):
    two_ranks, one = commands_of(EXAMPLES / "apex_amp.py")
    command = {"O1": two_ranks, "O2": one}.get(level, re.sub("O[0-3]", level, two_ranks))
    assert command.endswith(level)
    out = run_forked(command, "--epochs=2")
    assert float(re.findall(r"(?m)^epoch 1: ([\d.]+)% of 297 test digits right$", out)[0]) > 70
    assert out.endswith(f"{level}: 0 steps skipped, since gradients had overflowed\n")


@pytest.mark.timeout(240)  # five trainings
def test_gpt_ends_with_the_weights_of_one_process_also_if_it_was_killed_and_had_to_make_room(tmp_path):
    one, two = commands_of(EXAMPLES / "gpt.py")
    small = ["--every=10", "--batch-size=16", "--context=24", "--layers=1", "--dtype=float64"]

    def more(name, num_steps):
        return [*small, f"--steps={num_steps}", "--folder", tmp_path / name, "--save", tmp_path / f"{name}.pt"]

    begins = []
    for signum, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGUSR1, 75)):
        known = set((tmp_path / "disturbed").glob("step-*.pt"))
        process = start([*PACELINE, *shlex.split(two)[1:], *map(str, more("disturbed", 100_000))], cwd=PROJECT)
        wait_until(lambda known=known: set((tmp_path / "disturbed").glob("step-*.pt")) - known, 60.0)
        process.send_signal(signum)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, out + err
        wait_until(lambda: not processes_with(str(tmp_path)))
        begins += re.findall(r"begins after step (\d+)", out)
    got_to = max(int(path.stem.split("-")[1]) for path in (tmp_path / "disturbed").glob("step-*.pt"))
    num_steps = max(60, 10 * (got_to // 10 + 1))
    begins += re.findall(r"begins after step (\d+)", run_forked(two, *more("disturbed", num_steps)))
    assert 0 == int(begins[0]) < int(begins[1]) < int(begins[2]) == got_to
    out = run_forked(one, *more("one", num_steps))
    assert float(re.findall(r"step 60: .* ([\d.]+) bits a character in the test", out)[0]) < 4.3  # 6.6 to begin with
    run_forked(two, *more("two", num_steps))
    assert largest_difference(tmp_path / "two.pt", tmp_path / "disturbed.pt") == 0
    assert largest_difference(tmp_path / "two.pt", tmp_path / "one.pt") < 1e-5
