"""Averaging buckets: launching them, waiting for them, handing out the averages.

The invariant: the buckets of a round are launched in the plan's order, each exactly once, on every rank. An error names
what was being averaged.
"""

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from paceline.parallel.buckets.bucket import Bucket
from paceline.parallel.reducer.channels import Channels
from paceline.parallel.reducer.clock import Moment
from paceline.parallel.reducer.control import Control
from paceline.parallel.reducer.explain import Explained
from paceline.parallel.reducer.rounds import Round
from paceline.parallel.reducer.witness import Counts, Witness
from paceline.parallel.replicas.registry import Registry


class Averaging:
    """Buckets of gradients on their way over ``channels``.

    Attributes:
        num_live: how many ranks the gradients are divided by, where some have run out of data.
    """

    def __init__(self, registry: Registry, channels: Channels, witness: Witness, counts: Counts) -> None:
        self.world_size = dist.get_world_size(channels.gradients)
        self.num_live = self.world_size
        self._registry = registry
        self._channels = channels
        self._witness = witness
        self._counts = counts

    def launch_complete(self, buckets: Sequence[Bucket], current: Round, *, everything: bool = False) -> None:
        """Launch ``buckets`` in order, up to the first that still waits for a gradient."""
        current.is_ready = False
        arrived = current.arrived.keys()
        self._witness.look(arrived)
        while current.num_launched < len(buckets):
            bucket = buckets[current.num_launched]
            if not everything and not bucket.is_complete(arrived):
                return
            began = self._launch(bucket, current.preexisting)
            self._witness.sent(bucket, began)
            current.num_launched += 1

    def wait(self, buckets: Sequence[Bucket]) -> None:
        """Until what was launched is the average."""
        for bucket in buckets:
            with self.explained(bucket):
                bucket.wait()
            self._witness.waited_for(bucket)
        self._witness.end_wait()

    def give(self, buckets: Sequence[Bucket], control: Control) -> None:
        """Put right what came late, and make the averages the parameters' gradients."""
        for bucket, is_late in zip(buckets, control.late, strict=True):
            if is_late:
                self._counts.late += 1
                self._witness.begin_late(bucket, self._registry.names)
                with self.explained(bucket):
                    bucket.reduce_late(self._channels.gradients)
                self._witness.end_late(bucket)
            self._give(bucket, control.used)

    def average_unplanned(self, buckets: Sequence[Bucket], current: Round, control: Control) -> None:
        """From launch to end, what the plan of this round did not have: newcomers, and the unfrozen."""
        self._counts.unplanned += 1
        began = self._witness.now()
        for bucket in buckets:
            self._launch(bucket, current.preexisting)
        for bucket in buckets:
            with self.explained(bucket):
                bucket.wait()
            self._give(bucket, control.used)
        self._witness.unplanned(buckets, self._registry.names, began)

    @torch.no_grad()
    def _launch(self, bucket: Bucket, preexisting: Collection[int]) -> Moment:
        """Pack and send; returns when it was packed."""
        bucket.pack(preexisting)
        self._channels.is_idle = False
        packed = self._witness.now()
        with self.explained(bucket):
            bucket.send(self._channels.gradients)
        return packed

    def _give(self, bucket: Bucket, used: bytes) -> None:
        if self.num_live != self.world_size:
            bucket.rescale(self.world_size / self.num_live)
        bucket.give(used)

    def explained(self, bucket: Bucket | None) -> Explained:
        """Let errors of c10d in this block say what was being averaged: one bucket, or all."""
        return Explained(bucket, self._registry.names, self.world_size)
