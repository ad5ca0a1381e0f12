"""Random sequences of collectives give over shared memory, to the last bit, what they give over gloo.

Inputs are small integers, so that sums are exact in whatever order they are added.
"""

import hashlib
import random
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.ranks import run_ranks

REFERENCE = "gloo"
DTYPES = [
    *[torch.float32, torch.float64, torch.float16, torch.bfloat16],
    *[torch.int8, torch.uint8, torch.int32, torch.int64],
]
NUMELS = [0, 1, 2, 3, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 65_535, 65_536, 65_537]
LARGE_NUMELS = [262_143, 262_145, 300_001]  # more than 1 MiB in float32
OPERATIONS = ["SUM", "PRODUCT", "MIN", "MAX"]
BITWISE = ["BAND", "BOR", "BXOR"]
KINDS = [
    *["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter"],
    *["reduce_scatter_tensor", "gather", "scatter", "all_to_all", "all_to_all_single", "message", "barrier"],
]


@dataclass(frozen=True)
class Step:
    """One collective of a sequence.

    Attributes:
        numel: of each rank's part.
        root: the root's rank in the group; a message goes from it to the next.
        is_async: whether it is waited for later.
        group: 0 is the world, 1 all ranks but the last, 2 all ranks once more.
        seed: of the inputs, together with the rank.
    """

    kind: str
    dtype: torch.dtype
    numel: int
    root: int
    operation: str
    is_async: bool
    group: int
    seed: int


@st.composite
def steps(draw, world_size):
    kind = draw(st.sampled_from(KINDS))
    dtype = draw(st.sampled_from(DTYPES))
    operations = OPERATIONS + ([] if dtype.is_floating_point else BITWISE)
    group = draw(st.sampled_from([0, 0, 0, 1, 2] if world_size > 2 else [0, 0, 2]))
    size = world_size - (group == 1)
    return Step(
        kind=kind,
        dtype=dtype,
        numel=draw(st.sampled_from([*NUMELS, *NUMELS, *LARGE_NUMELS])),
        root=draw(st.integers(0, size - 1)),
        operation=draw(st.sampled_from(operations)),
        is_async=draw(st.booleans()),
        group=group,
        seed=draw(st.integers(0, 2**16)),
    )


def inputs_of(step, rank, parts=1):
    """0 to 3 in each dtype: products and sums over four ranks are exact in all of them."""
    generator = torch.Generator().manual_seed(step.seed * 16 + rank)
    return torch.randint(0, 4, (parts * step.numel,), generator=generator).to(step.dtype)


def start(step, rank, ranks, group):
    """Call a step: its Work (None if it is done), and the tensors that will hold its result on this rank."""
    me, size = ranks.index(rank), len(ranks)
    root = ranks[step.root]
    operation = getattr(dist.ReduceOp, step.operation)
    options = {"group": group, "async_op": step.is_async}

    def room(parts=1):
        return torch.full((parts * step.numel,), 5, dtype=step.dtype)

    def pieces():
        return list(inputs_of(step, me, size).chunk(size)) if step.numel else [room() for _ in range(size)]

    whole, one = room(size), inputs_of(step, me)
    rooms = [room() for _ in range(size)]
    match step.kind:
        case "barrier":
            return dist.barrier(**options), []
        case "message":
            return message(step, me, ranks, group)
        case "all_reduce":
            return dist.all_reduce(one, operation, **options), [one]
        case "reduce":
            work = dist.reduce(one, root, operation, **options)
            return work, [one] if rank == root else []
        case "broadcast":
            return dist.broadcast(one, root, **options), [one]
        case "all_gather":
            return dist.all_gather(rooms, one, **options), rooms
        case "all_gather_into_tensor":
            return dist.all_gather_into_tensor(whole, one, **options), [whole]
        case "reduce_scatter":
            return dist.reduce_scatter(rooms[0], pieces(), operation, **options), [rooms[0]]
        case "reduce_scatter_tensor":
            work = dist.reduce_scatter_tensor(rooms[0], inputs_of(step, me, size), operation, **options)
            return work, [rooms[0]]
        case "gather":
            work = dist.gather(one, rooms if rank == root else None, root, **options)
            return work, rooms if rank == root else []
        case "scatter":
            return dist.scatter(rooms[0], pieces() if rank == root else None, root, **options), [rooms[0]]
        case "all_to_all":
            return dist.all_to_all(rooms, pieces(), **options), rooms
        case "all_to_all_single":
            return dist.all_to_all_single(whole, inputs_of(step, me, size), **options), [whole]
    raise AssertionError(step.kind)


def message(step, me, ranks, group):
    sender, receiver = step.root, (step.root + 1) % len(ranks)
    tag = step.seed % 3
    if me == sender:
        work = dist.isend(inputs_of(step, me), ranks[receiver], group=group, tag=tag)
    elif me == receiver:
        output = torch.full((step.numel,), 5, dtype=step.dtype)
        work = dist.irecv(output, ranks[sender], group=group, tag=tag)
    else:
        return None, []
    if not step.is_async:
        work.wait()
    return work if step.is_async else None, [output] if me == receiver else []


def play(world, sequences):
    """What each step of each sequence left on this rank: a digest and the first values; None where there is nothing."""
    warnings.simplefilter("ignore", FutureWarning)  # torch would rather see other names for two of these
    rank = world.rank
    everyone = list(range(world.world_size))
    members = [everyone, everyone[:-1], everyone]
    groups = [None, dist.new_group(members[1]), dist.new_group(members[2])]
    seen = []
    for number, sequence in enumerate(sequences):
        order = random.Random(number * 16 + rank)  # each rank waits in an order of its own
        results, pending = [], []
        for step in sequence:
            if rank not in members[step.group]:
                results.append([])
                continue
            work, tensors = start(step, rank, members[step.group], groups[step.group])
            results.append(tensors)
            if work is not None:
                pending.append(work)
            if pending and order.random() < 0.3:
                pending.pop(order.randrange(len(pending))).wait()
        order.shuffle(pending)
        for work in pending:
            work.wait()
        seen.append([[summary(t) for t in tensors] for tensors in results])
    dist.barrier()
    for group, ranks in zip(groups[1:], members[1:], strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    return seen


def summary(tensor):
    data = tensor.contiguous().view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
    return tuple(tensor.shape), hashlib.sha256(data.numpy().tobytes()).hexdigest(), tensor[:4].tolist()


def check_alike(sequences, got, expected):
    """Compare what each rank got from each step; both are ``play``'s results, by rank."""
    for number, sequence in enumerate(sequences):
        for place, step in enumerate(sequence):
            mine = [results[number][place] for results in got]
            reference = [results[number][place] for results in expected]
            assert mine == reference, f"step {place} of sequence {number} differs: {step}, after {sequence[:place]}"


@pytest.mark.parametrize("backend", ["shm"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_sequence_of_collectives_gives_what_it_gives_over_gloo(backend, world_size):
    @settings(
        max_examples=7,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # each smaller example would take two worlds more
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.lists(steps(world_size), min_size=5, max_size=20), min_size=4, max_size=8))
    def run(sequences):
        expected = run_ranks(world_size, play, sequences, backend=REFERENCE, timeout_s=60)
        check_alike(sequences, run_ranks(world_size, play, sequences, backend=backend, timeout_s=60), expected)

    run()


def test_a_value_that_differs_on_one_rank_is_told_by_step():
    step = Step("all_reduce", torch.float32, 3, 0, "SUM", False, 0, 7)
    right, wrong = summary(torch.tensor([1.0, 2.0])), summary(torch.tensor([1.0, 3.0]))
    check_alike([[step]], [[[[right]]], [[[right]]]], [[[[right]]], [[[right]]]])
    with pytest.raises(AssertionError, match="step 0 of sequence 0 differs: Step\\(kind='all_reduce'"):
        check_alike([[step]], [[[[right]]], [[[wrong]]]], [[[[right]]], [[[right]]]])
