"""Every example runs, in small, in each of the ways that it names."""

import pathlib
import re
import subprocess
import sys

import numpy
import pytest

PROJECT = pathlib.Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples"
BIN = pathlib.Path(sys.executable).parent

WAYS = {
    "python": [sys.executable],
    "paceline run": [str(BIN / "paceline"), "run", "-n", "2"],
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
}


def run(*command, cwd):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_tested_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"compare.py", "digits.py"}


def test_examples_are_short_and_say_how_they_are_run():
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 60
        assert f"{path.name}" in text.split('"""')[1]


@pytest.mark.slow
def test_digits_runs_unchanged_in_three_ways_and_two_ranks_end_with_the_parameters_of_one_process(tmp_path):
    for way, command in WAYS.items():
        out = run(*command, EXAMPLES / "digits.py", "--epochs", 3, "--save", f"{way}.pt", cwd=tmp_path)
        accuracies = [
            float(found) for found in re.findall(r"^epoch \d+: ([\d.]+)% of 359 test digits right$", out, re.MULTILINE)
        ]
        assert len(accuracies) == 3  # one line an epoch: rank 0's
        assert accuracies[-1] > 80
        ranks = 1 if way == "python" else 2
        assert re.search(rf"^[\d,]+ samples/s on {ranks} x (cpu|cuda)$", out, re.MULTILINE)
    for way in ("paceline run", "torchrun"):
        out = run(sys.executable, EXAMPLES / "compare.py", f"{way}.pt", "python.pt", cwd=tmp_path)
        found = re.fullmatch(
            r"largest relative difference of the final parameters: (\S+) \(equal up to rounding\)\n", out
        )
        assert float(found[1]) < 1e-5


def test_digits_takes_images_and_labels_in_mnists_format(tmp_path):
    random = numpy.random.default_rng(0)
    images = random.integers(0, 256, (50, 28, 28), dtype=numpy.uint8)
    numpy.savez(tmp_path / "mnist.npz", images=images, labels=random.integers(0, 10, 50))
    out = run(sys.executable, EXAMPLES / "digits.py", "--data", "mnist.npz", "--epochs", 1, cwd=tmp_path)
    assert re.search(r"^epoch 0: [\d.]+% of 10 test digits right$", out, re.MULTILINE)
