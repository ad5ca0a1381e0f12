"""What amp's levels hold in memory, and how long a step takes: O0 to O3.

    OMP_NUM_THREADS=1 python benchmarks/amp.py [--dtype bfloat16] [--device cuda] [--batches 8] [--rounds 8]

Bytes: on the CPU each storage is counted that torch's operations make, so the numbers are the same in every run; on a
GPU the allocator is asked. "weights" are the model's and their masters, "state" is Adam's, "gradients" those that there
are between backward and step, "peak" is the most at any moment of the third step; what is more than the rest is mostly
activations, and those ``--batches`` multiplies. The last column is the peak beside O0's. O3 steps by SGD with momentum:
Adam's epsilon is 0 in float16.

Time: the median over the rounds, in which the levels take turns. CPUs without instructions for half precision emulate
it, and are slower for it.

The last results, with their machine, are in docs/mixed-precision.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from ddp_step import MODELS
from torch import Tensor, nn

from paceline import amp
from paceline.parallel.data_parallel.meter import Ledger, keeping

LEVELS = ["O0", "O1", "O2", "O3"]


def make(level: str, build: Callable[[], tuple[nn.Module, Tensor]], options: argparse.Namespace) -> tuple:
    """A model under ``level``, its optimizer, and a step of theirs."""
    torch.manual_seed(0)
    model, x = build()
    model, x = model.to(options.device), torch.cat([x] * options.batches).to(options.device)
    kind = torch.optim.SGD if level == "O3" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=1e-4, **({"momentum": 0.9} if level == "O3" else {}))
    dtype = getattr(torch, options.dtype)
    types = {
        "O1": {"patch_torch_functions_type": dtype},
        "O2": {"cast_model_type": dtype},
        "O3": {"cast_model_type": dtype},
    }
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **types.get(level, {}))

    def backward() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return model, optimizer, backward


def bytes_of(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def measure(level: str, build: Callable[[], tuple[nn.Module, Tensor]], options: argparse.Namespace) -> list[int]:
    """Bytes of weights, state, gradients, and at the peak of a step."""
    ledger = Ledger()
    is_on_cpu = options.device == "cpu"
    before = 0 if is_on_cpu else torch.cuda.memory_allocated()
    with keeping(ledger):
        model, optimizer, backward = make(level, build, options)
        for _ in range(2):
            backward()
            optimizer.step()
        optimizer.zero_grad()
        ledger.peak_bytes.clear()
        if not is_on_cpu:
            torch.cuda.reset_peak_memory_stats()
        backward()
        params = [*model.parameters(), *amp.master_params(optimizer)]
        grads = [param.grad for param in params if param.grad is not None]
        gradient_bytes = bytes_of(grads)
        del grads
        optimizer.step()
    peak = ledger.peak_bytes[0] if is_on_cpu else torch.cuda.max_memory_allocated() - before
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    amp.deactivate()
    return [bytes_of([*params, *model.buffers()]), bytes_of(state), gradient_bytes, peak]


def seconds(steps: dict[str, Callable[[], None]], rounds: int, device: str) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if device != "cpu":
                torch.cuda.synchronize()
            if number:  # the first is for warming up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, default=1, help="how many batches of ddp_step's size at a time")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=0, help="of steps whose time is measured")
    options = parser.parse_args()
    print(f"{'MiB':28}{'weights':>10}{'state':>10}{'gradients':>12}{'peak':>10}{'peak / O0':>12}{'ms':>10}")
    for name in options.models:
        build = MODELS[name]
        rows = {level: measure(level, build, options) for level in LEVELS}
        steps = {}
        for level in LEVELS if options.rounds else ():
            _, optimizer, backward = make(level, build, options)
            steps[level] = lambda optimizer=optimizer, backward=backward: (backward(), optimizer.step())
        times = seconds(steps, options.rounds, options.device)
        for level, row in rows.items():
            cells = [f"{value / 2**20:{width}.1f}" for value, width in zip(row, (10, 10, 12, 10), strict=True)]
            took = f"{times[level] * 1e3:10.1f}" if times else ""
            print(f"{name + ', ' + level:28}{''.join(cells)}{row[-1] / rows['O0'][-1]:12.2f}{took}", flush=True)


if __name__ == "__main__":
    main()
