"""What `octavo bench latency` and `throughput` share: the engine, and files of figures."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Parser, engine_options
from octavo.errors import ConfigError
from octavo.log import configure

if TYPE_CHECKING:
    from octavo.llm import LLM


def add_output_flags(parser: Parser) -> None:
    parser.add_argument("--disable-detokenize", action="store_true", help="leave out the text")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="save the figures as JSON")


def load(args: argparse.Namespace, **usual: Any) -> "LLM":
    """The engine of the flags; `usual` where they say nothing."""
    configure(default="warning")
    check_output(args.output_json)
    from octavo.llm import LLM

    options = {"load_progress": sys.stderr.isatty(), **usual, **engine_options(args, ("model",))}
    return LLM(model=args.model, **options)


def check_output(path: Path | None) -> None:
    """Raise ConfigError unless figures can be saved, before any is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--output-json {path}: must be a file in a folder that exists")


def save(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=4) + "\n")
