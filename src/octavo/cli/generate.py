"""`octavo generate`: answer prompts from the command line, a file or standard input, then stop."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from octavo import progress
from octavo.cli.arguments import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    sampling_options,
)
from octavo.cli.prompts import Item, add_prompt_flags, is_jsonl, read_items
from octavo.errors import ConfigError, RequestError
from octavo.log import configure
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.cli.preparation import Encoded, Preparation
    from octavo.llm import LLM

# `--seed` is the request's here, so the engine's own, for requests without one, is not needed.
SKIP = ("seed",)
# An answer of 16 tokens, the API's default, is of no use in a terminal.
DEFAULTS: dict[str, object] = {"max_tokens": 256}


def add_arguments(parser: Parser) -> None:
    add_prompt_flags(parser)
    parser.add_argument("--stream", action="store_true", help="print text as it is generated")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the answers to a file (it is overwritten)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    add_engine_flags(parser, SKIP)
    add_sampling_flags(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    configure(default="info" if args.verbose else "warning")
    as_json = bool(args.json or is_jsonl(args))
    options = sampling_options(args, DEFAULTS)
    given = SamplingParams(**options)
    if args.stream and as_json:
        raise RequestError("--stream shows plain text; leave out --json or --stream")
    if args.stream and given.n != 1:
        raise RequestError(f"--stream shows one answer; leave out --n {given.n} or --stream")
    items = read_items(args)
    for item in items:
        item.params(given)
    check_output(args.output)
    prepared = prepare(args)
    base = prepared.get_default_sampling_params().with_(**options)
    params = [item.params(base) for item in items]
    inputs: list[Encoded] = []
    for i, item in enumerate(items):
        encoded, params[i] = encode(prepared, item, params[i], hasattr(args, "max_tokens"))
        inputs.append(encoded)
    llm = prepared.load()
    with _output(args.output) as out:
        if args.stream:
            for item, encoded, own in zip(items, inputs, params, strict=True):
                _title(item, len(items), out)
                stream_answer(llm, encoded, own, out)
            return 0
        bar = sys.stderr.isatty() and len(items) > 1
        with progress.shown(not bar), progress.phase("answering"):
            outputs = llm.generate(inputs, params, use_tqdm=bar)
        for item, output in zip(items, outputs, strict=True):
            if as_json:
                _show_json(item, output, out)
            else:
                _show(item, output, len(items), out)
    return 1 if any(output.error for output in outputs) else 0


def prepare(args: argparse.Namespace) -> "Preparation":
    """The model that the command line describes, not yet loaded."""
    from octavo.cli.preparation import Preparation

    return Preparation({"model": args.model, **engine_options(args, ("model", *SKIP))})


def encode(
    prepared: "Preparation", item: Item, params: SamplingParams, limited: bool
) -> "tuple[Encoded, SamplingParams]":
    """A prompt as token ids, if the model can serve it. An error names its line.

    limited: whether the user gave `max_tokens`; the default shrinks to the room that is left.
    """
    with item.named():
        encoded = prepared.encode(item.content)
        if not limited and "max_tokens" not in item.options:
            params = prepared.fit(encoded, params)
        prepared.check(encoded, params)
        return encoded, params


def start(args: argparse.Namespace) -> "LLM":
    """The engine that the command line describes."""
    return prepare(args).load()


def check_output(file: str | None) -> None:
    """Raise ConfigError unless the file can be written."""
    if file is None:
        return
    path = Path(file).expanduser()
    new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--output {file} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _output(file: str | None) -> Iterator[IO[str]]:
    if file is None:
        yield sys.stdout
        return
    with Path(file).expanduser().open("w", encoding="utf-8") as out:
        yield out


def stream_answer(llm: "LLM", item: Any, params: SamplingParams, out: IO[str] | None = None) -> str:
    """Print one answer as it is generated, and return it. Ctrl-C aborts the request."""
    pieces: list[str] = []
    for output in llm.stream(item, params):
        if output.error:
            raise RequestError(output.error)
        pieces.append(output.outputs[0].text)
        print(pieces[-1], end="", flush=True, file=out)
    print(file=out)
    return "".join(pieces)


def _title(item: Item, count: int, out: IO[str]) -> None:
    """Say which prompt an answer belongs to, where there are several."""
    if count > 1:
        lines = item.title.strip().splitlines() or [""]
        first = lines[0]
        print(f"\n>>> {first if len(first) <= 90 else first[:87] + '...'}", file=out)


def _show(item: Item, output: RequestOutput, count: int, out: IO[str]) -> None:
    _title(item, count, out)
    for choice in output.outputs:
        if len(output.outputs) > 1:
            print(f"[{choice.index}]", file=out)
        text = choice.text.strip("\n") if choice.text else f"({_why_empty(choice, output)})"
        print(text, file=out)


def _why_empty(choice: CompletionOutput, output: RequestOutput) -> str:
    return output.error or f"empty answer: {choice.finish_reason}"


def _show_json(item: Item, output: RequestOutput, out: IO[str]) -> None:
    """The input as given; `rendered` is the text that the model read."""
    given = {"messages" if item.is_json_chat else "prompt": item.given}
    key = {} if item.key is None else {"id": item.key}
    line = {**key, **output.as_dict(), **given, "rendered": output.prompt}
    if item.is_json_chat:
        del line["prompt"]
    print(json.dumps(line, allow_nan=False), file=out)
