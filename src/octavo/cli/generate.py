"""`octavo generate`: answer prompts from the command line or from standard input, then stop."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    sampling_options,
)
from octavo.errors import RequestError
from octavo.log import configure
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

# `--seed` is the request's here, so the engine's own, for requests without one, is not needed.
SKIP = ("seed",)
# An answer of 16 tokens, the API's default, is of no use in a terminal.
DEFAULTS: dict[str, object] = {"max_tokens": 256}


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt (may be given several times); default: each line of standard input",
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    parser.add_argument("--system", metavar="TEXT", help="system message (implies --chat)")
    parser.add_argument("--stream", action="store_true", help="print text as it is generated")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    add_engine_flags(parser, SKIP)
    add_sampling_flags(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    configure(default="info" if args.verbose else "warning")
    if args.stream and args.json:
        raise RequestError("--stream shows plain text; leave out --json or --stream")
    options = sampling_options(args, DEFAULTS)
    params = SamplingParams(**options)  # an error is reported before the model is loaded
    if args.stream and params.n != 1:
        raise RequestError(f"--stream shows one answer; leave out --n {params.n} or --stream")
    prompts = read_prompts(args.prompt)
    llm = start(args)
    params = llm.get_default_sampling_params().with_(**options)
    inputs: list[Any] = [conversation(p, args.system) for p in prompts] if _chat(args) else prompts
    if args.stream:
        for prompt, item in zip(prompts, inputs, strict=True):
            _title(prompt, len(prompts))
            stream_answer(llm, item, params)
        return 0
    answer = llm.chat if _chat(args) else llm.generate
    bar = sys.stderr.isatty() and len(prompts) > 1
    outputs = answer(inputs, params, use_tqdm=bar)
    for prompt, output in zip(prompts, outputs, strict=True):
        _show_json(prompt, output) if args.json else _show(prompt, output, len(prompts))
    return 1 if any(output.error for output in outputs) else 0


def start(args: argparse.Namespace) -> "LLM":
    """The engine that the command line describes. Imports torch, which takes a moment."""
    from octavo.llm import LLM

    progress = {"load_progress": sys.stderr.isatty()}
    return LLM(model=args.model, **{**progress, **engine_options(args, ("model", *SKIP))})


def read_prompts(given: Sequence[str] | None) -> list[str]:
    """The prompts of the flags, or else the non-empty lines of standard input."""
    if given:
        return list(given)
    if sys.stdin.isatty():
        raise RequestError("no prompt: give --prompt TEXT, or lines on standard input", "prompt")
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise RequestError("no prompt: standard input has no line with text", "prompt")
    return prompts


def conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    """A chat of one user message, after a system message if there is one."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": prompt}]


def stream_answer(llm: "LLM", item: Any, params: SamplingParams) -> str:
    """Print one answer as it is generated, and return it. Ctrl-C aborts the request."""
    pieces: list[str] = []
    for output in llm.stream(item, params):
        if output.error:
            raise RequestError(output.error)
        pieces.append(output.outputs[0].text)
        print(pieces[-1], end="", flush=True)
    print()
    return "".join(pieces)


def _chat(args: argparse.Namespace) -> bool:
    return bool(args.chat or args.system is not None)


def _title(prompt: str, count: int) -> None:
    """Say which prompt an answer belongs to, where there are several."""
    if count > 1:
        first = prompt.strip().splitlines()[0]
        print(f"\n>>> {first if len(first) <= 90 else first[:87] + '...'}")


def _show(prompt: str, output: RequestOutput, count: int) -> None:
    _title(prompt, count)
    for choice in output.outputs:
        if len(output.outputs) > 1:
            print(f"[{choice.index}]")
        print(choice.text.strip("\n") if choice.text else f"({_why_empty(choice, output)})")


def _why_empty(choice: CompletionOutput, output: RequestOutput) -> str:
    return output.error or f"empty answer: {choice.finish_reason}"


def _show_json(prompt: str, output: RequestOutput) -> None:
    """`prompt` as given; `rendered` is the text that the model read."""
    print(json.dumps({**asdict(output), "prompt": prompt, "rendered": output.prompt}))
