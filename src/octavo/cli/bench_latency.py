"""`octavo bench latency`: seconds per batch of requests, the engine in this process."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.errors import ConfigError
from octavo.log import configure

if TYPE_CHECKING:
    from octavo.llm import LLM


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


def add_output_flags(parser: Parser) -> None:
    parser.add_argument("--disable-detokenize", action="store_true", help="leave out the text")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="save the figures as JSON")


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


def load(args: argparse.Namespace, **usual: Any) -> "LLM":
    """The engine of the flags; `usual` where they say nothing."""
    configure(default="warning")
    check_output(args.output_json)
    from octavo.llm import LLM

    options = {"load_progress": sys.stderr.isatty(), **usual, **engine_options(args, ("model",))}
    return LLM(model=args.model, **options)


def check_output(path: Path | None) -> None:
    """Whether figures can be saved, before they are measured. Raises ConfigError."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--output-json {path}: must be a file in a folder that exists")


def save(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=4) + "\n")


def _say(done: int, total: int) -> None:
    print(f"\rbatch {done} of {total}", end="\n" if done == total else "", file=sys.stderr)
