"""In the manner of torch's elastic tutorial: a ``Trainer`` that goes on from ``snapshot.pt`` after a failure."""

import argparse
import json
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")


class Trainer:
    def __init__(self, model, train_data, optimizer, save_every, snapshot_path):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.device = self.local_rank if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.train_data = train_data
        self.optimizer = optimizer
        self.save_every = save_every
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        if os.path.exists(snapshot_path):
            self._load_snapshot(snapshot_path)
        self.model = DDP(self.model, device_ids=[self.local_rank] if torch.cuda.is_available() else None)

    def _load_snapshot(self, snapshot_path):
        snapshot = torch.load(snapshot_path, map_location=str(self.device))
        self.model.load_state_dict(snapshot["MODEL_STATE"])
        self.epochs_run = snapshot["EPOCHS_RUN"]
        print(f"Resuming from epoch {self.epochs_run}")

    def _save_snapshot(self, epoch):
        snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epoch + 1}
        torch.save(snapshot, self.snapshot_path + ".part")
        os.replace(self.snapshot_path + ".part", self.snapshot_path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            loss = self._run_batch(source.to(self.device), targets.to(self.device))
        return loss

    def train(self, max_epochs, die_at):
        for epoch in range(self.epochs_run, max_epochs):
            loss = self._run_epoch(epoch)
            if epoch == die_at and self.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.global_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
        dist.all_reduce(loss)
        if self.global_rank == 0:
            result = {"loss": loss.item() / dist.get_world_size(), "world_size": dist.get_world_size()}
            print(json.dumps(result | {"first_epoch": self.epochs_run}))


def main(total_epochs, save_every, die_at, snapshot_path="snapshot.pt"):
    ddp_setup()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    train_data = DataLoader(dataset, batch_size=16, shuffle=False, sampler=DistributedSampler(dataset))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Trainer(model, train_data, optimizer, save_every, snapshot_path).train(total_epochs, die_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("save_every", type=int)
    parser.add_argument("--die-at", type=int, default=-1, help="in its first life rank 1 dies when this epoch ends")
    args = parser.parse_args()
    main(args.total_epochs, args.save_every, args.die_at)
