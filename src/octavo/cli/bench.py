"""`octavo bench`: run one of the benchmarks of the source checkout that this package belongs to."""

import argparse
import runpy
import sys
from pathlib import Path

from octavo.cli.arguments import Parser
from octavo.errors import ConfigError, nearest

ROOT = Path(__file__).parents[3]  # of the checkout, if this is one

# Name -> module, and what it shows.
BENCHMARKS = {
    "throughput": ("benchmarks.run", "workloads W1 to W4 against static batching"),
    "compare": ("benchmarks.compare", "the same on every engine that can be installed"),
    "fragmentation": ("benchmarks.experiments.fragmentation", "KV slots in use / reserved"),
    "concurrency": ("benchmarks.experiments.concurrency", "concurrent requests in the same memory"),
    "longseq": ("benchmarks.experiments.longseq", "long requests against static batches"),
    "preemption": ("benchmarks.experiments.preemption", "swap against recompute"),
    "slo": ("benchmarks.experiments.slo", "a latency target under overload"),
    "priority": ("benchmarks.experiments.priority", "urgent requests under saturation"),
}


def add_arguments(parser: Parser) -> None:
    lines = [f"{name}: {what}" for name, (_, what) in BENCHMARKS.items()]
    parser.add_argument("name", nargs="?", metavar="NAME", help="; ".join(lines))
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="flags of the benchmark; NAME --help lists them",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark's module as a program in this process; returns its exit code.

    Raises ConfigError for an unknown name, or if there are no benchmarks.
    """
    if args.name not in BENCHMARKS:
        what = f"no benchmark {args.name!r}{nearest(args.name, BENCHMARKS)}" if args.name else ""
        raise ConfigError(f"{what or 'name a benchmark'}; there are {', '.join(BENCHMARKS)}")
    if not (ROOT / "benchmarks" / "run.py").is_file():
        raise ConfigError(
            "the benchmarks come with the source tree, not with the installed package: run this "
            "in a checkout, after `pip install --editable '.[bench]'`"
        )
    sys.path.insert(0, str(ROOT))
    module = BENCHMARKS[args.name][0]
    sys.argv = [module, *args.rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(f"octavo: {end.code}", file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
