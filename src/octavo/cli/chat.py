"""`octavo chat`: a conversation in the terminal, the answers streamed as they are made."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.arguments import Parser, add_engine_flags, add_sampling_flags, sampling_options
from octavo.cli.generate import SKIP, start
from octavo.errors import OctavoError, RequestError, nearest
from octavo.log import configure, find_cache_dir
from octavo.params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

# A small model may never end an answer by itself; Ctrl-C ends one sooner.
DEFAULTS: dict[str, object] = {"max_tokens": 1024}
_COMMANDS = {
    "/reset": "forget the conversation",
    "/exit": "leave (or Ctrl-D)",
    "/help": "show this",
}
_HISTORY_LINES = 1000


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    add_engine_flags(parser, SKIP)
    add_sampling_flags(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    configure(default="info" if args.verbose else "warning")
    options = sampling_options(args, DEFAULTS)
    params = SamplingParams(**options)  # an error is reported before the model is loaded
    if params.n != 1:
        raise RequestError(f"a conversation has one answer at a time; leave out --n {params.n}")
    llm = start(args)
    params = llm.get_default_sampling_params().with_(**options)
    folder = find_cache_dir()
    with _line_history(folder / "chat_history" if folder else None):
        print(f"{args.model}: type a message; /help lists the commands.", file=sys.stderr)
        Conversation(llm, params, args.system).loop()
    return 0


class Conversation:
    """The messages so far, and the commands on them."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._first = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._first)

    def loop(self) -> None:
        """Read lines until the end of input or /exit."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.turn(line)

    def command(self, line: str) -> None:
        """Execute a line that begins with a slash."""
        if line == "/reset":
            self.messages = list(self._first)
            print("(forgotten)", file=sys.stderr)
        elif line == "/help":
            for name, what in _COMMANDS.items():
                print(f"{name:8} {what}", file=sys.stderr)
        else:
            print(f"no command {line!r}{nearest(line, _COMMANDS)}; try /help", file=sys.stderr)

    def turn(self, text: str) -> None:
        """Answer one message. An answer stopped by Ctrl-C is kept up to that point."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._pieces():
                answer += piece
                print(piece, end="", flush=True)
            print()
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
        except OctavoError as error:
            # The conversation goes on without the message that could not be answered.
            self.messages.pop()
            print(f"octavo: {error}\n(/reset starts over)", file=sys.stderr)
            return
        self.messages.append({"role": "assistant", "content": answer})

    def _pieces(self) -> Iterator[str]:
        # Closing the stream aborts the request, even if Ctrl-C comes between two tokens.
        with contextlib.closing(self._llm.stream(self.messages, self._params)) as deltas:
            for output in deltas:
                if output.error:
                    raise RequestError(output.error)
                yield output.outputs[0].text


@contextlib.contextmanager
def _line_history(path: Path | None) -> Iterator[None]:
    """Line editing, with a history in `path` if given, where terminal and Python offer it."""
    try:
        import readline
    except ImportError:  # some builds of Python lack it; input is then plain
        yield
        return
    if path is None or not sys.stdin.isatty():
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a read-only home must not make the exit fail
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
