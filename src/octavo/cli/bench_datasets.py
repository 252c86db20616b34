"""The flags that choose the requests of a benchmark, and the requests they describe."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.arguments import Parser
from octavo.errors import ConfigError
from octavo.utils.flags import flag_name

if TYPE_CHECKING:
    from octavo.bench.datasets import Sample, Shape, Tokens

NAMES = ("random", "sharegpt", "custom", "prefix_repetition")
_FROM_FILE = ("sharegpt", "custom")


def add_dataset_flags(parser: Parser) -> None:
    group = parser.add_argument_group("requests")

    def flag(name: str, kind: type, default: object, help: str) -> None:
        shown = "" if default is None else f" (default: {default})"
        metavar = kind.__name__.upper()
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=help + shown)

    group.add_argument("--dataset-name", choices=NAMES, default="random",
                       help="where prompts come from (default: random)")  # fmt: skip
    flag("--dataset-path", Path, None, "file of the dataset: ShareGPT's JSON, or JSON lines with "
         "'prompt' (and 'output_tokens') for custom")  # fmt: skip
    flag("--num-prompts", int, 1000, "number of requests")
    flag("--input-len", int, None, "prompt tokens, of datasets that have such a length")
    flag("--output-len", int, None, "answer tokens, of any dataset")
    flag("--random-input-len", int, 1024, "random: prompt tokens")
    flag("--random-output-len", int, 128, "random: answer tokens")
    flag("--random-range-ratio", float, 0.0,
         "random: lengths are uniform in length x (1 - ratio) to length x (1 + ratio)")  # fmt: skip
    flag("--random-prefix-len", int, 0, "random: tokens before each prompt that all share")
    flag("--sharegpt-output-len", int, None, "sharegpt: answer tokens; default: the dataset's")
    flag("--custom-output-len", int, 256, "custom: answer tokens, where a line has no number")
    flag("--prefix-repetition-prefix-len", int, 256, "prefix_repetition: tokens of a prefix")
    flag("--prefix-repetition-suffix-len", int, 256, "prefix_repetition: tokens after it")
    flag("--prefix-repetition-num-prefixes", int, 10, "prefix_repetition: number of prefixes")
    flag("--prefix-repetition-output-len", int, 128, "prefix_repetition: answer tokens")
    group.add_argument("--disable-shuffle", action="store_true", help="custom: in the file's order")
    group.add_argument("--no-oversample", action="store_true",
                       help="do not repeat a file with fewer than --num-prompts")  # fmt: skip


def check_dataset(args: argparse.Namespace) -> None:
    """What can be said before anything is loaded. Raises ConfigError."""
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, not {args.num_prompts}")
    if args.dataset_name in _FROM_FILE and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE")
    if args.dataset_name not in _FROM_FILE and args.dataset_path is not None:
        raise ConfigError(
            f"--dataset-path is for {' and '.join(_FROM_FILE)}; add --dataset-name custom"
        )
    if args.dataset_path is not None and not args.dataset_path.is_file():
        raise ConfigError(f"--dataset-path {args.dataset_path}: no such file")
    for name, value in vars(args).items():
        is_length = name.endswith(("input_len", "output_len"))
        if is_length and isinstance(value, int) and value < 1:
            raise ConfigError(f"{flag_name(name)} must be at least 1, not {value}")
    _shape(args)


def _shape(args: argparse.Namespace) -> "Shape":
    from octavo.bench.datasets import Shape

    return Shape(
        args.input_len or args.random_input_len,
        args.output_len or args.random_output_len,
        args.random_range_ratio,
        args.random_prefix_len,
    )


def read_samples(args: argparse.Namespace, tokens: "Tokens | None", seed: int) -> "list[Sample]":
    """The requests that the flags describe. Only custom prompts can do without a tokenizer."""
    from octavo.bench import datasets

    count, name, path = args.num_prompts, args.dataset_name, args.dataset_path
    if name == "custom":
        length = args.output_len or args.custom_output_len
        found = datasets.custom(path, tokens, length, seed, not args.disable_shuffle)
        return datasets.repeated(found, count, args.no_oversample)
    assert tokens is not None
    if name == "sharegpt":
        length = args.output_len or args.sharegpt_output_len
        found = datasets.sharegpt(path, tokens, count, length, seed)
        return datasets.repeated(found, count, args.no_oversample)
    if name == "prefix_repetition":
        return datasets.prefix_repetition(
            tokens,
            count,
            args.prefix_repetition_prefix_len,
            args.input_len or args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes,
            args.output_len or args.prefix_repetition_output_len,
            seed,
        )
    return datasets.random_prompts(tokens, count, _shape(args), seed)
