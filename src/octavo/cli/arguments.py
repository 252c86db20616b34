"""Command lines: a parser with readable errors, and flags generated from the parameter types."""

import argparse
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from octavo.config import EngineConfig, in_our_names
from octavo.errors import RequestError, brief, nearest
from octavo.params import SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from octavo.utils.argparse_utils import FlexibleArgumentParser, add_config_flag
from octavo.utils.flags import add_flags, add_vllm_flags, flag_name
from octavo.vllm_names import Kind, entries, find

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
    "thinking_token_budget": "maximum number of tokens of reasoning, for models that reason",
}


class Parser(FlexibleArgumentParser):
    """No abbreviations; one line per mistake, with the nearest known flag; exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """As parse_args, but an unknown flag is reported first, since it explains later errors.

        If the rest of the line belongs to another program, only the part before it is checked.
        """
        words = self.words(argv)
        for word in words:
            name = word.split("=", 1)[0]
            if word == "--" or (self._passes_on() and not word.startswith("-")):
                break
            if name.startswith("--") and not self.knows(name):
                self._refuse(name)
        return self.parse_args(words)

    def _refuse(self, flag: str) -> NoReturn:
        """An unknown flag; of vLLM's `--compilation-config.mode` the first part may be known."""
        whole = flag.partition(".")[0]
        if whole != flag and self.knows(whole):
            entry = next(
                filter(None, (find(kind, whole[2:].replace("-", "_")) for kind in Kind)), None
            )
            if entry is not None and entry.reason:
                self.error(f"{flag}: {entry.refusal()}")
        self.error(f"unknown flag {flag!r}{nearest(flag, self.flags())}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def add_engine_flags(
    parser: Parser, skip: Sequence[str] = (), kinds: tuple[Kind, ...] = (Kind.ENGINE,)
) -> None:
    """The model as first argument, and one flag for every other field of EngineConfig.

    kinds: which of vLLM's other flags are recognized, to be taken or refused.
    """
    model = EngineConfig.model
    parser.add_argument(
        "model",
        nargs="?",
        action=_Model,
        default=model,
        metavar="MODEL",
        help=f"Hugging Face id, folder, .gguf file, or embedded name (default: {model})",
    )
    group = parser.add_argument_group("engine")
    group.add_argument("--model", action=_Model, default=model, metavar="MODEL",
                       help="the same as the first argument")  # fmt: skip
    group.add_argument("--model-of-file", dest="model", type=_of_file, default=argparse.SUPPRESS,
                       help=argparse.SUPPRESS)  # fmt: skip
    add_config_flag(group)
    add_flags(group, EngineConfig, skip=("model", *skip))
    add_vllm_flags(group, EngineConfig, kinds)


class _OfFile(str):
    """A model that a file of flags names: the command line may name another."""


def _of_file(name: str) -> str:
    """argparse passes the default of the argument here too: one of a type of its own keeps it."""
    return _OfFile(name) if type(name) is str else name


class _Model(argparse.Action):
    """The model as first argument or as `--model`; both may be given if they agree."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if option_string is None and values is self.default:
            return  # no first argument
        if not isinstance(before, _OfFile) and before not in (self.default, values):
            parser.error(f"two models are given: {before!r} and {values!r}")
        setattr(namespace, self.dest, values)


def engine_options(args: argparse.Namespace, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of EngineConfig that the command line gave, under their own names or vLLM's."""
    names = [item.name for item in fields(EngineConfig) if item.name not in skip]
    names += [e.name for e in entries(Kind.ENGINE) if e.name not in (*names, *skip)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return in_our_names(EngineConfig, given)


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
    group.add_argument("--json-schema", dest="structured_outputs", type=_schema, metavar="FILE",
                       default=argparse.SUPPRESS,
                       help="answers are JSON of the JSON Schema in this file")  # fmt: skip


def sampling_options(args: argparse.Namespace, defaults: Mapping[str, object]) -> dict[str, Any]:
    """Keyword arguments of SamplingParams: what was given, over the command's own defaults."""
    names = (*SAMPLING_HELP, "structured_outputs")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
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


def _schema(path: str) -> StructuredOutputsParams:
    """The form that a file's JSON Schema asks for."""
    from octavo.text.grammar import grammar_of

    try:
        form = StructuredOutputsParams(json=Path(path).read_text(encoding="utf-8"))
        grammar_of(form)
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {brief(error)}") from None
    except RequestError as error:
        text = str(error).replace(error.param or "structured_outputs", path)
        raise argparse.ArgumentTypeError(text) from None
    return form


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
