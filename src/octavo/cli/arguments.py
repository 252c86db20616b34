"""Command lines: a parser with readable errors, and flags generated from the parameter types."""

import argparse
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from octavo.config import EngineConfig, add_flags, flag_name
from octavo.errors import nearest
from octavo.params import SamplingParams

# Every field of SamplingParams that makes sense on a command line, and its help. Types and
# defaults come from the dataclass; a test checks that both match.
SAMPLING_HELP = {
    "n": "answers per prompt",
    "temperature": "0 is greedy; otherwise in (0, 2]",
    "top_p": "keep the likeliest tokens that together reach this probability, in (0, 1]",
    "top_k": "keep the k likeliest tokens; 0 is off",
    "min_p": "drop tokens below this fraction of the highest probability, in [0, 1]",
    "presence_penalty": "lower the logits of tokens that the answer already has, in [-2, 2]",
    "frequency_penalty": "the same, once per occurrence, in [-2, 2]",
    "repetition_penalty": "divide the logits of tokens seen in prompt or answer; 1 is off",
    "seed": "the same seed gives the same answer; default: random",
    "stop": "text that ends the answer (may be given several times)",
    "stop_token_ids": "ids that end the answer, such as 2,7",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "ignore_eos": "continue after the end-of-text token",
    "min_tokens": "minimum number of tokens before anything ends the answer",
    "max_tokens": "maximum number of tokens of an answer",
    "logprobs": "log-probabilities of this many alternatives per token (shown with --json)",
    "prompt_logprobs": "the same for the prompt's tokens (shown with --json)",
    "logit_bias": "added to logits, such as 15:-100,7:2.5",
    "allowed_token_ids": "only these ids may be generated, such as 10,11",
    "bad_words": "text that must not appear (may be given several times)",
    "skip_special_tokens": "leave special tokens out of the text",
}


class Parser(argparse.ArgumentParser):
    """No abbreviations; one line per mistake, with the nearest known flag; exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As parse_args, but an unknown flag is reported first, since it explains later errors.

        If the rest of the line belongs to another program, only the part before it is checked.
        """
        known = self.flags()
        passes_on = any(action.nargs == argparse.REMAINDER for action in self._actions)
        for word in argv:
            name = word.split("=", 1)[0]
            if word == "--" or (passes_on and not word.startswith("-")):
                break
            if name.startswith("--") and name not in known:
                self.error(f"unknown flag {name!r}{nearest(name, known)}")
        return self.parse_args(argv)

    def flags(self) -> list[str]:
        """Every long flag of this parser."""
        names = (name for action in self._actions for name in action.option_strings)
        return [name for name in names if name.startswith("--")]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_engine_flags(parser: Parser, skip: Sequence[str] = ()) -> None:
    """The model as first argument, and one flag for every other field of EngineConfig."""
    model = EngineConfig.model
    parser.add_argument(
        "model",
        nargs="?",
        default=model,
        metavar="MODEL",
        help=f"Hugging Face id, folder, .gguf file, or embedded name (default: {model})",
    )
    add_flags(parser.add_argument_group("engine"), EngineConfig, skip=("model", *skip))


def engine_options(args: argparse.Namespace, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of EngineConfig that the command line gave."""
    names = (item.name for item in fields(EngineConfig) if item.name not in skip)
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_sampling_flags(parser: Parser, defaults: Mapping[str, object]) -> None:
    """One flag for every field in SAMPLING_HELP. Flags left out leave no attribute.

    defaults: what this command uses in place of SamplingParams' own defaults; only named in
    the help here, applied by `sampling_options`.
    """
    group = parser.add_argument_group("sampling")
    hints = typing.get_type_hints(SamplingParams)
    for item in fields(SamplingParams):
        if item.name not in SAMPLING_HELP:
            continue
        default = defaults.get(item.name, item.default)
        text = SAMPLING_HELP[item.name]
        if default is not None:
            text = f"{text} (default: {default})"
        group.add_argument(
            flag_name(item.name),
            dest=item.name,
            default=argparse.SUPPRESS,
            help=text,
            **_form(hints[item.name]),
        )


def sampling_options(args: argparse.Namespace, defaults: Mapping[str, object]) -> dict[str, Any]:
    """Keyword arguments of SamplingParams: what was given, over the command's own defaults."""
    given = {name: getattr(args, name) for name in SAMPLING_HELP if hasattr(args, name)}
    return {**defaults, **given}


def _form(hint: Any) -> dict[str, Any]:
    """The keywords of add_argument for a field of this type."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    parts = typing.get_args(hint) if union else (hint,)
    if bool in parts:
        return {"action": argparse.BooleanOptionalAction}
    if Sequence[str] in parts:
        return {"action": "append", "metavar": "TEXT"}
    forms: list[tuple[Any, Callable[[str], object], str]] = [
        (Sequence[int], _ids, "ID,ID"),
        (Mapping[int, float], _bias, "ID:BIAS,ID:BIAS"),
        (int, int, "INT"),
        (float, float, "FLOAT"),
    ]
    for wanted, convert, metavar in forms:
        if wanted in parts:
            return {"type": convert, "metavar": metavar}
    raise AssertionError(f"no command-line form for {hint}")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be ids such as 2,7") from None


def _bias(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token): float(amount) for token, amount in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be pairs such as 15:-100,7:2.5") from None
