"""`octavo chat`: a conversation in the terminal, the answers streamed as they are generated.

Here: the command line, the loop, and signals. Not here: the conversation (chat_session.py), the
commands (chat_commands.py), what is read and shown (chat_input.py, chat_screen.py).
"""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    sampling_options,
)
from octavo.cli.chat_backend import SAMPLING, Backend, EngineBackend
from octavo.cli.chat_commands import UNUSED_SETTINGS, Commands, figures, settings_line, split
from octavo.cli.chat_input import LineReader, PromptReader, Reader, message_of
from octavo.cli.chat_session import Reply, Session
from octavo.cli.generate import SKIP, prepare
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, OctavoError, RequestError
from octavo.log import (
    api_keys_from_environment,
    configure,
    find_cache_dir,
    openai_key_from_environment,
    terminal_abilities,
)
from octavo.params import SamplingParams
from octavo.utils.flags import flag_name

if TYPE_CHECKING:
    from octavo.cli.chat_screen import Screen

# The answer's length follows the room that is left in the window.
DEFAULTS: dict[str, object] = {"max_tokens": None, **SAMPLING}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--url",
        metavar="URL",
        help="talk to a running server with OpenAI's interface, such as http://127.0.0.1:8000 "
        "(with the key in OCTAVO_API_KEY or OPENAI_API_KEY), instead of loading a model",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    add_engine_flags(parser, SKIP)
    add_sampling_flags(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    from octavo.cli.chat_screen import Screen

    configure(default="info" if args.verbose else "warning")
    options = sampling_options(args, {})
    _check(options)
    backend = open_backend(args)
    params, source = backend.default_params(options)
    session = Session(backend, params, args.system, options)
    backend.load()
    moves, colours = _prepare_streams()
    screen = Screen(sys.stdout, sys.stderr, colours)
    commands = Commands(session, screen.text)
    chat = Chat(session, commands, screen, _reader(screen, commands, moves))
    with _ended_by_signals():
        if sys.stdin.isatty():
            chat.greet(source)
        return chat.loop()


def _check(options: Mapping[str, Any]) -> None:
    """Raise RequestError for settings that are wrong, before the model is loaded."""
    SamplingParams(**{"max_tokens": None, **options})
    for name in UNUSED_SETTINGS:
        usual = getattr(SamplingParams, name)
        if options.get(name, usual) != usual:
            flag = f"{flag_name(name)} {options[name]}"
            raise RequestError(
                f"a conversation has one answer at a time and shows its text; leave out {flag}"
            )


def open_backend(args: argparse.Namespace) -> Backend:
    """What the command line names; its model is not loaded yet. Raises ConfigError."""
    if args.url is None:
        return EngineBackend(prepare(args))
    from octavo.cli.chat_server import ServerBackend

    if unused := engine_options(args, ("model", *SKIP)):
        flags = ", ".join(map(flag_name, unused))
        raise ConfigError(f"with --url the server has loaded the model; leave out {flags}")
    model = None if args.model == EngineConfig.model else args.model
    keys = api_keys_from_environment()
    return ServerBackend(args.url, model, keys[0] if keys else openai_key_from_environment())


class Chat:
    """The loop of messages and commands."""

    def __init__(
        self, session: Session, commands: Commands, screen: "Screen", reader: Reader
    ) -> None:
        self.session = session
        self._commands = commands
        self._screen = screen
        self._reader = reader
        self._said_dropped = False
        self._interrupts = 0  # in a row, at the prompt

    def greet(self, source: str) -> None:
        """Say what answers, and how. source: whose settings these are."""
        name, window = self.session.backend.name, self.session.backend.window
        size = f"; window of {window} tokens" if window else ""
        settings = f"{settings_line(self.session)} ({source})".lstrip()
        self._screen.note(f"{name}: {settings}{size}")
        self._screen.note("Type a message; /help lists the commands, Ctrl-D leaves.")

    def loop(self) -> int:
        """Read until the end of input or /exit; returns the exit code."""
        while True:
            try:
                line = self._reader.read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                self._interrupts += 1
                if self._interrupts > 1:
                    return 130
                self._screen.note("(Ctrl-C again, /exit or Ctrl-D leaves)")
                continue
            self._interrupts = 0
            command = split(line)
            if command and command[0] == "/exit":
                return 0
            try:
                self._do(line, command)
            except EngineDeadError:
                raise
            except KeyboardInterrupt:  # before or after the answer itself
                self._screen.note("(stopped)")
            except OctavoError as error:  # of this message or command: the conversation goes on
                self._screen.text(f"octavo: {error}")

    def _do(self, line: str, command: tuple[str, str] | None) -> None:
        if command is None:
            if text := message_of(line):
                screen = self._screen
                self._answer(lambda: self.session.ask(text, screen.show, screen.think))
        elif command == ("/regenerate", ""):
            if self.session.params.greedy:
                self._screen.note("(at temperature 0 the answer is the same again)")
            screen = self._screen
            self._answer(lambda: self.session.regenerate(screen.show, screen.think))
        else:
            self._commands.run(*command)
            if command[0] in ("/clear", "/load"):
                self._said_dropped = False

    def _answer(self, generate: Callable[[], Reply]) -> None:
        with self._reader.busy():
            with self._screen.answer():
                reply = generate()
            for note in self._notes(reply):
                self._screen.note(note)

    def _notes(self, reply: Reply) -> Iterator[str]:
        """What is said after an answer."""
        params, window = self.session.params, self.session.backend.window
        if reply.ending == "stopped":
            kept = "the partial answer is kept" if reply.text else "the message is not kept"
            yield f"(stopped; {kept})"
        elif reply.ending == "max_tokens":
            yield f"(cut at {params.max_tokens} tokens; /set max_tokens changes that)"
        elif reply.ending == "limit":
            yield "(cut by a limit of the server's; /set max_tokens may raise it)"
        elif reply.ending == "window":
            yield f"(cut: the window{f' of {window} tokens' if window else ''} is full)"
        if not reply.text and reply.ending != "stopped":
            yield "(an empty answer; the message is not kept)"
        if self.session.first and not self._said_dropped:
            self._said_dropped = True
            yield (
                f"(the window is full: the oldest turns are no longer sent to the model, "
                f"{self.session.first} so far; /stats counts them)"
            )
        if self._screen.shows_figures:
            used = f"; {reply.used} of {window} in the window" if reply.used and window else ""
            yield f"[{figures(reply)}{used}]"


def _prepare_streams() -> tuple[bool, bool]:
    """Whether the terminal can move its cursor, and whether colours are wanted."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Bytes that are no text, and characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    return terminal_abilities()


def _reader(screen: "Screen", commands: Commands, moves: bool) -> Reader:
    if not sys.stdin.isatty():
        return LineReader(sys.stdin)
    if not moves or not (sys.stdout.isatty() or sys.stderr.isatty()):
        return LineReader(sys.stdin, screen.prompt)
    folder = find_cache_dir()
    return PromptReader(folder / "chat_history" if folder else None, commands.complete)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP leave as an exception, which gives the terminal its modes back.

    After SIGHUP the terminal is gone: what is still to be written to it goes nowhere, or the
    interpreter would end with an error of its own when it flushes.
    """
    shown = [stream for stream in (1, 2) if os.isatty(stream)]

    def leave(number: int, frame: FrameType | None) -> None:
        if number == getattr(signal, "SIGHUP", None):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in shown:
                os.dup2(nowhere, stream)
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    former = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
