"""`octavo bench throughput`: many requests at once, the engine in this process."""

import argparse
import sys

from octavo.cli.arguments import Parser, add_engine_flags
from octavo.cli.bench_datasets import add_dataset_flags, check_dataset, read_samples
from octavo.cli.bench_engine import add_output_flags, load, save
from octavo.errors import ConfigError


def add_arguments(parser: Parser) -> None:
    add_dataset_flags(parser)
    parser.add_argument("--n", type=int, default=1, metavar="INT", help="answers per request")
    add_output_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_dataset(args)
    if args.n < 1:
        raise ConfigError(f"--n must be at least 1, not {args.n}")
    llm = load(args)

    from octavo.bench import offline

    samples = read_samples(args, llm.get_tokenizer(), getattr(args, "seed", None) or 0)
    figures = offline.throughput(
        llm, samples, args.n, not args.disable_detokenize, progress=sys.stderr.isatty()
    )
    print(offline.throughput_text(figures))
    save(args.output_json, figures)
    return 0
