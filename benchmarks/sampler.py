"""Time and memory to the first index, and time per index, of a shuffled sampler: paceline's and torch's.

    python benchmarks/sampler.py

torch makes a list of all indices; paceline computes them one chunk at a time. torch is left out where its list would
take tens of gigabytes. Each line in a process of its own, rank 0 of 8.

Last result (2 cores of an AMD EPYC, Linux 6.18, Python 3.11, torch 2.13.0+cpu):

     samples                 first index      memory      each
     1000000    torch           91.48 ms      48 MiB     56 ns
     1000000    paceline         0.57 ms       4 MiB    138 ns
    10000000    torch          972.57 ms     461 MiB     58 ns
    10000000    paceline         0.51 ms       5 MiB    156 ns
   100000000    torch        23043.56 ms    4592 MiB     34 ns
   100000000    paceline         1.01 ms       4 MiB    196 ns
  1000000000    paceline         0.42 ms       4 MiB    158 ns
"""

import itertools
import json
import resource
import subprocess
import sys
import time

KINDS = {"torch": "torch.utils.data.distributed", "paceline": "paceline.data"}


def measure(kind: str, size: int) -> None:
    module = __import__(KINDS[kind], fromlist=["DistributedSampler"])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    indices = iter(module.DistributedSampler(range(size), num_replicas=8, rank=0))
    next(indices)
    first_s = time.perf_counter() - start
    start = time.perf_counter()
    count = sum(1 for _ in itertools.islice(indices, 100_000))
    each_s = (time.perf_counter() - start) / count
    memory_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    print(json.dumps([first_s * 1e3, memory_mib, each_s * 1e9]))


def main() -> None:
    print(f"{'samples':>12}{'':4}{'':10}{'first index':>14}{'memory':>12}{'each':>10}")
    for size in (10**6, 10**7, 10**8, 10**9):
        for kind in KINDS:
            if kind == "torch" and size > 10**8:
                continue
            command = [sys.executable, __file__, kind, str(size)]
            first_ms, memory_mib, each_ns = json.loads(subprocess.check_output(command, text=True))
            print(f"{size:12}{'':4}{kind:10}{first_ms:11.2f} ms{memory_mib:8.0f} MiB{each_ns:7.0f} ns")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main()
