"""All-reduces of bfloat16 between ranks on this machine: over gloo, and over shared memory.

    python -m benchmarks.all_reduce [--ranks 2] [--reps 2000] [--save]

Each rank is a process with its share of the cores, and computes on one thread. Microseconds of one
call, as rank 0 sees it in a row of calls: the minimum, which tells what it costs where nothing else
runs, and the median. Both groups sum in rank order. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import row, save, table
from octavo import topology
from octavo.dist.base import Group
from octavo.dist.gloo import gloo_group
from octavo.dist.rendezvous import Rendezvous
from octavo.dist.shared_memory import shared_memory_group

SHAPES = ((1, 576), (8, 576), (64, 576), (64, 4096))
GLOO_SHARE = 10  # so many fewer calls
_ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--reps", type=int, default=2000, help="calls of each shape")
    parser.add_argument("--save", action="store_true", help="save a row in benchmarks/results/")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        measure(args.folder, args.rank, args.ranks, args.reps)
        return 0
    found = _with_others(args.ranks, args.reps)
    values = row("all_reduce", ranks=args.ranks, dtype="bfloat16", microseconds=found)
    if args.save:
        save(values)
    lines = [
        (shape, *(f"{kinds[kind][name]:.1f}" for kind in kinds for name in ("min", "median")))
        for shape, kinds in found.items()
    ]
    print(table(("us", "gloo, min", "median", "shared memory, min", "median"), lines))
    print(json.dumps(values))
    return 0


def _with_others(ranks: int, reps: int) -> dict[str, Any]:
    """Start the other ranks, and be rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["--ranks", str(ranks), "--reps", str(reps), "--folder", folder]
        command = [sys.executable, "-m", "benchmarks.all_reduce", *given, "--rank"]
        others = [
            subprocess.Popen([*command, str(rank)], cwd=_ROOT, stdin=subprocess.DEVNULL)
            for rank in range(1, ranks)
        ]
        cores = os.sched_getaffinity(0)
        try:
            found = measure(folder, 0, ranks, reps)
            os.sched_setaffinity(0, cores)  # those that the row tells
            for other in others:
                if other.wait():
                    sys.exit(f"a rank ended with {other.returncode}")
        finally:
            for other in others:
                other.kill()
    return found


def measure(folder: str, rank: int, ranks: int, reps: int) -> dict[str, Any]:
    """Shape -> kind of group -> microseconds: minimum and median."""
    if shares := topology.shares(ranks):
        os.sched_setaffinity(0, shares[rank])
    torch.set_num_threads(1)
    meeting = Rendezvous(file=f"{folder}/meeting")
    shared = shared_memory_group(meeting, rank, ranks)
    assert shared, "the ranks cannot share memory"
    groups: list[tuple[Group, int]] = [
        (gloo_group(meeting, rank, ranks), max(1, reps // GLOO_SHARE)), (shared, reps),
    ]  # fmt: skip
    return {
        f"{rows}x{width}": {group.kind: timed(group, rows, width, count) for group, count in groups}
        for rows, width in SHAPES
    }


def timed(group: Group, rows: int, width: int, count: int) -> dict[str, float]:
    x = torch.zeros(rows, width, dtype=torch.bfloat16)
    times = []
    group.min(0)  # all have come this far
    for _ in range(count + 1):
        begin = time.perf_counter()
        x = group.all_reduce(x)
        times.append(1e6 * (time.perf_counter() - begin))
    del times[0]  # which may load the kernel
    return {"min": round(min(times), 1), "median": round(statistics.median(times), 1)}


if __name__ == "__main__":
    sys.exit(main())
