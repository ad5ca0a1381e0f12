"""DataParallel on GPUs: on one GPU twice, and on several."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from paceline.parallel import DataParallel, data_parallel, gather, replicate, scatter

pytestmark = pytest.mark.cuda


def places():
    """One GPU twice, and two GPUs where there are."""
    return [["cuda:0", "cuda:0"]] + ([[0, 1]] if torch.cuda.device_count() > 1 else [])


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def test_ten_steps_on_a_side_stream_equal_the_bare_modules():
    for devices in places():
        bare = net().eval().cuda()
        wrapped = DataParallel(copy.deepcopy(bare), devices, loss=nn.CrossEntropyLoss())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, wrapped)]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for step in range(10):
                x = torch.randn(7, 4, dtype=torch.float64).pin_memory()
                y = torch.randint(3, (7,)).pin_memory()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                bare_loss = functional.cross_entropy(bare(x.cuda()), y.cuda())
                bare_loss.backward()
                if step % 2:
                    loss = wrapped.forward_backward(x, target=y)
                else:
                    output = wrapped(x)
                    assert output.device == torch.device("cuda:0")
                    loss = functional.cross_entropy(output, y.cuda())
                    loss.backward()
                torch.testing.assert_close(loss.detach(), bare_loss.detach())
                for optimizer in optimizers:
                    optimizer.step()
        torch.cuda.synchronize()
        for ours, theirs in zip(wrapped.parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_numbers_of_devices_are_torchs():
    wrapped = DataParallel(net().cuda())
    assert wrapped.device_ids == list(range(torch.cuda.device_count()))
    assert wrapped.output_device == 0
    assert wrapped.src_device_obj == torch.device("cuda:0")


def test_shares_lie_on_their_devices_and_are_gathered():
    for devices in places():
        for x in (torch.randn(5, 2), torch.randn(5, 2).pin_memory(), torch.randn(5, 2, device="cuda")):
            shares = scatter(x.requires_grad_(), devices)
            assert [share.device for share in shares] == [
                torch.device("cuda", getattr(d, "index", d)) if isinstance(d, int) else torch.device(d) for d in devices
            ]
            for target in (0, "cpu", -1):
                torch.testing.assert_close(gather(shares, target).cpu(), x.detach().cpu())
        assert gather([torch.ones((), device=d) for d in devices], 0).tolist() == [1, 1]


def test_replicas_lie_on_their_devices_and_gradients_on_the_first():
    for devices in places():
        module = nn.Linear(2, 2).cuda()
        for replica, device in zip(replicate(module, devices), devices, strict=True):
            place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            assert {param.device for param in replica.parameters()} == {place}
        data_parallel(module, torch.ones(4, 2), devices).sum().backward()
        assert module.bias.grad.tolist() == [4, 4]


def test_replicas_run_on_their_device_in_the_callers_autocast_and_stream():
    seen = []

    class Sees(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append((x.device.index, torch.cuda.current_device(), torch.cuda.current_stream(), out.dtype))
            return out

    for devices in places():
        seen.clear()
        wrapped, stream = DataParallel(Sees(2, 2).cuda(), devices), torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.bfloat16):
            wrapped(torch.randn(4, 2))
        torch.cuda.synchronize()
        assert all(device == current and dtype is torch.bfloat16 for device, current, _, dtype in seen)
        assert all(used == stream for device, _, used, _ in seen if device == 0)


def test_no_gpu_holds_more_than_its_share():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU cannot be compared with another")
    wrapped = DataParallel(nn.Linear(256, 8192).cuda(), loss=nn.CrossEntropyLoss())
    x, y = torch.randn(4096, 256), torch.randint(8192, (4096,))
    for _ in range(2):
        wrapped.zero_grad()
        with wrapped.measure_bytes() as peaks:
            wrapped.forward_backward(x, target=y)
    assert peaks[0] <= 1.1 * max(peaks[index] for index in peaks if index)
