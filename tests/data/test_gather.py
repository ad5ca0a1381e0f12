"""Gathering: each sample once, in the dataset's order, on every rank; and the same error on every rank.

Unless a test says otherwise there are two ranks, r is the rank, and sample i has the result 10 * i.
"""

import collections
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader as TorchDataLoader

from paceline.data import DataLoader, DistributedSampler, gather
from paceline.data.exchange import _payload_device
from paceline.errors import DataError
from support.datasets import Numbers
from support.ranks import run_ranks

Scores = collections.namedtuple("Scores", ["logits", "names"])


def on_ranks(world_size, fn):
    """What ``fn(rank)`` returned on all ranks, checked to be the same on each, once."""
    results = run_ranks(world_size, lambda world: fn(world.rank), timeout_s=60)
    assert all(result == results[0] for result in results)
    return results[0]


def refusal(call, *arguments, **keywords):
    with pytest.raises(DataError) as caught:
        call(*arguments, **keywords)
    return str(caught.value)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("size", "world_size"), [(21, 2), (3, 7), (24, 3)])
def test_an_evaluation_in_shares_merges_to_each_sample_once_in_order(size, world_size, padding, shuffle):
    def evaluate(rank):
        loader = DataLoader(Numbers(size), 4, shuffle=shuffle, padding=padding)
        outputs = [batch * 10 for batch in loader]
        return gather(outputs, loader).tolist()

    assert on_ranks(world_size, evaluate) == [10 * index for index in range(size)]


def test_gathering_follows_the_epoch_that_the_loader_or_sampler_last_gave():
    def evaluate(rank):
        loader = DataLoader(Numbers(21), 4, shuffle=True, drop_last=True)
        sampler = DistributedSampler(Numbers(9))
        merged = []
        for _ in range(2):
            merged.append(gather([batch * 10 for batch in loader], loader).tolist())
            merged.append(gather([str(index) for index in sampler], sampler))
        seen = sorted(itertools.chain(*merged[::2]))
        return [len(part) for part in merged[::2]], [value % 10 for value in seen], merged[1::2]

    lengths, remainders, names = on_ranks(2, evaluate)
    assert (lengths, remainders) == ([16, 16], [0] * 32)
    assert names == [list("012345678")] * 2


DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def test_every_dtype_arrives_bit_for_bit():
    # Rank r has samples r, r + 2, r + 4; sample i is row i of the whole.
    def collect(rank):
        ok = []
        for dtype in DTYPES:
            whole = torch.arange(12).reshape(6, 2).remainder(2 if dtype == torch.bool else 12).to(dtype)
            merged = gather(whole[rank::2], range(rank, 6, 2))
            same = torch.equal(merged.view(torch.uint8), whole.view(torch.uint8))
            ok.append((merged.dtype == dtype, merged.shape == whole.shape, same))
        return ok

    assert on_ranks(2, collect) == [(True, True, True)] * len(DTYPES)


def test_awkward_tensors_arrive_whole():
    def collect(rank):
        whole = torch.arange(24.0).reshape(6, 2, 2)
        share = whole[rank::2]
        indices = torch.arange(rank, 6, 2)
        tracked = share.clone().requires_grad_()
        conjugate = torch.complex(share, share + 1).conj()
        assert conjugate.is_conj()
        assert conjugate.is_contiguous()
        merged = {
            "transposed": gather(share.transpose(1, 2), indices),
            "tracked": gather(tracked * 2, indices),
            "conjugate": gather(conjugate, indices),
            "zero-sized": gather(share.new_empty(3, 0, 5), indices),
            "flat": gather(share[:, 0, 0], indices),
        }
        expected = {
            "transposed": whole.transpose(1, 2),
            "tracked": whole * 2,
            "conjugate": torch.complex(whole, -whole - 1),
            "zero-sized": whole.new_empty(6, 0, 5),
            "flat": whole[:, 0, 0],
        }
        return [(torch.equal(merged[key], expected[key]), merged[key].requires_grad) for key in merged]

    assert on_ranks(2, collect) == [(True, False)] * 5


def test_batches_of_unequal_size_are_joined_and_indices_may_come_in_batches_too():
    def collect(rank):
        mine = [2, 0, 4] if rank == 0 else [1]
        batches = [torch.tensor([20, 0]), torch.tensor([40])] if rank == 0 else (torch.tensor([10]),)
        forms = [torch.tensor(mine), np.array(mine, dtype=np.int32), tuple(mine), mine]
        forms.append([torch.tensor(mine[:2]), torch.tensor(mine[2:], dtype=torch.int64)])
        return [gather(batches, form).tolist() for form in forms]

    assert on_ranks(2, collect) == [[0, 10, 20, 40]] * 5


def test_single_numbers_are_results_too():
    def collect(rank):
        return gather([torch.tensor(10.0 * index) for index in range(rank, 5, 2)], range(rank, 5, 2)).tolist()

    assert on_ranks(2, collect) == [0.0, 10.0, 20.0, 30.0, 40.0]


def test_a_repeated_sample_keeps_the_result_from_its_first_position_in_the_epoch():
    # Rank 0 had samples 0, 1, 2 and rank 1 had 2, 3, 0; by position: 0 2 1 3 2 0.
    def collect(rank):
        indices = [[0, 1, 2], [2, 3, 0]][rank]
        return gather([f"{index} from {rank}" for index in indices], indices)

    assert on_ranks(2, collect) == ["0 from 0", "1 from 0", "2 from 1", "3 from 1"]


def test_a_rank_without_samples_learns_everything_from_the_others():
    def collect(rank):
        if rank == 1:
            outputs = Scores(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16), ["a", "b"])
            merged = gather(outputs, [5, 2])
            partly = gather({"x": torch.ones(2, 3), "y": [1, 2]}, [1, 0])
        else:
            merged = gather([], [])
            partly = gather({"y": [], "x": []} if rank == 0 else [], torch.tensor([]))
        assert (merged.logits.dtype, merged.logits.device.type) == (torch.int16, "cpu")
        described = type(merged).__name__, merged._fields, merged.logits.tolist(), merged.names
        return described, sorted(partly), partly["x"].tolist(), partly["y"]

    merged, keys, x, y = on_ranks(3, collect)
    assert merged == ("Scores", ("logits", "names"), [[3, 4], [1, 2]], ["b", "a"])
    assert (keys, x, y) == (["x", "y"], [[1.0, 1.0, 1.0]] * 2, [2, 1])


def test_nothing_anywhere_gathers_to_nothing():
    def collect(rank):
        return gather([], []), gather({"a": torch.empty(0, 3)}, [])["a"].shape == (0, 3), gather({}, [])

    assert on_ranks(2, collect) == ([], True, {})
    assert collect(0) == ([], True, {})


def test_structures_nest_and_keep_their_kind():
    def collect(rank):
        outputs = {"head": Scores(torch.tensor([rank]), [{"rank": rank}]), "id": [(rank, None)]}
        merged = gather(outputs, [1 - rank])
        assert type(merged["head"]) is Scores
        return list(merged), merged["head"].logits.tolist(), merged["head"].names, merged["id"]

    expected = ["head", "id"], [1, 0], [{"rank": 1}, {"rank": 0}], [(1, None), (0, None)]
    assert on_ranks(2, collect) == expected


def test_a_world_of_one_needs_no_group_and_no_pickling():
    sampler = DistributedSampler(Numbers(5), shuffle=True)
    order = list(sampler)
    outputs = Scores(torch.tensor(order) * 10.0, [lambda index=index: index for index in order])
    merged = gather(outputs, sampler)
    assert merged.logits.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert [name() for name in merged.names] == [0, 1, 2, 3, 4]


def test_the_result_of_a_world_of_one_shares_no_memory_with_the_input():
    outputs = torch.zeros(3)
    gather(outputs, [0, 1, 2]).fill_(1)
    assert outputs.tolist() == [0, 0, 0]


def test_a_group_gathers_among_its_own_members():
    def collect(world):
        group = dist.new_group([0, 2])
        if world.rank == 1:
            return refusal(gather, [1], [0], group=group)
        return gather([f"from {world.rank}"], [world.rank], group=group)

    first, outsider, last = run_ranks(3, collect, timeout_s=60)
    assert first == last == ["from 0", "from 2"]
    assert outsider == "rank 1 is not in the group that it was to gather with; call on members only"


def test_errors_in_a_group_name_the_rank_in_the_world():
    def collect(world):
        group = dist.new_group([0, 2])
        return world.rank == 1 or refusal(gather, torch.zeros(world.rank), [0, 1], group=group)

    first, _, last = run_ranks(3, collect, timeout_s=60)
    assert first == last
    assert first.startswith("rank 0: outputs has results for 0 samples, but there are 2 indices.")


# What rank r gives, and what all ranks are told.
DISAGREEMENTS = {
    "number": (
        lambda rank: {"outputs": {"x": torch.zeros(3), "y": [0] * (3 - rank)}, "indices": [0, 1, 2]},
        "rank 1: outputs['y'] has results for 2 samples, but there are 3 indices. "
        "Give one result a sample, from a pass that ran to its end.",
    ),
    "dtype": (
        lambda rank: {"outputs": torch.zeros(2, 3, dtype=[torch.float32, torch.float64][rank]), "indices": [0, 1]},
        "rank 1: outputs is a tensor of torch.float64 with rows of shape (3,), but rank 0 has a tensor of "
        "torch.float32 with rows of shape (3,). "
        "Give every rank's results the same structure, dtype and trailing shape.",
    ),
    "trailing shape": (
        lambda rank: {"outputs": {"x": torch.zeros(2, 3 + rank)}, "indices": [0, 1]},
        "rank 1: outputs['x'] is a tensor of torch.float32 with rows of shape (4,), but rank 0 has a tensor of "
        "torch.float32 with rows of shape (3,). "
        "Give every rank's results the same structure, dtype and trailing shape.",
    ),
    "keys": (
        lambda rank: {"outputs": {"x": [1], "yz"[rank]: [1]}, "indices": [rank]},
        "rank 1: outputs is a dict of ['x', 'z'], but rank 0 has a dict of ['x', 'y']. "
        "Give every rank's results the same structure, dtype and trailing shape.",
    ),
    "structure": (
        lambda rank: {"outputs": [Scores([1], [2]), [1]][rank], "indices": [rank]},
        "rank 1: outputs is a list of objects, but rank 0 has a namedtuple Scores(logits, names). "
        "Give every rank's results the same structure, dtype and trailing shape.",
    ),
    "one rank's mistake": (
        lambda rank: {"outputs": [1], "indices": [[0], [0.5]][rank]},
        "rank 1: indices should be a paceline DataLoader or DistributedSampler, or integers in one dimension; "
        "got list with shape (1,) and dtype float64",
    ),
    "pickling": (
        lambda rank: {"outputs": {"f": [1] if rank == 0 else [lambda: 0]}, "indices": [rank]},
        "rank 1: outputs['f'] holds an object that can't be sent to the other ranks: ",
    ),
}


def test_disagreement_raises_the_same_message_on_every_rank_and_the_group_lives_on():
    def collect(rank):
        messages = {name: refusal(gather, **arguments(rank)) for name, (arguments, _) in DISAGREEMENTS.items()}
        assert gather([rank], [rank]) == [0, 1]
        return messages

    messages = on_ranks(2, collect)
    # The end of pickle's own message differs between versions of Python.
    assert messages.pop("pickling").startswith(DISAGREEMENTS["pickling"][1])
    assert messages == {name: DISAGREEMENTS[name][1] for name in messages}


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (3.5, "outputs should be a tensor, a list of tensors or of one object a sample, or a dict or namedtuple of "
              "these; got float"),
        ({"a": None}, "outputs['a'] should be a tensor, a list of tensors or of one object a sample, or a dict or "
                      "namedtuple of these; got NoneType"),
        ({1: [1]}, "outputs is a dict whose keys should all be str, got [1]"),
        ([torch.zeros(1), 1, 2], "outputs mixes 1 tensors with 2 other objects; it should hold batches, all tensors, "
                                 "or one object a sample, none of them a tensor"),
        (torch.tensor(1.0), "outputs holds a tensor without dimensions, such as a batch's mean; a tensor should have "
                            "one row a sample, so compute one value a sample"),
        ({"a": torch.eye(2).to_sparse()}, "outputs['a'] holds a sparse or quantised tensor; make it dense before "
                                          "gathering"),
        ([torch.zeros(1, 2), torch.zeros(1, 3)], "outputs: batch 1 is torch.float32 with rows of shape (3,) on cpu, "
                                                 "but batch 0 is torch.float32 with rows of shape (2,) on cpu"),
    ],
)  # fmt: skip
def test_outputs_of_no_known_form_are_refused(outputs, message):
    assert refusal(gather, outputs, [0]) == f"rank 0: {message}"


@pytest.mark.parametrize(
    ("indices", "got"),
    [
        (torch.zeros(2), "Tensor with shape (2,) and dtype float32"),
        ([[0, 1]], "list with shape (1, 2) and dtype int64"),
        ([[0], [1, 2]], "list with shape () and dtype object"),
        ([True, False], "list with shape (2,) and dtype bool"),
        ({0, 1}, "set with shape () and dtype object"),
        (None, "NoneType with shape () and dtype object"),
    ],
)
def test_indices_of_no_known_form_are_refused(indices, got):
    assert refusal(gather, [1, 2], indices) == (
        "rank 0: indices should be a paceline DataLoader or DistributedSampler, or integers in one dimension; got "
        + got
    )


def test_what_is_often_given_in_place_of_indices_or_results_is_told_what_to_give_instead():
    expected = (
        "rank 0: indices is torch's DataLoader, which does not tell which samples it gave. Load from a "
        "paceline.DataLoader, made with the same arguments but the sampler, and pass that; or pass the paceline "
        "DistributedSampler that torch's loader draws from; or let the dataset return each sample's index, and pass "
        "those."
    )
    assert refusal(gather, [1, 2], TorchDataLoader(Numbers(2))) == expected
    assert refusal(gather, [1, 2], {"id": [1], "x": [2]}) == (
        "rank 0: indices is a dict of ['id', 'x']; pass one of its values: the integers in the order of outputs, as a "
        "tensor or a list of tensors"
    )
    batch = {"logits": torch.zeros(2, 3), "label": torch.zeros(2)}
    assert refusal(gather, [batch, batch], range(4)) == (
        "rank 0: outputs has results for 2 samples, but there are 4 indices. Its items are dicts, it seems one a "
        "batch: pass one dict of lists of batches, {'logits': [batch['logits'] for batch in outputs], 'label': "
        "[batch['label'] for batch in outputs]}."
    )
    assert refusal(gather, ([torch.zeros(4)], [torch.zeros(4)]), range(4)) == (
        "rank 0: outputs has results for 2 samples, but there are 4 indices. Its items are of type list, it seems one "
        "a batch or one a result: pass a dict with a name for each result, whose values are tensors or lists of "
        "batches."
    )


def test_values_and_names_that_come_one_list_a_batch_are_told_how_to_be_joined():
    assert refusal(gather, [torch.tensor(0.5), torch.tensor(0.25)], range(4)) == (
        "rank 0: outputs has results for 2 samples, but there are 4 indices. Its tensors have no dimensions, as a "
        "batch's mean has none: give one value a sample, from a whole pass."
    )
    assert refusal(gather, [["a", "b"], ["c", "d"]], range(4)) == (
        "rank 0: outputs has results for 2 samples, but there are 4 indices. Its items are of type list, it seems one "
        "a batch: join them, as in [result for batch in outputs for result in batch]."
    )


def test_negative_indices_are_refused():
    assert refusal(gather, [1, 2], [0, -1]) == (
        "rank 0: indices should be 0 or more, got -1; count from the dataset's start"
    )


def test_a_loader_that_cannot_tell_its_indices_is_refused():
    foreign = DataLoader(Numbers(2), sampler=[0, 1])
    assert refusal(gather, [1, 2], foreign).startswith("rank 0: only a loader on a paceline DistributedSampler can")


def test_payloads_stay_on_the_cpu_wherever_the_backend_carries_that():
    assert [_payload_device(backend) for backend in ("gloo", "mpi", "shm", "undefined")] == [torch.device("cpu")] * 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_payloads_of_nccl_move_to_the_current_device_and_results_to_the_inputs():
    assert _payload_device("nccl") == torch.device("cuda", torch.cuda.current_device())

    merged = gather(torch.tensor([10.0, 0.0], device="cuda"), [1, 0])
    assert (merged.device.type, merged.tolist()) == ("cuda", [0.0, 10.0])
