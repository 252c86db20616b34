"""`octavo bench latency`: seconds per batch of requests, the engine in this process."""

import argparse
import sys

from octavo.cli.arguments import Parser, add_engine_flags
from octavo.cli.bench_engine import add_output_flags, load, save


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("batch")
    for name, default, text in (
        ("--input-len", 32, "prompt tokens"),
        ("--output-len", 128, "answer tokens"),
        ("--batch-size", 8, "requests at once"),
        ("--n", 1, "answers per request"),
        ("--num-iters-warmup", 10, "batches before the measurement"),
        ("--num-iters", 30, "batches that are measured"),
    ):
        group.add_argument(name, type=int, default=default, metavar="INT",
                           help=f"{text} (default: {default})")  # fmt: skip
    add_output_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    from octavo.bench import offline

    batch = offline.Batch(
        args.input_len,
        args.output_len,
        args.batch_size,
        args.n,
        args.num_iters_warmup,
        args.num_iters,
    )
    # A prefix cache would make a repeated batch cheaper than a new one.
    llm = load(args, enable_prefix_caching=False)
    figures = offline.latency(
        llm,
        llm.get_tokenizer().vocab_size,
        batch,
        getattr(args, "seed", None) or 0,
        not args.disable_detokenize,
        progress=_say if sys.stderr.isatty() else lambda done, total: None,
    )
    print(offline.latency_text(figures))
    save(args.output_json, figures)
    return 0


def _say(done: int, total: int) -> None:
    print(f"\rbatch {done} of {total}", end="\n" if done == total else "", file=sys.stderr)
