"""`octavo bench`: measure a server or the engine, or run an experiment of the source checkout."""

import argparse
import runpy
import sys
from importlib import import_module
from pathlib import Path

from octavo.cli.arguments import Parser
from octavo.errors import ConfigError, nearest

ROOT = Path(__file__).parents[3]  # of the checkout, if this is one

# Name -> module with `add_arguments(parser)` and `run(args)`, and what it measures. vLLM's names.
COMMANDS = {
    "serve": ("octavo.cli.bench_serve", "load any OpenAI-compatible server and time its answers"),
    "latency": ("octavo.cli.bench_latency", "seconds per batch of requests, without a server"),
    "throughput": ("octavo.cli.bench_throughput", "tokens per second, without a server"),
}
# Name -> module of the checkout, and what it shows.
EXPERIMENTS = {
    "workloads": ("benchmarks.run", "workloads W1 to W4 against static batching"),
    "compare": ("benchmarks.compare", "the same on every engine that can be installed"),
    "fragmentation": ("benchmarks.experiments.fragmentation", "KV slots in use / reserved"),
    "concurrency": ("benchmarks.experiments.concurrency", "concurrent requests in the same memory"),
    "longseq": ("benchmarks.experiments.longseq", "long requests against static batches"),
    "preemption": ("benchmarks.experiments.preemption", "swap against recompute"),
    "slo": ("benchmarks.experiments.slo", "a latency target under overload"),
    "priority": ("benchmarks.experiments.priority", "urgent requests under saturation"),
}
_ELSEWHERE = (
    "the experiments come with the source tree, not with the installed package: run this in a "
    "checkout, after `pip install --editable '.[bench]'`"
)


def add_arguments(parser: Parser) -> None:
    known = {**COMMANDS, **EXPERIMENTS}
    lines = [f"{name}: {what}" for name, (_, what) in known.items()]
    note = f" ({', '.join(EXPERIMENTS)} need a source checkout)"
    parser.add_argument("name", nargs="?", metavar="NAME", help="; ".join(lines) + note)
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="FLAGS",
        help="flags of the benchmark; NAME --help lists them",
    )


def run(args: argparse.Namespace) -> int:
    """Run the named benchmark in this process; returns its exit code.

    Raises ConfigError for an unknown name, or for an experiment where there is no checkout.
    """
    if args.name in COMMANDS:
        module = import_module(COMMANDS[args.name][0])
        status: int = module.run(benchmark_parser(args.name).parse(args.rest))
        return status
    if args.name not in EXPERIMENTS:
        known = [*COMMANDS, *EXPERIMENTS]
        what = f"no benchmark {args.name!r}{nearest(args.name, known)}" if args.name else ""
        here = "" if _is_checkout() else f"; {_ELSEWHERE}"
        raise ConfigError(
            f"{what or 'name a benchmark'}; there are {', '.join(COMMANDS)}, and the experiments "
            f"{', '.join(EXPERIMENTS)}{here}"
        )
    if not _is_checkout():
        raise ConfigError(f"{args.name} is an experiment; {_ELSEWHERE}")
    return _experiment(EXPERIMENTS[args.name][0], args.rest)


def benchmark_parser(name: str) -> Parser:
    """The complete parser of `octavo bench NAME`, for a name of COMMANDS."""
    module, what = COMMANDS[name]
    arguments = "[FLAGS]" if name == "serve" else "[MODEL] [FLAGS]"
    prog = f"octavo bench {name}"
    parser = Parser(prog=prog, usage=f"{prog} {arguments}", description=f"{what}.")
    import_module(module).add_arguments(parser)
    return parser


def _is_checkout() -> bool:
    return (ROOT / "benchmarks" / "run.py").is_file()


def _experiment(module: str, rest: list[str]) -> int:
    """Run a module of the checkout as a program."""
    sys.path.insert(0, str(ROOT))
    sys.argv = [module, *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(f"octavo: {end.code}", file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
