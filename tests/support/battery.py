"""One battery of closed-form checks that every backend must pass, in worlds of 1, 2, 3, 4 and 8 ranks.

A check is a generator function of ``(rank, size)`` that runs collectives on the default group and yields
``(case, got, expected)``. What is expected is literal or follows from rank and size. A wrong result does not end a
check, so that ranks stay in step and one run tells everything that is wrong.

Also a program, for launchers such as mpirun: ``battery.py BACKEND`` joins the job that the environment describes, runs
all checks that apply, and ends at the first failure.
"""

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import paceline

Cases = Iterator[tuple[object, Any, Any]]


@dataclass(frozen=True)
class Check:
    """A check, and where it applies.

    Attributes:
        fn: yields ``(case, got, expected)``, called with rank and size.
        needs: the smallest world that it makes sense in.
        beyond_gloo: whether gloo (torch 2.13) refuses this or gets it wrong.
    """

    fn: Callable[[int, int], Cases]
    needs: int = 1
    beyond_gloo: bool = False


BATTERY: dict[str, Check] = {}


def check(*, needs: int = 1, beyond_gloo: bool = False) -> Callable[[Callable[[int, int], Cases]], Any]:
    def register(fn: Callable[[int, int], Cases]) -> Any:
        BATTERY[fn.__name__] = Check(fn, needs, beyond_gloo)
        return fn

    return register


def applicable(backend: str, size: int) -> list[str]:
    """The names of the checks that ``backend`` must pass in a world of ``size``."""
    return [n for n, c in BATTERY.items() if size >= c.needs and not (c.beyond_gloo and backend == "gloo")]


def differences(name: str, rank: int, size: int) -> list[str]:
    """Run one check: what came out otherwise than expected on this rank.

    Raises:
        AssertionError: the check raised; where it was is the exception's cause. The ranks may be out of step now.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch would rather see the newer names that it gave some
            return [
                f"{case}: got {got!r} instead of {expected!r}"
                for case, got, expected in BATTERY[name].fn(rank, size)
                if not same(got, expected)
            ]
    except Exception as error:
        raise AssertionError(f"{name} raised {type(error).__name__}: {error}") from error


def same(got: Any, expected: Any) -> bool:
    """Equal to the last bit, in type, shape and dtype too."""
    if type(got) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        if got.dtype != expected.dtype or got.shape != expected.shape:
            return False
        if expected.dtype == torch.bool:  # True is stored as 1; other bytes count as True too, until they are added up
            got, expected = got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        return torch.equal(got, expected)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    return bool(got == expected)


# -- inputs and their sums ---------------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
MOVABLE = [*FLOATS, *INTEGERS, torch.bool]
LARGE = 9 * 2**18 + 3  # float32 values: 9 MiB and 12 bytes

_PATTERN = (torch.arange(LARGE + 1000) % 251).float()


def row(rank: int, dtype: torch.dtype = torch.float32, shape: Sequence[int] = (3,)) -> torch.Tensor:
    """Differs from rank to rank: 3r+1, 3r+2, 3r+3; the real part of complex values; odd ones are True."""
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel) + 3 * rank + 1).view(*shape)
    if dtype.is_complex:
        return torch.complex(values.double(), -values.double()).to(dtype)
    return values % 2 == 1 if dtype == torch.bool else values.to(dtype)


def total(size: int, dtype: torch.dtype = torch.float32, shape: Sequence[int] = (3,)) -> torch.Tensor:
    """The sum of all ranks' rows: n(a+1) + 3n(n-1)/2 at index a. It fits into every dtype for 8 ranks."""
    numel = torch.Size(shape).numel()
    values = (size * (torch.arange(numel) + 1) + 3 * size * (size - 1) // 2).view(*shape)
    return torch.complex(values.double(), -values.double()).to(dtype) if dtype.is_complex else values.to(dtype)


def blank(dtype: torch.dtype = torch.float32, shape: Sequence[int] = (3,)) -> torch.Tensor:
    """Room for a result, filled with what no check expects."""
    return torch.full(tuple(shape), False if dtype == torch.bool else 99, dtype=dtype)


def pattern(numel: int, start: int = 0) -> torch.Tensor:
    """Values from 0 to 250 that repeat with a prime period, so that a block in the wrong place shows."""
    return _PATTERN[start : start + numel].clone()


def sparse(indices: Any, values: Any, shape: Sequence[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def triangle(size: int) -> int:
    return size * (size + 1) // 2  # 1 + 2 + ... + size


@contextlib.contextmanager
def group_of(ranks: Sequence[int]) -> Iterator[Any]:
    """A sub-group that all ranks make, and its members end."""
    group = dist.new_group(list(ranks))
    yield group
    if dist.get_rank() in ranks:
        dist.destroy_process_group(group)


# -- reductions --------------------------------------------------------------------------------------------------------


@check()
def all_reduce_sums(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, 3r+2, 3r+3] in each dtype; all get the sums n + 3n(n-1)/2, 2n + ..., 3n + ..."""
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX]:
        t = row(rank, dtype)
        dist.all_reduce(t)
        yield dtype, t, total(size, dtype)


@check()
def all_reduce_multiplies(rank: int, size: int) -> Cases:
    """Rank r gives [1 + r%2, 1, r]; all get [2^(n//2), 1, 0]."""
    for dtype in [*FLOATS, *INTEGERS]:
        t = torch.tensor([1 + rank % 2, 1, rank]).to(dtype)
        dist.all_reduce(t, dist.ReduceOp.PRODUCT)
        yield dtype, t, torch.tensor([2 ** (size // 2), 1, 0]).to(dtype)


@check()
def all_reduce_finds_extremes(rank: int, size: int) -> Cases:
    """Rank r gives [r+1, 20-r], and where there is a sign, -r; MIN is [1, 21-n] and 1-n, MAX is [n, 20] and 0."""
    for dtype in [*FLOATS, *INTEGERS]:
        keep = 2 if dtype == torch.uint8 else 3
        for op, expected in (
            (dist.ReduceOp.MIN, [1, 21 - size, 1 - size]),
            (dist.ReduceOp.MAX, [size, 20, 0]),
        ):
            t = torch.tensor([rank + 1, 20 - rank, -rank][:keep]).to(dtype)
            dist.all_reduce(t, op)
            yield (dtype, op), t, torch.tensor(expected[:keep]).to(dtype)


@check()
def all_reduce_combines_bits(rank: int, size: int) -> Cases:
    """Rank r gives [2^(r%7), 127 - 2^(r%7), 5].

    With m = 2^min(n, 7) - 1: BAND is [1 if n = 1 else 0, 127 - m, 5] and BOR [m, 126 if n = 1 else 127, 5]. BXOR is
    [m, ...] but for n = 8, where rank 7 takes bit 0 away again; 127 ^ x is 127 - x, so the second is the first one's
    complement where n is odd, and the first where it is even; the third is 5 or 0.
    """
    m = 2 ** min(size, 7) - 1
    odd = size % 2 == 1
    xor = m - 1 if size == 8 else m
    for dtype in INTEGERS:
        for op, expected in (
            (dist.ReduceOp.BAND, [1 if size == 1 else 0, 127 - m, 5]),
            (dist.ReduceOp.BOR, [m, 126 if size == 1 else 127, 5]),
            (dist.ReduceOp.BXOR, [xor, 127 - xor if odd else xor, 5 if odd else 0]),
        ):
            t = torch.tensor([1 << rank % 7, 127 - (1 << rank % 7), 5]).to(dtype)
            dist.all_reduce(t, op)
            yield (dtype, op), t, torch.tensor(expected).to(dtype)


@check()
def all_reduce_of_booleans(rank: int, size: int) -> Cases:
    """Rank r gives [True, False, r = 0]; "all" is [True, False, n = 1], "any" is [True, False, True]."""
    for op, expected in (
        (dist.ReduceOp.PRODUCT, [True, False, size == 1]),
        (dist.ReduceOp.MIN, [True, False, size == 1]),
        (dist.ReduceOp.MAX, [True, False, True]),
        (dist.ReduceOp.BAND, [True, False, size == 1]),
        (dist.ReduceOp.BOR, [True, False, True]),
        (dist.ReduceOp.BXOR, [size % 2 == 1, False, True]),
    ):
        t = torch.tensor([True, False, rank == 0])
        dist.all_reduce(t, op)
        yield op, t, torch.tensor(expected)


@check(beyond_gloo=True)
def all_reduce_sums_booleans(rank: int, size: int) -> Cases:
    """Rank r gives [True, False, r = 0]; the sum is [True, False, True], each True stored as a 1."""
    t = torch.tensor([True, False, rank == 0])
    dist.all_reduce(t)
    yield "stored", t.view(torch.uint8), torch.tensor([1, 0, 1], dtype=torch.uint8)


@check()
def all_reduce_averages(rank: int, size: int) -> Cases:
    """Rank r gives [2r, 7]; all get [n-1, 7]."""
    for dtype in [*FLOATS, *COMPLEX]:
        t = torch.tensor([2 * rank, 7]).to(dtype)
        dist.all_reduce(t, dist.ReduceOp.AVG)
        yield dtype, t, torch.tensor([size - 1, 7]).to(dtype)


@check(beyond_gloo=True)
def all_reduce_scales_before_it_sums(rank: int, size: int) -> Cases:
    """Rank r gives [r+1, 4]; PREMUL_SUM with the factor 1/2 is [n(n+1)/4, 2n]."""
    for dtype in FLOATS:
        for factor in (0.5, torch.tensor([0.5])):
            t = torch.tensor([rank + 1, 4]).to(dtype)
            dist.all_reduce(t, dist._make_nccl_premul_sum(factor))
            yield (dtype, factor), t, torch.tensor([triangle(size) / 2, 2 * size]).to(dtype)


@check(beyond_gloo=True)
def each_rank_has_a_factor_of_its_own(rank: int, size: int) -> Cases:
    """Rank r gives tens with the factor r+1; PREMUL_SUM is 10 * n(n+1)/2, in all that reduces, small and large."""
    expected = 10 * triangle(size)
    for dtype, factor in (
        *((dtype, rank + 1.0) for dtype in [*FLOATS, *COMPLEX]),
        *((dtype, torch.tensor([rank + 1.0])) for dtype in FLOATS),
        *((dtype, rank + 1.0) for dtype in (torch.int32, torch.int64, torch.int16)),
    ):
        op = dist._make_nccl_premul_sum(factor)
        t = torch.full((3,), 10).to(dtype)
        dist.all_reduce(t, op)
        yield ("all_reduce", dtype), t, torch.full((3,), expected).to(dtype)
    op = dist._make_nccl_premul_sum(rank + 1.0)
    for numel in (3, 70_000, 300_000):
        t = torch.full((numel,), 10.0)
        dist.all_reduce(t, op)
        yield ("all_reduce", numel), t, torch.full((numel,), float(expected))
        t = torch.full((numel,), 10.0)
        dist.reduce(t, size - 1, op)
        yield ("reduce", numel), t, torch.full((numel,), float(expected) if rank == size - 1 else 10.0)
        output, source = torch.empty(numel // size), torch.full((numel // size * size,), 10.0)
        dist.reduce_scatter_tensor(output, source, op)
        yield ("reduce_scatter_tensor", numel), output, torch.full_like(output, float(expected))
        yield ("input", numel), source, torch.full_like(source, 10.0)
    output = torch.empty(2)
    dist.reduce_scatter(output, [torch.full((2,), 10.0 + s) for s in range(size)], op)
    yield "reduce_scatter", output, torch.full((2,), (10.0 + rank) * triangle(size))


@check(beyond_gloo=True)
def unsigned_integers_are_summed(rank: int, size: int) -> Cases:
    """Rank r gives r and the largest value; the sums are n(n-1)/2, and n less than what does not fit any more."""
    for dtype, largest in ((torch.uint16, 2**16 - 1), (torch.uint32, 2**32 - 1), (torch.uint64, 2**64 - 1)):
        for times in (1, 30_000):
            values = torch.tensor([rank, largest], dtype=dtype)
            expected = torch.tensor([size * (size - 1) // 2, largest + 1 - size], dtype=dtype).repeat(times)
            t = values.repeat(times)
            dist.all_reduce(t)
            yield ("all_reduce", dtype, times), t, expected
            t = values.repeat(times)
            dist.reduce(t, 0)
            yield ("reduce", dtype, times), t, expected if rank == 0 else values.repeat(times)
            output = values.repeat(times)
            dist.reduce_scatter_tensor(output, values.repeat(times * size))
            yield ("reduce_scatter_tensor", dtype, times), output, expected


@check()
def sparse_sums(rank: int, size: int) -> Cases:
    """Rank r has r+1 at r and 10 at 0; the sum is [10n + 1, 2, 3, ...]. Where row 0 is [10, 20], it is [10n, 20n]."""
    t = sparse([[0, rank]], [10.0, rank + 1.0], (size,))
    dist.all_reduce(t)
    yield "values", t.to_dense(), torch.arange(1.0, size + 1) + torch.tensor([10.0 * size] + [0.0] * (size - 1))
    t = sparse([[0, rank]], [[10.0, 20.0], [rank + 1.0, 0.0]], (size, 2))
    dist.all_reduce(t)
    expected = torch.stack([torch.arange(1.0, size + 1), torch.zeros(size)], 1)
    expected[0] += torch.tensor([10.0 * size, 20.0 * size])
    yield "rows", t.to_dense(), expected


@check(beyond_gloo=True)
def short_integers(rank: int, size: int) -> Cases:
    """All collectives on int16: row r is [3r+1, 3r+2, 3r+3]."""
    dtype = torch.int16
    t = row(rank, dtype)
    dist.all_reduce(t)
    yield "all_reduce", t, total(size, dtype)
    t = row(rank, dtype)
    dist.broadcast(t, size - 1)
    yield "broadcast", t, row(size - 1, dtype)
    rows = [row(r, dtype) for r in range(size)]
    outs = [blank(dtype) for _ in range(size)]
    dist.all_gather(outs, row(rank, dtype))
    yield "all_gather", outs, rows
    dist.all_to_all(outs, [row(rank + r, dtype) for r in range(size)])
    yield "all_to_all", outs, [row(r + rank, dtype) for r in range(size)]


@check()
def reduce_to_each_root(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...]; the root gets the sum, or the greatest row, that of rank n-1."""
    for root in range(size):
        for op, expected in ((dist.ReduceOp.SUM, total(size)), (dist.ReduceOp.MAX, row(size - 1))):
            t = row(rank)
            dist.reduce(t, root, op)
            if rank == root:
                yield (root, op), t, expected


@check()
def reduce_in_every_dtype(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...]; rank 0 gets the sum."""
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX]:
        t = row(rank, dtype)
        dist.reduce(t, 0)
        if rank == 0:
            yield dtype, t, total(size, dtype)


@check()
def reduce_scatter_from_a_list(rank: int, size: int) -> Cases:
    """Rank r gives rank s the row r+s; rank s gets n*s*3 more than the sum of the rows. Inputs stay as they were."""
    for dtype in [*FLOATS, *INTEGERS]:
        inputs = [row(rank, dtype) + (s if dtype in FLOATS else 0) for s in range(size)]
        output = blank(dtype)
        dist.reduce_scatter(output, inputs)
        yield dtype, output, total(size, dtype) + (size * rank if dtype in FLOATS else 0)
        yield (dtype, "inputs"), inputs, [row(rank, dtype) + (s if dtype in FLOATS else 0) for s in range(size)]


@check()
def reduce_scatter_with_other_operations(rank: int, size: int) -> Cases:
    """Rank r gives rank s [r+1, 10s]; MAX is [n, 10s], MIN [1, 10s], AVG [(n+1)/2, 10s], PRODUCT [n!, (10s)^n]."""
    factorial = {1: 1, 2: 2, 3: 6, 4: 24, 8: 40320}[size]
    for op, expected in (
        (dist.ReduceOp.MAX, [size, 10 * rank]),
        (dist.ReduceOp.MIN, [1, 10 * rank]),
        (dist.ReduceOp.AVG, [(size + 1) / 2, 10 * rank]),
        (dist.ReduceOp.PRODUCT, [factorial, (10 * rank) ** size]),
    ):
        output = blank(torch.float64, (2,))
        dist.reduce_scatter(output, [torch.tensor([rank + 1, 10 * s], dtype=torch.float64) for s in range(size)], op)
        yield op, output, torch.tensor(expected, dtype=torch.float64)


@check()
def reduce_scatter_of_unequal_pieces(rank: int, size: int) -> Cases:
    """Rank s gets s+1 values, each n(n+1)/2 + n*s, from (r+1) + s on rank r."""
    output = blank(shape=(rank + 1,))
    dist.reduce_scatter(output, [torch.full((s + 1,), rank + 1.0 + s) for s in range(size)])
    yield "sum", output, torch.full((rank + 1,), float(triangle(size) + size * rank))


@check()
def reduce_scatter_from_one_tensor(rank: int, size: int) -> Cases:
    """Row s of the input is row r + 100s; rank s gets the sum of the rows + 100ns. The input stays as it was."""
    source = torch.cat([row(rank) + 100 * s for s in range(size)])
    output = blank()
    dist.reduce_scatter_tensor(output, source)
    yield "concatenated", output, total(size) + 100 * size * rank
    yield "input", source, torch.cat([row(rank) + 100 * s for s in range(size)])
    source = torch.cat([row(rank, shape=(2, 3)) + 100 * s for s in range(size)])  # (2 * size, 3)
    output = blank(shape=(2, 3))
    dist.reduce_scatter_tensor(output, source, dist.ReduceOp.MAX)
    yield "two dimensions", output, row(size - 1, shape=(2, 3)) + 100 * rank


@check(beyond_gloo=True)
def reduce_scatter_from_stacked_rows(rank: int, size: int) -> Cases:
    """The input is (n, 3), its row s is row r + 100s; rank s gets the sum + 100ns in the shape (3,)."""
    output = blank()
    dist.reduce_scatter_tensor(output, torch.stack([row(rank) + 100 * s for s in range(size)]))
    yield "stacked", output, total(size) + 100 * size * rank


# -- moving data -------------------------------------------------------------------------------------------------------


@check()
def broadcast_from_each_root(rank: int, size: int) -> Cases:
    """Rank r has [3r+1, ...]; all get the root's."""
    for root in range(size):
        t = row(rank)
        dist.broadcast(t, root)
        yield root, t, row(root)


@check()
def broadcast_in_every_dtype(rank: int, size: int) -> Cases:
    """Rank r has [3r+1, ...]; all get rank n-1's."""
    for dtype in [*MOVABLE, *COMPLEX]:
        t = row(rank, dtype)
        dist.broadcast(t, size - 1)
        yield dtype, t, row(size - 1, dtype)


@check()
def data_keeps_its_bits(rank: int, size: int) -> Cases:
    """Rank 0 has a NaN with a payload, infinities, a negative zero and a denormal; all get the same bits."""
    bits = torch.tensor([0x7FC12345, 0x7F800000, -0x800000, -0x80000000, 1], dtype=torch.int32)
    t = bits.clone().view(torch.float32) if rank == 0 else torch.zeros(5)
    dist.broadcast(t, 0)
    yield "broadcast", t.view(torch.int32), bits
    outs = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(outs, bits.clone().view(torch.float32))
    yield "all_gather", [out.view(torch.int32) for out in outs], [bits] * size


@check()
def all_gather_into_a_list(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...]; all get all rows in order, and keep what they gave."""
    for dtype in [*MOVABLE, *COMPLEX]:
        source = row(rank, dtype)
        outs = [blank(dtype) for _ in range(size)]
        dist.all_gather(outs, source)
        yield dtype, outs, [row(r, dtype) for r in range(size)]
        yield (dtype, "input"), source, row(rank, dtype)


@check(beyond_gloo=True)
def all_gather_of_unequal_sizes(rank: int, size: int) -> Cases:
    """Rank r gives r values r+1, so rank 0 gives none; all get all of them."""
    outs = [blank(shape=(r,)) for r in range(size)]
    dist.all_gather(outs, torch.full((rank,), rank + 1.0))
    yield "growing", outs, [torch.full((r,), r + 1.0) for r in range(size)]
    outs = [blank(shape=(size - r, 2)) for r in range(size)]
    dist.all_gather(outs, torch.full((size - rank, 2), rank + 1.0))
    yield "shrinking", outs, [torch.full((size - r, 2), r + 1.0) for r in range(size)]


@check()
def all_gather_into_one_tensor(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...] in (2, 3); all get them one below the other, in (2n, 3)."""
    for dtype in [*MOVABLE, *COMPLEX]:
        output = blank(dtype, (2 * size, 3))
        dist.all_gather_into_tensor(output, row(rank, dtype, (2, 3)))
        yield dtype, output, torch.cat([row(r, dtype, (2, 3)) for r in range(size)])


@check(beyond_gloo=True)
def all_gather_into_stacked_rows(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...] in (3,); all get them as the rows of (n, 3)."""
    output = blank(shape=(size, 3))
    dist.all_gather_into_tensor(output, row(rank))
    yield "stacked", output, torch.stack([row(r) for r in range(size)])


@check()
def all_gather_within_its_output(rank: int, size: int) -> Cases:
    """The input is the rank's own part of the output, as sharding wrappers have it; all get all rows."""
    output = blank(shape=(3 * size,))
    mine = output[3 * rank : 3 * rank + 3]
    mine.copy_(row(rank))
    dist.all_gather_into_tensor(output, mine)
    yield "in place", output, torch.cat([row(r) for r in range(size)])


@check()
def gather_to_each_root(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...]; the root gets all rows in order."""
    for root in range(size):
        outs = [blank() for _ in range(size)] if rank == root else None
        dist.gather(row(rank), outs, root)
        yield root, outs, [row(r) for r in range(size)] if rank == root else None


@check()
def gather_in_every_dtype(rank: int, size: int) -> Cases:
    """Rank r gives [3r+1, ...]; rank 0 gets all rows in order."""
    for dtype in MOVABLE:
        outs = [blank(dtype) for _ in range(size)] if rank == 0 else None
        dist.gather(row(rank, dtype), outs)
        yield dtype, outs, [row(r, dtype) for r in range(size)] if rank == 0 else None


@check(beyond_gloo=True)
def gather_of_complex_values(rank: int, size: int) -> Cases:
    """Rank r gives [(3r+1)(1-i), ...]; rank 0 gets all rows in order."""
    for dtype in COMPLEX:
        outs = [blank(dtype) for _ in range(size)] if rank == 0 else None
        dist.gather(row(rank, dtype), outs)
        yield dtype, outs, [row(r, dtype) for r in range(size)] if rank == 0 else None


@check()
def scatter_from_each_root(rank: int, size: int) -> Cases:
    """The root gives rank r row r + 100 root; each gets its own, and the root keeps what it gave."""
    for root in range(size):
        inputs = [row(r) + 100 * root for r in range(size)] if rank == root else None
        output = blank()
        dist.scatter(output, inputs, root)
        yield root, output, row(rank) + 100 * root
        yield (root, "inputs"), inputs, [row(r) + 100 * root for r in range(size)] if rank == root else None


@check()
def scatter_in_every_dtype(rank: int, size: int) -> Cases:
    """Rank n-1 gives rank r row r; each gets its own."""
    for dtype in [*MOVABLE, *COMPLEX]:
        output = blank(dtype)
        dist.scatter(output, [row(r, dtype) for r in range(size)] if rank == size - 1 else None, size - 1)
        yield dtype, output, row(rank, dtype)


@check()
def all_to_all_of_lists(rank: int, size: int) -> Cases:
    """Rank r gives rank s [10r + s]; rank s gets [s], [10 + s], ..., and each keeps what it gave."""
    for dtype in [*FLOATS, *INTEGERS]:
        inputs = [torch.tensor([10 * rank + s]).to(dtype) for s in range(size)]
        outs = [blank(dtype, (1,)) for _ in range(size)]
        dist.all_to_all(outs, inputs)
        yield dtype, outs, [torch.tensor([10 * r + rank]).to(dtype) for r in range(size)]
        yield (dtype, "inputs"), inputs, [torch.tensor([10 * rank + s]).to(dtype) for s in range(size)]
    for dtype in COMPLEX:
        outs = [blank(dtype) for _ in range(size)]
        dist.all_to_all(outs, [row(rank + s, dtype) for s in range(size)])
        yield dtype, outs, [row(r + rank, dtype) for r in range(size)]


@check(beyond_gloo=True)
def all_to_all_of_unequal_lists(rank: int, size: int) -> Cases:
    """Rank r gives rank s r + 2s values 10r + s, none from 0 to 0; rank s gets s*2 + r of 10r + s from each r."""
    outs = [blank(shape=(r + 2 * rank,)) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 2 * s,), 10.0 * rank + s) for s in range(size)])
    yield "unequal", outs, [torch.full((r + 2 * rank,), 10.0 * r + rank) for r in range(size)]


@check()
def all_to_all_of_one_tensor(rank: int, size: int) -> Cases:
    """Rank r gives [10r, 10r + 1, ...]; rank s gets [s, 10 + s, ...]. With a second dimension, whole rows move."""
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX]:
        output = blank(dtype, (size,))
        dist.all_to_all_single(output, (10 * rank + torch.arange(size)).to(dtype))
        yield dtype, output, (10 * torch.arange(size) + rank).to(dtype)
    output = blank(shape=(2 * size, 3))
    dist.all_to_all_single(output, torch.cat([row(rank + s, shape=(2, 3)) for s in range(size)]))
    yield "rows", output, torch.cat([row(r + rank, shape=(2, 3)) for r in range(size)])


@check()
def all_to_all_of_unequal_splits(rank: int, size: int) -> Cases:
    """Rank r gives rank s r + 2s rows (10r + s, 7), none from 0 to 0; rank s gets r + 2s of them from each r."""

    def block(giver: int, taker: int) -> torch.Tensor:
        return torch.tensor([[10.0 * giver + taker, 7.0]]).repeat(giver + 2 * taker, 1)

    source = torch.cat([block(rank, s) for s in range(size)])
    expected = torch.cat([block(r, rank) for r in range(size)])
    output = blank(shape=expected.shape)
    dist.all_to_all_single(
        output, source, [r + 2 * rank for r in range(size)], [rank + 2 * s for s in range(size)]
    )  # (rows, 2)
    yield "unequal", output, expected


# -- from rank to rank -------------------------------------------------------------------------------------------------


@check(needs=2)
def send_and_recv_around_a_ring(rank: int, size: int) -> Cases:
    """Rank 0 sends [1]; each rank adds one and passes it on; rank 0 gets [n]. ``recv`` returns the sender."""
    t = torch.ones(1)
    if rank == 0:
        dist.send(t, 1)
    source = dist.recv(t, (rank - 1) % size)
    yield "received", (source, t), ((rank - 1) % size, torch.tensor([float(rank or size)]))
    if rank:
        dist.send(t + 1, (rank + 1) % size)


@check(needs=2)
def every_dtype_is_sent(rank: int, size: int) -> Cases:
    """Rank r sends [3r+1, ...] to the next, which gets it."""
    for dtype in [*MOVABLE, *COMPLEX]:
        output = blank(dtype)
        work = dist.isend(row(rank, dtype), (rank + 1) % size)
        dist.recv(output, (rank - 1) % size)
        work.wait()
        yield dtype, output, row((rank - 1) % size, dtype)


@check(needs=2)
def messages_are_told_apart_by_tag(rank: int, size: int) -> Cases:
    """Rank 0 sends [5], [6], [7] with these tags; the others take 7, then 5, then 6, and then again in order."""
    for order in ([7, 5, 6], [5, 6, 7]):
        if rank == 0:
            works = [dist.isend(torch.tensor([tag]), peer, tag=tag) for tag in (5, 6, 7) for peer in range(1, size)]
            for work in works:
                work.wait()
        else:
            for tag in order:
                t = torch.zeros(1, dtype=torch.int64)
                dist.recv(t, 0, tag=tag)
                yield (order, tag), t, torch.tensor([tag])


@check(needs=2)
def messages_of_one_tag_stay_in_order(rank: int, size: int) -> Cases:
    """Rank r sends [r], [r+10], ..., [r+90] to the next, which posts ten receives and waits for the last one first."""
    outs = [torch.zeros(1, dtype=torch.int64) for _ in range(10)]
    receives = [dist.irecv(out, (rank - 1) % size) for out in outs]
    sends = [dist.isend(torch.tensor([rank + 10 * i]), (rank + 1) % size) for i in range(10)]
    for work in [*reversed(receives), *sends]:
        work.wait()
    yield "ten", outs, [torch.tensor([(rank - 1) % size + 10 * i]) for i in range(10)]


@check(needs=2)
def recv_from_anybody(rank: int, size: int) -> Cases:
    """Ranks 1 to n-1 send [r, 2r]; rank 0 takes n-1 messages of whoever comes, and is told who it was."""
    for tag in (0, 3):
        if rank:
            dist.send(torch.tensor([rank, 2 * rank]), 0, tag=tag)
        else:
            seen = []
            for _ in range(size - 1):
                t = torch.zeros(2, dtype=torch.int64)
                seen.append((dist.recv(t, tag=tag), t))
            yield tag, sorted(seen, key=lambda s: s[0]), [(r, torch.tensor([r, 2 * r])) for r in range(1, size)]
        dist.barrier()  # whatever a quick rank sends next is not for these receives


@check(needs=2)
def a_batch_of_sends_and_receives(rank: int, size: int) -> Cases:
    """Every rank sends each other [10r + s] and then [10r + s + 5]; the receives stand first in the batch."""
    others = [peer for peer in range(size) if peer != rank]
    outs = {(peer, extra): torch.zeros(1, dtype=torch.int64) for peer in others for extra in (0, 5)}
    operations = [dist.P2POp(dist.irecv, out, peer) for (peer, _), out in outs.items()]
    operations += [dist.P2POp(dist.isend, torch.tensor([10 * rank + p + x]), p) for p in others for x in (0, 5)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    yield "all", list(outs.values()), [torch.tensor([10 * p + rank + x]) for p in others for x in (0, 5)]


@check(needs=2)
def messages_pass_between_collectives(rank: int, size: int) -> Cases:
    """A send is under way while all ranks sum [1]; the sum is [n], and the message [r] arrives after it."""
    work = dist.isend(torch.tensor([rank]), (rank + 1) % size)
    t = torch.ones(1)
    dist.all_reduce(t)
    output = torch.zeros(1, dtype=torch.int64)
    dist.recv(output, (rank - 1) % size)
    work.wait()
    yield "both", (t, output), (torch.tensor([float(size)]), torch.tensor([(rank - 1) % size]))


@check(needs=2)
def objects_are_sent(rank: int, size: int) -> Cases:
    """Rank 0 sends rank 1 [{"a": 1}, None]."""
    objects: list[Any] = [{"a": 1}, None] if rank == 0 else [0, 0]
    if rank == 0:
        dist.send_object_list(objects, 1)
    elif rank == 1:
        yield "source", dist.recv_object_list(objects, 0), 0
        yield "objects", objects, [{"a": 1}, None]


# -- barriers ----------------------------------------------------------------------------------------------------------


def _times_around(wait: Callable[[], object], rank: int, size: int) -> tuple[float, float]:
    """The last entry and the first exit of all ranks, which share a clock; rank r comes 2r ms late."""
    time.sleep(0.002 * rank)
    entered = time.monotonic()
    wait()
    mine = torch.tensor([entered, time.monotonic()], dtype=torch.float64)
    times = torch.zeros(2 * size, dtype=torch.float64)
    dist.all_gather_into_tensor(times, mine)
    return times[::2].max().item(), times[1::2].min().item()


@check()
def barrier_holds_until_all_have_come(rank: int, size: int) -> Cases:
    """Rank r comes 2r ms late; nobody leaves before the last has come."""
    for name, wait in (
        ("sync", dist.barrier),
        ("async", lambda: dist.barrier(async_op=True).wait()),
        ("timeout", lambda: dist.barrier(timeout=timedelta(seconds=10))),
    ):
        last_in, first_out = _times_around(wait, rank, size)
        yield name, last_in <= first_out, True


@check()
def monitored_barrier_holds_until_all_have_come(rank: int, size: int) -> Cases:
    """Rank r comes 2r ms late; rank 0 doesn't leave before the last has come."""
    group = dist.group.WORLD
    for options in ({}, {"wait_all_ranks": True}):
        time.sleep(0.002 * rank)
        t = torch.tensor([time.monotonic()], dtype=torch.float64)
        group.monitored_barrier(timedelta(seconds=10), **options)
        left = time.monotonic()
        dist.all_reduce(t, dist.ReduceOp.MAX)
        yield options, rank > 0 or t.item() <= left, True


# -- objects -----------------------------------------------------------------------------------------------------------


@check()
def objects_are_gathered(rank: int, size: int) -> Cases:
    """Rank r gives {"rank": r, "text": "x" * 100r}, of another length on each; all, or the root, get them in order."""
    mine = {"rank": rank, "text": "x" * 100 * rank}
    expected = [{"rank": r, "text": "x" * 100 * r} for r in range(size)]
    outs: list[Any] = [None] * size
    dist.all_gather_object(outs, mine)
    yield "all_gather_object", outs, expected
    for root in {0, size - 1}:
        gathered: list[Any] | None = [None] * size if rank == root else None
        dist.gather_object(mine, gathered, root)
        yield ("gather_object", root), gathered, expected if rank == root else None


@check()
def objects_are_broadcast_and_scattered(rank: int, size: int) -> Cases:
    """The root has ["a", 2, None]; all get these, or by scatter each its rank's square."""
    for root in {0, size - 1}:
        objects: list[Any] = ["a", 2, None] if rank == root else [None] * 3
        dist.broadcast_object_list(objects, root)
        yield ("broadcast_object_list", root), objects, ["a", 2, None]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [r * r for r in range(size)] if rank == root else None, root)
        yield ("scatter_object_list", root), mine, [rank * rank]


# -- groups ------------------------------------------------------------------------------------------------------------


@check(needs=2)
def halves_work_side_by_side(rank: int, size: int) -> Cases:
    """Even and odd ranks sum [r] among themselves: evens get 0 + 2 + ..., odds 1 + 3 + ...; roots are global ranks."""
    members = list(range(rank % 2, size, 2))
    with group_of(range(0, size, 2)) as evens, group_of(range(1, size, 2)) as odds:
        group = odds if rank % 2 else evens
        yield "place", (dist.get_rank(group), dist.get_world_size(group)), (rank // 2, len(members))
        t = torch.tensor([rank])
        dist.all_reduce(t, group=group)
        yield "all_reduce", t, torch.tensor([sum(members)])
        t = torch.tensor([rank])
        dist.broadcast(t, members[-1], group=group)
        yield "broadcast", t, torch.tensor([members[-1]])
        outs = [torch.zeros(1, dtype=torch.int64) for _ in members] if rank == members[-1] else None
        dist.gather(torch.tensor([rank]), outs, members[-1], group=group)
        yield "gather", outs, [torch.tensor([m]) for m in members] if rank == members[-1] else None
        dist.barrier(group)


@check(needs=3)
def groups_overlap(rank: int, size: int) -> Cases:
    """Group a has all ranks but the last, b all but rank 0; both sum [1] at once, in two orders; then the world."""
    with group_of(range(size - 1)) as a, group_of(range(1, size)) as b:
        mine = [group for group, ranks in ((a, range(size - 1)), (b, range(1, size))) if rank in ranks]
        for order in (mine, mine[::-1]):
            sums = [torch.ones(5) for _ in order]
            works = [dist.all_reduce(t, group=group, async_op=True) for t, group in zip(sums, order, strict=True)]
            for work in works:
                work.wait()
            yield "groups", sums, [torch.full((5,), size - 1.0)] * len(order)
        t = torch.ones(5)
        dist.all_reduce(t)
        yield "world", t, torch.full((5,), float(size))


@check()
def a_group_of_one_and_a_second_group_of_all(rank: int, size: int) -> Cases:
    """Alone, [r] stays [r]; in a second group of all ranks it becomes n(n-1)/2."""
    for r in range(size):
        with group_of([r]) as alone:
            if rank == r:
                t = torch.tensor([rank])
                dist.all_reduce(t, group=alone)
                yield "alone", t, torch.tensor([rank])
    with group_of(range(size)) as everyone:
        t = torch.tensor([rank])
        dist.all_reduce(t, group=everyone)
        yield "everyone", t, torch.tensor([size * (size - 1) // 2])


@check(needs=4)
def subgroups_of_two(rank: int, size: int) -> Cases:
    """Ranks 2i and 2i+1 form a group: [r] becomes 4i + 1, and each sends the other [r], by its place in the group."""
    mine, groups = dist.new_subgroups(2)
    t = torch.tensor([rank])
    dist.all_reduce(t, group=mine)
    yield "all_reduce", t, torch.tensor([rank // 2 * 4 + 1])
    output = torch.zeros(1, dtype=torch.int64)
    work = dist.isend(torch.tensor([rank]), group=mine, group_dst=1 - rank % 2)
    source = dist.recv(output, group=mine, group_src=1 - rank % 2)
    work.wait()
    yield "sent", (source, output), (rank ^ 1, torch.tensor([rank ^ 1]))
    for group in groups:
        if group is mine:
            dist.destroy_process_group(group)


@check(needs=2)
def a_group_that_only_its_members_make(rank: int, size: int) -> Cases:
    """Ranks 0 and 1 make a group without the others: [r+1] becomes [3]."""
    if rank < 2:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        t = torch.tensor([rank + 1])
        dist.all_reduce(t, group=group)
        yield "sum", t, torch.tensor([3])
        dist.destroy_process_group(group)


# -- asynchronous ------------------------------------------------------------------------------------------------------


def _start(kind: str, rank: int, size: int) -> tuple[Any, Any, Any]:
    """Start ``kind`` on row r: its Work, where the result will be, and the result."""
    rows = [row(r) for r in range(size)]
    if kind in ("all_reduce", "broadcast", "reduce"):
        t = row(rank)
        work = getattr(dist, kind)(t, *([] if kind == "all_reduce" else [0]), async_op=True)
        expected = row(0) if kind == "broadcast" else total(size)
        return work, *((t, expected) if kind != "reduce" or rank == 0 else (None, None))
    if kind == "barrier":
        return dist.barrier(async_op=True), None, None
    if kind in ("all_gather_into_tensor", "all_to_all_single"):
        output = blank(shape=(3 * size,))
        source = row(rank) if kind == "all_gather_into_tensor" else torch.cat([row(rank)] * size)
        return getattr(dist, kind)(output, source, async_op=True), output, torch.cat(rows)
    if kind in ("reduce_scatter", "reduce_scatter_tensor", "scatter"):
        output = blank()
        if kind == "scatter":
            return dist.scatter(output, rows if rank == 0 else None, async_op=True), output, row(rank)
        source = [row(rank)] * size if kind == "reduce_scatter" else torch.cat([row(rank)] * size)
        return getattr(dist, kind)(output, source, async_op=True), output, total(size)
    outs = [blank() for _ in range(size)]
    if kind == "gather":
        work = dist.gather(row(rank), outs if rank == 0 else None, async_op=True)
        return work, *((outs, rows) if rank == 0 else (None, None))
    source = row(rank) if kind == "all_gather" else [row(rank)] * size
    return getattr(dist, kind)(outs, source, async_op=True), outs, rows


SCATTERED = ["reduce_scatter", "reduce_scatter_tensor"]
KINDS = [
    *["all_reduce", "broadcast", "reduce", "barrier", "all_gather_into_tensor", "all_to_all_single", "scatter"],
    *["gather", "all_gather", "all_to_all"],
]


@check()
def every_collective_can_be_waited_for(rank: int, size: int) -> Cases:
    """Row r goes through each kind with async_op; ``wait`` is True, and twice does no harm."""
    for kind in [*KINDS, *SCATTERED]:
        work, got, expected = _start(kind, rank, size)
        yield kind, (work.wait(), got), (True, expected)
        yield (kind, "again"), work.wait(), True


@check()
def every_collective_can_be_polled(rank: int, size: int) -> Cases:
    """Row r goes through each kind; ``is_completed`` becomes True without a ``wait``, and the result is there."""
    for kind in KINDS:
        work, got, expected = _start(kind, rank, size)
        deadline = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.0001)
        yield kind, (work.is_completed(), got), (True, expected)


@check(beyond_gloo=True)
def reduce_scatter_can_be_polled_and_has_a_future(rank: int, size: int) -> Cases:
    """As above for the two forms of reduce_scatter, whose gloo form has no future and does not say when it is done."""
    for kind in SCATTERED:
        work, got, expected = _start(kind, rank, size)
        deadline = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.0001)
        yield kind, (work.is_completed(), got), (True, expected)
        work, got, expected = _start(kind, rank, size)
        work.get_future().wait()
        yield (kind, "future"), got, expected


@check()
def every_collective_has_a_future(rank: int, size: int) -> Cases:
    """Row r goes through each kind; ``get_future().wait()`` without a ``Work.wait`` suffices."""
    for kind in KINDS:
        work, got, expected = _start(kind, rank, size)
        work.get_future().wait()
        yield kind, got, expected


@check()
def futures_chain(rank: int, size: int) -> Cases:
    """The future of a sum holds [sum]; ``then`` doubles it, and a second ``then`` adds one."""
    t = row(rank)
    future = dist.all_reduce(t, async_op=True).get_future()
    chained = future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    yield "chain", chained.wait(), total(size) * 2 + 1
    yield "value", future.value(), [total(size)]


@check()
def works_are_waited_for_in_any_order(rank: int, size: int) -> Cases:
    """Eight sums of 1, 10, ..., 10^5 values and two more, waited for from the r-th on, so in another order on each."""
    sums = [torch.full((numel,), rank + 1.0) for numel in (1, 10, 100, 1000, 10_000, 100_000, 7, 0)]
    works = [dist.all_reduce(t, async_op=True) for t in sums]
    for i in range(len(works)):
        works[(i * 3 + rank) % len(works)].wait()
    yield "sums", sums, [torch.full_like(t, triangle(size)) for t in sums]


@check()
def synchronous_collectives_overtake_nothing(rank: int, size: int) -> Cases:
    """While sums of [r+1] are under way a broadcast and a barrier are called; the works are waited for afterwards."""
    sums = [torch.full((1000,), rank + 1.0) for _ in range(4)]
    works = [dist.all_reduce(t, async_op=True) for t in sums]
    t = row(rank)
    dist.broadcast(t, size - 1)
    dist.barrier()
    yield "broadcast", t, row(size - 1)
    for work in works:
        work.wait()
    yield "sums", sums, [torch.full((1000,), float(triangle(size)))] * 4


@check()
def a_work_may_be_dropped(rank: int, size: int) -> Cases:
    """Five works are thrown away at once; a sum after them is right, and by then so are they."""
    sums = [row(rank) for _ in range(5)]
    for t in sums:
        dist.all_reduce(t, async_op=True)
    t = row(rank)
    dist.all_reduce(t)
    dist.barrier()
    yield "later", t, total(size)
    yield "dropped", sums, [total(size)] * 5


@check()
def collectives_are_called_from_a_second_thread(rank: int, size: int) -> Cases:
    """A thread sums row r between two sums of the main thread, and waits for a work that this one has started."""
    sums = [row(rank) for _ in range(4)]
    dist.all_reduce(sums[0])
    work = dist.all_reduce(sums[1], async_op=True)

    def run() -> None:
        work.wait()
        dist.all_reduce(sums[2])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    dist.all_reduce(sums[3])
    yield "sums", sums, [total(size)] * 4


# -- several tensors at once -------------------------------------------------------------------------------------------


@check()
def coalesced_calls(rank: int, size: int) -> Cases:
    """Rows of three lengths at once: all_reduce gives their sums, all_gather all of them."""
    lengths = (1, 3, 5)
    sums = [row(rank, shape=(n,)) for n in lengths]
    dist.all_reduce_coalesced(sums)
    yield "sums", sums, [total(size, shape=(n,)) for n in lengths]
    outs = [[blank(shape=(n,)) for n in lengths] for _ in range(size)]
    dist.all_gather_coalesced(outs, [row(rank, shape=(n,)) for n in lengths])
    yield "gathered", outs, [[row(r, shape=(n,)) for n in lengths] for r in range(size)]
    sums = [row(rank, shape=(n,)) for n in lengths]
    dist.all_reduce_coalesced(sums, dist.ReduceOp.MAX, async_op=True).wait()
    yield "async", sums, [row(size - 1, shape=(n,)) for n in lengths]


@check()
def the_coalescing_manager(rank: int, size: int) -> Cases:
    """Rows of three lengths in one block: their sums, all of them, or the sums of the rank's own part."""
    lengths = (1, 3, 5)
    for async_ops in (False, True):
        sums = [row(rank, shape=(n,)) for n in lengths]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for t in sums:
                dist.all_reduce(t)
        if async_ops:
            manager.wait()
        yield ("all_reduce", async_ops), sums, [total(size, shape=(n,)) for n in lengths]

        gathered = [blank(shape=(n * size,)) for n in lengths]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for n, output in zip(lengths, gathered, strict=True):
                dist.all_gather_into_tensor(output, row(rank, shape=(n,)))
        if async_ops:
            manager.wait()
        expected = [torch.cat([row(r, shape=(n,)) for r in range(size)]) for n in lengths]
        yield ("all_gather_into_tensor", async_ops), gathered, expected

        outputs = [blank(shape=(n,)) for n in lengths]
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for n, output in zip(lengths, outputs, strict=True):
                source = torch.cat([row(rank, shape=(n,)) + 100 * s for s in range(size)])
                dist.reduce_scatter_tensor(output, source)
        if async_ops:
            manager.wait()
        expected = [total(size, shape=(n,)) + 100 * size * rank for n in lengths]
        yield ("reduce_scatter_tensor", async_ops), outputs, expected


@check(beyond_gloo=True)
def coalesced_calls_of_several_dtypes(rank: int, size: int) -> Cases:
    """[r+1] in float32, and 2^40 + r in int64, which float32 could not hold, are gathered and scattered at once."""
    group = dist.group.WORLD
    assert group is not None
    outs = [[blank(shape=(1,)), blank(torch.int64, (1,))] for _ in range(size)]
    group.allgather_coalesced(outs, [torch.tensor([rank + 1.0]), torch.tensor([2**40 + rank])]).wait()
    yield "gathered", outs, [[torch.tensor([r + 1.0]), torch.tensor([2**40 + r])] for r in range(size)]
    floats, integers = blank(shape=(1,)), blank(torch.int64, (1,))
    sources = [torch.full((size,), rank + 1.0), torch.full((size,), 2**40 + rank)]
    group.reduce_scatter_tensor_coalesced([floats, integers], sources).wait()
    expected = torch.tensor([float(triangle(size))]), torch.tensor([size * 2**40 + size * (size - 1) // 2])
    yield "scattered", (floats, integers), expected


# -- inference mode ----------------------------------------------------------------------------------------------------


def _all_kinds(rank: int, size: int) -> list[tuple[object, Any, Any]]:
    """Each kind on row r, a large sum, a message to the next rank, objects, and a sparse sum."""
    cases: list[tuple[object, Any, Any]] = []
    for kind in [*KINDS, *SCATTERED]:
        work, got, expected = _start(kind, rank, size)
        work.wait()
        cases.append((kind, got, expected))
    t = torch.full((300_000,), rank + 1.0)
    dist.all_reduce(t)
    cases.append(("large", t, torch.full((300_000,), float(triangle(size)))))
    outs = [torch.empty(70_000) for _ in range(size)]
    dist.all_gather(outs, torch.full((70_000,), rank + 1.0))
    cases.append(("gathered", outs, [torch.full((70_000,), r + 1.0) for r in range(size)]))
    if size > 1:
        work = dist.isend(row(rank), (rank + 1) % size)
        dist.recv(t := blank(), (rank - 1) % size)
        work.wait()
        cases.append(("message", t, row((rank - 1) % size)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, "x" * rank)
    cases.append(("objects", objects, ["x" * r for r in range(size)]))
    t = sparse([[rank]], [rank + 1.0], (size,))
    dist.all_reduce(t)
    t._values().mul_(2)  # the sum is the caller's, to do with as with any tensor
    cases.append(("sparse", t.to_dense(), torch.arange(2.0, 2 * size + 1, 2)))
    return cases


@check()
def inference_mode_leaves_nothing_behind(rank: int, size: int) -> Cases:
    """All kinds in inference mode and out of it, by turns; at last every other rank is in it alone."""
    for inference in (True, False, rank % 2 == 0, rank % 2 == 1):
        with torch.inference_mode(inference):
            cases = _all_kinds(rank, size)
        for case, got, expected in cases:
            yield (case, inference), got, expected


@check()
def what_begins_in_inference_mode_ends_elsewhere(rank: int, size: int) -> Cases:
    """Works of each kind begin in it, and are waited for outside, or by a future alone; rank r comes 5r ms late."""
    for inference in (True, False):
        with torch.inference_mode(inference):
            time.sleep(0.005 * rank)
            started = [(kind, *_start(kind, rank, size)) for kind in KINDS]
        with torch.inference_mode(not inference):
            for kind, work, got, expected in started:
                work.wait()
                yield (kind, inference), got, expected
        with torch.inference_mode(inference):
            time.sleep(0.005 * rank)
            started = [(kind, *_start(kind, rank, size)) for kind in KINDS]
        for kind, work, got, expected in started:
            work.get_future().wait()
            yield (kind, inference, "future"), got, expected


@check()
def tensors_of_inference_mode_are_filled_outside(rank: int, size: int) -> Cases:
    """Row r in (2, 3) and room for all rows are made in inference mode; the sum and all rows come into them outside."""
    with torch.inference_mode():
        t, outs = row(rank, shape=(2, 3)), [blank(shape=(2, 3)) for _ in range(size)]
    dist.all_reduce(t)
    yield "sum", t, total(size, shape=(2, 3))
    if dist.get_backend() != "gloo":
        dist.all_gather(outs, row(rank, shape=(2, 3)))
        yield "gathered", outs, [row(r, shape=(2, 3)) for r in range(size)]


@check(beyond_gloo=True)
def another_default_device(rank: int, size: int) -> Cases:
    """Tensors are made on the CPU, and what collectives make for themselves while one waits must be there too.

    Rank r comes 5r ms late, so that most is done in the waits. The message that comes first is received last.
    """
    rows = [row(r) for r in range(size)]
    uneven = [torch.full((r,), r + 1.0) for r in range(size)]
    uneven_outs = [blank(shape=(r,)) for r in range(size)]
    gathered, exchanged = ([blank() for _ in range(size)] for _ in range(2))
    large, large_outs = torch.full((300_000,), 1.0), [torch.empty(70_000) for _ in range(size)]
    mine = sparse([[rank]], [rank + 1.0], (size,))
    parts = [torch.full((70_000,), r + 1.0) for r in range(size)]
    messages = [blank(), blank()]
    time.sleep(0.005 * rank)
    with torch.device("meta"):
        works = [
            dist.all_reduce(large, async_op=True),
            dist.all_gather(large_outs, parts[rank], async_op=True),
            dist.all_gather(uneven_outs, uneven[rank], async_op=True),
            dist.gather(rows[rank], gathered if rank == 0 else None, async_op=True),
            dist.all_to_all(exchanged, rows, async_op=True),
            dist.all_reduce(mine, async_op=True),
        ]
        for work in works:
            work.wait()
        if size > 1:
            works = [dist.isend(rows[rank], (rank + 1) % size, tag=tag) for tag in (1, 2)]
            for tag in (2, 1):
                dist.recv(messages[tag - 1], (rank - 1) % size, tag=tag)
            for work in works:
                work.wait()
    yield "large", large, torch.full((300_000,), float(size))
    yield "all_gather", large_outs, parts
    yield "uneven", uneven_outs, uneven
    yield "gather", gathered if rank == 0 else rows, rows
    yield "all_to_all", exchanged, [rows[rank]] * size
    yield "sparse", mine.to_dense(), torch.arange(1.0, size + 1)
    yield "messages", messages if size > 1 else [rows[0]] * 2, [rows[(rank - 1) % size]] * 2


# -- layouts and sizes -------------------------------------------------------------------------------------------------


def _laid_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A view with ``values`` in it, whose elements do not lie in a row, and the gaps between them, all -7."""
    if layout == "transposed":
        return values.t().contiguous().t(), torch.empty(0)
    base = torch.full((values.shape[0], 2 * values.shape[1] + 1), -7.0)
    view = base[:, 1::2]
    view.copy_(values)
    return view, base[:, ::2]


def _through_every_collective(rank: int, size: int, layout: str) -> Cases:
    """Row r in (2, 3), laid out as told, as the input and the output of every collective; -7 stays in the gaps."""
    shape = (2, 3)
    rows = [row(r, shape=shape) for r in range(size)]
    sums = total(size, shape=shape)
    gaps = []

    def lay(values: torch.Tensor) -> torch.Tensor:
        view, gap = _laid_out(values, layout)
        gaps.append(gap)
        return view

    def room() -> list[torch.Tensor]:
        return [lay(blank(shape=shape)) for _ in range(size)]

    def copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.contiguous() for t in tensors]

    t = lay(rows[rank])
    dist.all_reduce(t)
    yield "all_reduce", t.contiguous(), sums
    t = lay(rows[rank])
    dist.broadcast(t, size - 1)
    yield "broadcast", t.contiguous(), rows[-1]
    t = lay(rows[rank])
    dist.reduce(t, 0)
    yield "reduce", t.contiguous() if rank == 0 else None, sums if rank == 0 else None
    outs = room()
    dist.all_gather(outs, lay(rows[rank]))
    yield "all_gather", copied(outs), rows
    outs = room()
    dist.gather(lay(rows[rank]), outs if rank == 0 else None)
    yield "gather", copied(outs) if rank == 0 else [], rows if rank == 0 else []
    t = lay(blank(shape=shape))
    dist.scatter(t, [lay(r) for r in rows] if rank == 0 else None)
    yield "scatter", t.contiguous(), rows[rank]
    t = lay(blank(shape=shape))
    dist.reduce_scatter(t, [lay(rows[rank] + s) for s in range(size)])
    yield "reduce_scatter", t.contiguous(), sums + size * rank
    outs = room()
    dist.all_to_all(outs, [lay(rows[rank] + s) for s in range(size)])
    yield "all_to_all", copied(outs), [r + rank for r in rows]
    yield "gaps", all(bool((gap == -7).all()) for gap in gaps), True


@check()
def transposed_tensors(rank: int, size: int) -> Cases:
    """Row r in (2, 3), column after column in memory, through every collective."""
    yield from _through_every_collective(rank, size, "transposed")


@check(beyond_gloo=True)
def tensors_with_gaps(rank: int, size: int) -> Cases:
    """Row r in every other column of a base of -7, through every collective. Gloo reads and writes the gaps."""
    yield from _through_every_collective(rank, size, "strided")


@check(needs=2, beyond_gloo=True)
def messages_with_gaps(rank: int, size: int) -> Cases:
    """Each rank sends row r in every other column of a base to the next, which takes it in such columns."""
    for layout in ("transposed", "strided"):
        work = dist.isend(_laid_out(row(rank, shape=(2, 3)), layout)[0], (rank + 1) % size)
        view, gap = _laid_out(blank(shape=(2, 3)), layout)
        dist.recv(view, (rank - 1) % size)
        work.wait()
        yield layout, view.contiguous(), row((rank - 1) % size, shape=(2, 3))
        yield (layout, "gaps"), bool((gap == -7).all()), True


@check(beyond_gloo=True)
def memory_formats_may_differ_between_ranks(rank: int, size: int) -> Cases:
    """A (1, 2, 2, 2) row r, channels last on odd ranks: values meet by index, not by place in memory."""
    shape = (1, 2, 2, 2)

    def mine() -> torch.Tensor:
        values = row(rank, shape=shape)
        return values.to(memory_format=torch.channels_last) if rank % 2 else values

    t = mine()
    dist.all_reduce(t)
    yield "all_reduce", t.contiguous(), total(size, shape=shape)
    t = mine()
    dist.broadcast(t, 0)
    yield "broadcast", t.contiguous(), row(0, shape=shape)


@check()
def inputs_may_be_expanded(rank: int, size: int) -> Cases:
    """[r+1] expanded to three values is as good an input as three values."""
    source = torch.tensor([rank + 1.0]).expand(3)
    outs = [blank() for _ in range(size)]
    dist.all_gather(outs, source)
    yield "all_gather", outs, [torch.full((3,), r + 1.0) for r in range(size)]
    output = blank()
    dist.reduce_scatter(output, [source] * size)
    yield "reduce_scatter", output, torch.full((3,), float(triangle(size)))
    dist.all_to_all(outs, [source] * size)
    yield "all_to_all", outs, [torch.full((3,), r + 1.0) for r in range(size)]


@check(beyond_gloo=True)
def expanded_inputs_are_scattered(rank: int, size: int) -> Cases:
    """Rank 0 gives each rank [r+1], expanded to three values; gloo reads two values behind it."""
    output = blank()
    dist.scatter(output, [torch.tensor([r + 1.0]).expand(3) for r in range(size)] if rank == 0 else None)
    yield "scatter", output, torch.full((3,), rank + 1.0)


@check()
def parts_of_a_tensor_at_odd_offsets(rank: int, size: int) -> Cases:
    """Parts [1:8], [3:10] of a base of -7: the part becomes the sum, or rank 0's row; the rest stays -7."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int8):
        for start in (1, 3):
            base = torch.full((16,), -7, dtype=dtype)
            part = base[start : start + 7]
            part.fill_(rank + 1)
            dist.all_reduce(part)
            expected = torch.full((16,), -7, dtype=dtype)
            expected[start : start + 7] = triangle(size)
            yield (dtype, start, "all_reduce"), base, expected
            part.fill_(rank + 1)
            dist.broadcast(part, 0)
            expected[start : start + 7] = 1
            yield (dtype, start, "broadcast"), base, expected
            outs = torch.full((8 * size,), -7, dtype=dtype)
            dist.all_gather([outs[8 * r + 1 : 8 * r + 8] for r in range(size)], part)
            expected = torch.ones(size, 8, dtype=dtype)
            expected[:, 0] = -7
            yield (dtype, start, "all_gather"), outs, expected.flatten()


@check()
def nothing_at_all(rank: int, size: int) -> Cases:
    """Tensors without elements go through everything, and a sum after that is right."""
    nothing = torch.zeros(0)
    for t in (nothing, torch.zeros(0, 3), torch.zeros(2, 0)):
        dist.all_reduce(t)
        dist.broadcast(t, 0)
        dist.reduce(t, 0)
        dist.all_gather([torch.zeros_like(t) for _ in range(size)], t)
        dist.gather(t, [torch.zeros_like(t) for _ in range(size)] if rank == 0 else None)
        dist.scatter(torch.zeros_like(t), [t] * size if rank == 0 else None)
        dist.reduce_scatter(torch.zeros_like(t), [t] * size)
        dist.all_to_all([torch.zeros_like(t) for _ in range(size)], [t] * size)
    dist.all_gather_into_tensor(nothing, nothing)
    dist.reduce_scatter_tensor(nothing, nothing)
    dist.all_to_all_single(nothing, nothing)
    t = row(rank)
    dist.all_reduce(t)
    yield "afterwards", t, total(size)


@check(needs=2)
def an_empty_message_is_a_message(rank: int, size: int) -> Cases:
    """Rank r sends an empty tensor, then [r]; the next gets both in turn."""
    works = [dist.isend(t, (rank + 1) % size) for t in (torch.zeros(0), torch.tensor([float(rank)]))]
    empty, full = torch.zeros(0), torch.zeros(1)
    dist.recv(empty, (rank - 1) % size)
    dist.recv(full, (rank - 1) % size)
    for work in works:
        work.wait()
    yield "second", full, torch.tensor([float((rank - 1) % size)])


@check()
def single_values(rank: int, size: int) -> Cases:
    """The zero-dimensional r+1 goes through everything that takes lists."""
    one = torch.tensor(rank + 1.0)
    everyone = [torch.tensor(r + 1.0) for r in range(size)]

    def blanks() -> list[torch.Tensor]:
        return [torch.tensor(99.0) for _ in range(size)]

    t = one.clone()
    dist.all_reduce(t)
    yield "all_reduce", t, torch.tensor(float(triangle(size)))
    t = one.clone()
    dist.broadcast(t, size - 1)
    yield "broadcast", t, torch.tensor(float(size))
    t = one.clone()
    dist.reduce(t, 0)
    yield "reduce", t if rank == 0 else None, torch.tensor(float(triangle(size))) if rank == 0 else None
    outs = blanks()
    dist.all_gather(outs, one)
    yield "all_gather", outs, everyone
    outs = blanks() if rank == 0 else None
    dist.gather(one, outs)
    yield "gather", outs, everyone if rank == 0 else None
    t = torch.tensor(99.0)
    dist.scatter(t, everyone if rank == 0 else None)
    yield "scatter", t, one
    dist.reduce_scatter(t, [one] * size)
    yield "reduce_scatter", t, torch.tensor(float(triangle(size)))
    outs = blanks()
    dist.all_to_all(outs, [one] * size)
    yield "all_to_all", outs, everyone


@check(beyond_gloo=True)
def single_values_and_one_tensor(rank: int, size: int) -> Cases:
    """The zero-dimensional r+1 is gathered into (n,), and (n,) reduced to one value each."""
    output = blank(shape=(size,))
    dist.all_gather_into_tensor(output, torch.tensor(rank + 1.0))
    yield "all_gather_into_tensor", output, torch.arange(size) + 1.0
    output = torch.tensor(99.0)
    dist.reduce_scatter_tensor(output, torch.arange(size) + 1.0)
    yield "reduce_scatter_tensor", output, torch.tensor(size * (rank + 1.0))


@check()
def large_tensors(rank: int, size: int) -> Cases:
    """9 MiB and 12 bytes of a pattern with a period of 251, shifted or raised by the rank, through what streams."""
    t = pattern(LARGE) + rank
    dist.all_reduce(t)
    yield "all_reduce", t, pattern(LARGE) * size + size * (size - 1) // 2
    for root in {0, size - 1}:
        t = pattern(LARGE, rank)
        dist.broadcast(t, root)
        yield ("broadcast", root), t, pattern(LARGE, root)
    t = pattern(LARGE) + rank
    dist.reduce(t, size - 1)
    if rank == size - 1:
        yield "reduce", t, pattern(LARGE) * size + size * (size - 1) // 2
    t = pattern(LARGE).to(torch.uint8) // (rank + 1)  # a quarter of the bytes, so of another block size
    dist.all_reduce(t, dist.ReduceOp.MIN)
    yield "bytes", t, pattern(LARGE).to(torch.uint8) // size


@check()
def large_pieces(rank: int, size: int) -> Cases:
    """Each piece is 9 MiB / n and some odd bytes of the pattern, shifted by giver and taker."""
    numel = LARGE // size + 5
    output = blank(shape=(size * numel,))
    dist.all_gather_into_tensor(output, pattern(numel, rank))
    yield "all_gather_into_tensor", list(output.split(numel)), [pattern(numel, r) for r in range(size)]
    source = torch.cat([pattern(numel, 10 * rank + s) for s in range(size)])
    dist.all_to_all_single(output, source)
    yield "all_to_all_single", list(output.split(numel)), [pattern(numel, 10 * r + rank) for r in range(size)]
    outs = [blank(shape=(numel,)) for _ in range(size)] if rank == size - 1 else None
    dist.gather(pattern(numel, rank), outs, size - 1)
    yield "gather", outs, [pattern(numel, r) for r in range(size)] if rank == size - 1 else None
    t = blank(shape=(numel,))
    dist.scatter(t, [pattern(numel, r) for r in range(size)] if rank == 0 else None)
    yield "scatter", t, pattern(numel, rank)
    source = torch.cat([pattern(numel, s) + rank for s in range(size)])
    dist.reduce_scatter_tensor(t, source)
    yield "reduce_scatter_tensor", t, pattern(numel, rank) * size + size * (size - 1) // 2


@check(needs=2)
def large_messages(rank: int, size: int) -> Cases:
    """Each rank sends 9 MiB and 12 bytes to the next and to the one before, all at once, then a short one."""
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(pattern(LARGE, rank), after, tag=1), dist.isend(pattern(LARGE, rank + 100), before, tag=2)]
    sends.append(dist.isend(torch.tensor([rank]), after, tag=1))
    outs = [blank(shape=(LARGE,)), blank(shape=(LARGE,)), torch.tensor([-1])]
    dist.recv(outs[0], before, tag=1)
    dist.recv(outs[1], after, tag=2)
    dist.recv(outs[2], before, tag=1)
    for work in sends:
        work.wait()
    yield "both ways", outs, [pattern(LARGE, before), pattern(LARGE, after + 100), torch.tensor([before])]


@check()
def many_in_a_row(rank: int, size: int) -> Cases:
    """200 calls without a pause: in round i, [i + r] becomes ni + n(n-1)/2, and rank i%n broadcasts [i]."""
    sums, copies = [], []
    for i in range(100):
        t = torch.tensor([i + rank])
        dist.all_reduce(t)
        sums.append(t.item())
        t = torch.tensor([i if rank == i % size else -1])
        dist.broadcast(t, i % size)
        copies.append(t.item())
    yield "sums", sums, [size * i + size * (size - 1) // 2 for i in range(100)]
    yield "copies", copies, list(range(100))


@check()
def the_sender_may_write_on_at_once(rank: int, size: int) -> Cases:
    """After a synchronous call returns, its input is overwritten with -1; nobody sees that in what was given."""
    for i in range(20):
        t = torch.full((5000,), float(i))
        dist.broadcast(t, i % size)
        kept = t.clone()
        t.fill_(-1)
        yield ("broadcast", i), kept, torch.full((5000,), float(i))
        t = torch.full((5000,), float(i + rank))
        outs = [blank(shape=(5000,)) for _ in range(size)]
        dist.all_gather(outs, t)
        t.fill_(-1)
        yield ("all_gather", i), outs, [torch.full((5000,), float(i + r)) for r in range(size)]


@check()
def one_element_of_many(rank: int, size: int) -> Cases:
    """[::4] of four is one element, whose stride of 4 is that of nothing: through every collective."""

    def one(value: float = 9.0) -> torch.Tensor:
        return torch.full((4,), value)[::4]

    def rooms() -> list[torch.Tensor]:
        return [one() for _ in range(size)]

    rows = [torch.tensor([r + 1.0]) for r in range(size)]
    sums = torch.tensor([float(triangle(size))])
    dist.all_reduce(t := one(rank + 1.0))
    yield "all_reduce", t, sums
    dist.reduce(t := one(rank + 1.0), 0)
    yield "reduce", t if rank == 0 else None, sums if rank == 0 else None
    dist.broadcast(t := one(rank + 1.0), size - 1)
    yield "broadcast", t, rows[-1]
    dist.all_gather(outs := rooms(), one(rank + 1.0))
    yield "all_gather", outs, rows
    dist.gather(one(rank + 1.0), (outs := rooms()) if rank == 0 else None)
    yield "gather", outs if rank == 0 else rows, rows
    dist.scatter(t := one(), [one(r + 1.0) for r in range(size)] if rank == 0 else None)
    yield "scatter", t, rows[rank]
    dist.reduce_scatter(t := one(), [one(rank + 1.0) for _ in range(size)])
    yield "reduce_scatter", t, sums
    dist.all_to_all(outs := rooms(), [one(rank + 1.0) for _ in range(size)])
    yield "all_to_all", outs, rows
    if size > 1:
        work = dist.isend(one(rank + 1.0), (rank + 1) % size)
        dist.recv(t := one(), (rank - 1) % size)
        work.wait()
        yield "message", t, rows[(rank - 1) % size]
    dist.all_reduce(t := torch.full((4, 4), rank + 1.0)[:1, ::4])
    yield "two dimensions", t, sums.view(1, 1)


# -- the same bits -----------------------------------------------------------------------------------------------------


@check()
def sums_have_the_same_bits_everywhere_and_each_time(rank: int, size: int) -> Cases:
    """Random float32, whose sum depends on the order of adding: all ranks and all five runs have the same bits.

    Ranks come late in turn, so that an order of arrival would show.
    """
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(rank))
    first = None
    for late in range(5):
        time.sleep(0.002 * (rank == late % size))
        t = values.clone()
        dist.all_reduce(t)
        bits = t.view(torch.int32)
        first = bits if first is None else first
        yield ("each time", late), bits, first
        lowest, highest = bits.clone(), bits.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        yield ("everywhere", late), (lowest, highest), (bits, bits)
        reference = sum(torch.randn(70_001, generator=torch.Generator().manual_seed(r)).double() for r in range(size))
        yield ("near", late), bool((t - reference).abs().max() < 1e-5), True


# -- what is built on collectives --------------------------------------------------------------------------------------


@check()
def functional_collectives(rank: int, size: int) -> Cases:
    """Row r through torch's functional forms, which return new tensors: the same results, and row r stays."""
    group, mine = dist.group.WORLD, row(rank)
    rows = torch.cat([row(r) for r in range(size)])
    wait = funcol.wait_tensor
    yield "all_reduce", wait(funcol.all_reduce(mine, "sum", group)), total(size)
    yield "avg", wait(funcol.all_reduce(mine, "avg", group)), total(size) / size
    yield "broadcast", wait(funcol.broadcast(mine, 0, group)), row(0)
    yield "all_gather", wait(funcol.all_gather_tensor(mine, 0, group)), rows
    scattered = funcol.reduce_scatter_tensor(torch.cat([mine] * size), "sum", 0, group)
    yield "reduce_scatter", wait(scattered), total(size)
    yield "all_to_all", wait(funcol.all_to_all_single(torch.cat([mine] * size), None, None, group)), rows
    both = funcol.all_reduce_coalesced([mine, 2 * mine], "sum", group)
    yield "all_reduce_coalesced", [wait(t) for t in both], [total(size), 2 * total(size)]
    shifted = funcol.permute_tensor(mine, [(r + 1) % size for r in range(size)], group)
    yield "permute", wait(shifted), row((rank - 1) % size)
    yield "input", mine, row(rank)


@check()
def functional_collectives_have_gradients(rank: int, size: int) -> Cases:
    """[1, 2, 3] is gathered and weighted by r+1: each part's gradient is the sum of all weights, n(n+1)/2."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) * (rank + 1)).sum().backward()
    yield "gradient", x.grad, torch.full((3,), float(triangle(size)))


@check()
def a_device_mesh_and_its_tensors(rank: int, size: int) -> Cases:
    """0 ... 4n-1 in (2n, 2) is sharded by rows, by columns, and whole again; a partial sum of r+1 is n(n+1)/2."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("data",))
    full = torch.arange(4.0 * size).view(2 * size, 2)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    yield "local", sharded.to_local(), full[2 * rank : 2 * rank + 2]
    yield "whole", sharded.full_tensor(), full
    yield "replicated", sharded.redistribute(mesh, [Replicate()]).to_local(), full
    yield "sum", sharded.sum().full_tensor(), torch.tensor(4.0 * size * (4 * size - 1) / 2)
    partial = DTensor.from_local(torch.tensor([rank + 1.0]), mesh, [Partial()])
    yield "partial", partial.full_tensor(), torch.tensor([float(triangle(size))])


@check(needs=4)
def a_device_mesh_of_two_dimensions(rank: int, size: int) -> Cases:
    """(2, n/2): rank r is in row r // (n/2); [r] is summed along each dimension."""
    half = size // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("outer", "inner"))
    for name, members in (("inner", range(rank // half * half, rank // half * half + half)), ("outer", None)):
        t = torch.tensor([rank])
        dist.all_reduce(t, group=mesh.get_group(name))
        expected = sum(members) if members else rank % half * 2 + half
        yield name, t, torch.tensor([expected])
    for name in ("inner", "outer"):
        dist.destroy_process_group(mesh.get_group(name))


@check()
def torchs_own_wrapper(rank: int, size: int) -> Cases:
    """y = wx, x = r+1, through torch's DistributedDataParallel: w is rank 0's, and its gradient (n+1)/2."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, rank + 5.0)
    wrapped = torch.nn.parallel.DistributedDataParallel(layer)
    yield "weight", layer.weight.detach(), torch.tensor([[5.0]])
    wrapped(torch.tensor([[rank + 1.0]])).sum().backward()
    yield "gradient", layer.weight.grad, torch.tensor([[(size + 1) / 2]])


def main(backend: str) -> None:
    """Run all that applies in the job that the environment describes; exit at the first failure, with its name."""
    with paceline.init(backend) as world:
        names = applicable(backend, world.world_size)
        for name in names:
            if found := differences(name, world.rank, world.world_size):
                raise SystemExit(f"rank {world.rank}: {name} failed: " + "; ".join(found))
        world.barrier()
        world.print(f"ok {len(names)} checks")


if __name__ == "__main__":
    main(sys.argv[1])
