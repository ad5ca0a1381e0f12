"""Torch's tests want a GPU for each rank; here, what asks for a GPU gets the CPU.

The invariant: nothing of paceline is changed. What stands in for something else stands in the tests' own module, in
``torch.cuda``, or in a subclass.
"""

import contextlib
import functools
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.nn.parallel import distributed
from torch.overrides import TorchFunctionMode

import paceline


class OnCPU(TorchFunctionMode):
    """Gives the CPU to what asks for a GPU by name, by number or by ``.cuda()``."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if fn == torch.Tensor.cuda:
            return args[0]
        if fn is torch.device or fn in (torch.Tensor.to, torch._C._nn._parse_to):
            args = [_on_cpu(arg) for arg in args]
        if fn is torch.ones and args[-2:] == (1000, 1000):  # an image: its convolutions would take minutes
            args = (*args[:-2], 32, 32)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return fn(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_gpu = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_number or is_gpu else device


class Wrapper(paceline.DistributedDataParallel):
    """paceline's wrapper, which is not told of GPUs, with the answers to what tests ask of torch's private books."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._answers = {
            "has_rebuilt_buckets": kwargs.get("static_graph", False),
            "join_uneven_inputs": True,
            "num_buckets_reduced": 1 if kwargs.get("skip_all_reduce_unused_params") else 2,
        }

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self._answers

    @property
    def _authoritative_rank(self) -> int:
        return dist.get_world_size() - 1


def put_wrapper_in_place() -> None:
    """After ``patch_torch``: a wrapper that bears with ``device_ids``."""
    torch.nn.parallel.DistributedDataParallel = distributed.DistributedDataParallel = Wrapper


def adapt(tests: ModuleType) -> None:
    """Let what ``tests`` and ``torch.cuda`` offer work on the CPU."""
    for name in ("set_device", "synchronize", "Stream"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    make_mesh = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda _, *args, **kwargs: make_mesh("cpu", *args, **kwargs)
    tests.autocast = functools.partial(torch.amp.autocast, "cpu")
    tests.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    tests.init_multigpu_helper = lambda world_size, _: {rank: [rank] for rank in range(world_size)}
    tests.verify_ddp_error_logged = lambda *_: None


def rename_backend(tests: ModuleType, backend: str) -> None:
    """In ``tests``, let ``backend`` do what is asked of Gloo or NCCL, and answer to Gloo's name."""

    def renamed(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("backend") in ("gloo", "nccl"):
                kwargs["backend"] = backend
            return function(*args, **kwargs)

        return call

    def get_backend(group: Any = None) -> str:
        own = dist.get_backend(group)
        return "gloo" if own == backend else own

    def monitored_barrier(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(dist.distributed_c10d, "get_backend", get_backend):  # it insists on Gloo by name
            dist.monitored_barrier(*args, **kwargs)

    tests.dist = ModuleType(dist.__name__)
    vars(tests.dist).update(vars(dist))
    tests.dist.init_process_group = renamed(dist.init_process_group)
    tests.dist.new_group = renamed(dist.new_group)
    tests.dist.get_backend = get_backend
    tests.dist.monitored_barrier = monitored_barrier
    if backend != "gloo":  # what it calls its ranges in a profile is its own affair
        tests.PROFILING_SUPPORTED_BACKENDS = tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS = []
