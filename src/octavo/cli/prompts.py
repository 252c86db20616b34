"""The prompts of a command: from its flags, from a file, or from standard input.

A line is a prompt, or the texts between separators are, or each line is a JSON object with a
prompt and sampling parameters of its own. All of them are read and checked before a model is
opened. Files of batches, which may be too large for that, are `cli.run_batch`'s.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.cli.arguments import Parser
from octavo.errors import ConfigError, RequestError, RequestTypeError, nearest
from octavo.params import SamplingParams

Messages = Sequence[Mapping[str, Any]]
Content = str | list[int] | Messages

# Sampling parameters that a line may have: all but those that shape what Python callers get.
_FIELDS = tuple(
    item.name for item in fields(SamplingParams) if item.name not in ("output_kind", "detokenize")
)
_INPUTS = ("prompt", "messages", "id")
_EMPTY = "the prompt is empty; it must have at least one character"


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt.

    given: the text, token ids or messages as they were given; content: what is encoded, which is
    a conversation for a text that `--chat` makes a user's message. options: sampling parameters
    of its own. key: the caller's id, for the output. where: its place for an error, "line 3: ".
    """

    given: Content
    content: Content
    options: Mapping[str, Any] = field(default_factory=dict)
    key: object = None
    where: str = ""

    @property
    def is_json_chat(self) -> bool:
        """Whether messages were given."""
        return not isinstance(self.given, str) and isinstance(self.given[0], Mapping)

    @property
    def title(self) -> str:
        """A line that says which prompt it is."""
        return str(self.given[-1] if self.is_json_chat else self.given)

    def params(self, base: SamplingParams) -> SamplingParams:
        """Its own sampling parameters over `base`."""
        with self.named():
            return base.with_(**self.options) if self.options else base

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """A RequestError begins with the place of this prompt."""
        try:
            yield
        except RequestError as error:
            if not self.where:
                raise
            raise type(error)(self.where + str(error), error.param) from None


def add_prompt_flags(parser: Parser) -> None:
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt (may be given several times); default: each line of standard input",
    )
    parser.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="read prompts from a file, one a line (- is standard input; *.jsonl implies --jsonl)",
    )
    parser.add_argument(
        "--separator",
        metavar="TEXT",
        help=r"prompts are the texts between separators, such as '\n---\n', and may have several "
        "lines; '' takes the whole input as one prompt",
    )
    parser.add_argument(
        "--jsonl",
        action="store_true",
        help='each line is a JSON object: {"prompt": text or token ids} or {"messages": [...]}, '
        "with sampling parameters and an id of its own if wanted; implies --json",
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    parser.add_argument("--system", metavar="TEXT", help="system message (implies --chat)")


def is_jsonl(args: argparse.Namespace) -> bool:
    return bool(args.jsonl or (args.file is not None and args.file.endswith(".jsonl")))


def read_items(args: argparse.Namespace) -> list[Item]:
    """The prompts of a command line. Raises RequestError naming the flag or the line at fault."""
    _check_flags(args)
    chat = bool(args.chat or args.system is not None)
    if args.prompt:
        return [_text_item(text, chat, args.system, "") for text in args.prompt]
    text, source = _read(args.file)
    if is_jsonl(args):
        found = list(_json_items(text))
    elif args.separator is not None:
        found = [_text_item(t, chat, args.system, "") for t in _split(text, args.separator)]
    else:
        lines = (line.rstrip("\r") for line in text.split("\n"))
        found = [_text_item(line, chat, args.system, "") for line in lines if line.strip()]
    if not found:
        raise RequestError(f"no prompt: {source} has no line with text", "prompt")
    return found


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A chat of one user message, after a system message if there is one."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": prompt}]


def _check_flags(args: argparse.Namespace) -> None:
    others = {"--file": args.file, "--separator": args.separator, "--jsonl": args.jsonl or None}
    for flag, value in others.items():
        if args.prompt and value is not None:
            raise RequestError(f"--prompt and {flag} exclude each other; leave out one", "prompt")
    if is_jsonl(args):
        for flag, given in {
            "--separator": args.separator is not None,
            "--chat": args.chat,
            "--system": args.system is not None,
        }.items():
            if given:
                raise RequestError(f"{flag} is for plain text; in JSON lines, give messages")


def _text_item(text: str, chat: bool, system: str | None, where: str) -> Item:
    if not text:
        raise RequestError(where + _EMPTY, "prompt")
    return Item(text, conversation(text, system) if chat else text, where=where)


def _read(file: str | None) -> tuple[str, str]:
    """The input, and what to call it."""
    if file is None or file == "-":
        if sys.stdin.isatty():
            raise RequestError(
                "no prompt: give --prompt TEXT, --file FILE, or lines on standard input", "prompt"
            )
        binary = getattr(sys.stdin, "buffer", None)
        text = sys.stdin.read() if binary is None else _decoded(binary.read(), "standard input")
        return text, "standard input"
    try:
        return _decoded(Path(file).expanduser().read_bytes(), f"--file {file}"), f"the file {file}"
    except OSError as error:
        raise ConfigError(f"--file {file} cannot be read: {error.strerror}") from None


def _decoded(data: bytes, source: str) -> str:
    r"""Text of a file: UTF-8 in every locale, with or without a byte order mark; \n ends lines."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8: {error.reason}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str, separator: str) -> list[str]:
    r"""The texts between separators, in which \n and \t may be written as two characters."""
    between = separator.replace("\\n", "\n").replace("\\t", "\t")
    parts = text.split(between) if between else [text]
    return [part.strip("\n") for part in parts if part.strip()]


def _json_items(text: str) -> Iterator[Item]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield json_item(line, f"line {number}: ")


def json_item(line: str, where: str) -> Item:
    """One line of JSON as a prompt. Raises RequestError that begins with `where`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}not JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise RequestTypeError(f"{where}must be a JSON object, not {type(value).__name__}")
    for name in value:
        if name not in (*_INPUTS, *_FIELDS):
            hint = nearest(name, [*_INPUTS, *_FIELDS])
            raise RequestError(f"{where}unknown field {name!r:.60}{hint}", name[:60])
    if ("prompt" in value) == ("messages" in value):
        raise RequestError(f"{where}give either prompt or messages", "prompt")
    content = value.get("prompt", value.get("messages"))
    if not content:
        name = "messages must not be empty" if "messages" in value else _EMPTY
        raise RequestError(where + name, "prompt")
    is_ids = isinstance(content, list) and "prompt" in value
    if not (isinstance(content, str) and "prompt" in value) and not isinstance(content, list):
        wanted = (
            "prompt must be text or token ids"
            if "prompt" in value
            else "messages must be a list of messages"
        )
        raise RequestTypeError(f"{where}{wanted}, not {content!r:.60}", "prompt")
    if is_ids and not all(type(token) is int for token in content):
        raise RequestTypeError(f"{where}prompt token ids must be integers", "prompt")
    if not is_ids and not isinstance(content, str):
        for index, message in enumerate(content):
            if not isinstance(message, dict):
                raise RequestTypeError(
                    f"{where}messages[{index}] must be an object, not {message!r:.60}", "messages"
                )
    options = {name: value[name] for name in _FIELDS if value.get(name) is not None}
    if bias := options.get("logit_bias"):
        options["logit_bias"] = _bias(bias, where)
    return Item(content, content, options, value.get("id"), where)


def _bias(given: object, where: str) -> object:
    """JSON's keys are strings."""
    if not isinstance(given, dict):
        return given
    if not all(key.isascii() and key.isdigit() for key in given):
        raise RequestError(f"{where}logit_bias keys must be token ids", "logit_bias")
    return {int(key): amount for key, amount in given.items()}
