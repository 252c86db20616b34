"""What the user types in `octavo chat`: messages of one or more lines, and the line editor.

A message of several lines is pasted, or typed between lines of three double quotes, or with a
backslash at the end of each line but the last. The editor is prompt_toolkit's; where standard
input is no terminal, or one that cannot move its cursor, lines are read as they come.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import Output

QUOTES = '"""'
_HISTORY_ENTRIES = 1000
_LONGEST_ENTRY = 1 << 16  # characters: a whole file that was pasted is not worth keeping
# Stands for a newline within an entry of the history file, which has one entry per line.
_LINE_SEPARATOR = "\u2028"
_PASTE_ON, _PASTE_OFF = "\033[?2004h", "\033[?2004l"

# The beginning of a line -> how it may go on: (whole words to put there, length to replace).
Complete = Callable[[str], Iterable[tuple[str, int]]]


class Reader(Protocol):
    """Where messages come from."""

    def read(self) -> str:
        """The next message or command. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        ...

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """While an answer is printed: what is typed then is kept for the next `read`."""
        ...


def is_open(text: str) -> bool:
    """Whether a message that begins with three quotes still lacks the closing ones."""
    start = text.lstrip()
    return start.startswith(QUOTES) and QUOTES not in start[len(QUOTES) :]


def message_of(text: str) -> str:
    """The message in what was typed: without enclosing quotes, and empty lines around it."""
    stripped = text.strip()
    inner = stripped[len(QUOTES) : -len(QUOTES)]
    quoted = len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES)
    if quoted and stripped.startswith(QUOTES) and QUOTES not in inner:
        stripped, text = inner.strip(), inner
    if "\n" not in stripped:
        return stripped
    lines = text.rstrip().split("\n")
    first = next(i for i, line in enumerate(lines) if line.strip())
    return "\n".join(lines[first:])  # the first line keeps its indentation: it may be code


class LineReader:
    """Plain lines of a file, a pipe, or a terminal without cursor movement."""

    def __init__(self, source: TextIO, prompt: Callable[[str], None] | None = None) -> None:
        """prompt: shows the text before a line; None shows nothing."""
        self._source = source
        self._prompt = prompt

    def read(self) -> str:
        text = self._line("> ")
        while True:
            if text.endswith("\\"):
                text = text[:-1]
            elif not is_open(text):
                return text
            try:
                text = f"{text}\n{self._line('... ')}"
            except EOFError:
                return text

    def _line(self, prompt: str) -> str:
        if self._prompt:
            self._prompt(prompt)
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def busy(self) -> contextlib.AbstractContextManager[None]:
        if not self._source.isatty():
            return contextlib.nullcontext()
        return quiet_keyboard(self._source, lines=True)


class PromptReader:
    """A terminal, with line editing, history, completion and bracketed paste."""

    def __init__(self, history: Path | None, complete: Complete) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import CompleteEvent, Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.history import History
        from prompt_toolkit.shortcuts import CompleteStyle

        class Words(Completer):
            def get_completions(
                self, document: Document, complete_event: CompleteEvent
            ) -> Iterable[Completion]:
                for word, length in complete(document.text_before_cursor):
                    yield Completion(word, start_position=-length)

        class OneEntryPerLine(History):
            def load_history_strings(self) -> Iterable[str]:
                return reversed(read_history(history))

            def store_string(self, string: str) -> None:
                append_history(history, string)

        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,  # Enter is bound below: it sends, unless the message goes on
            prompt_continuation="  ",
            key_bindings=_keys(),
            history=OneEntryPerLine(),
            completer=Words(),
            complete_style=CompleteStyle.READLINE_LIKE,  # on Tab; no rows reserved for a menu
            complete_while_typing=False,
            enable_suspend=True,
            output=_output(),
        )

    def read(self) -> str:
        while True:
            try:
                return self._session.prompt()
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    raise
                # Ctrl-C discards what was typed, as in a shell.

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        # What is pasted during an answer must still be one message.
        with quiet_keyboard(sys.stdin), _paste_marks(_shown_terminal()):
            yield


def _shown_terminal() -> TextIO:
    """The terminal, which is standard error where standard output goes elsewhere."""
    return sys.stdout if sys.stdout.isatty() else sys.stderr


def _output() -> "Output":
    stream = _shown_terminal()
    if sys.platform == "win32":
        from prompt_toolkit.output import create_output

        return create_output(stream)
    from prompt_toolkit.output.vt100 import Vt100_Output

    # Without questions for the cursor's position: an answer that comes late looks like typed text.
    output = Vt100_Output.from_pty(stream)
    output.enable_cpr = False
    return output


def _keys() -> "KeyBindings":
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if (
            buffer.document.text_before_cursor.endswith("\\")
            and buffer.document.is_cursor_at_the_end
        ):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        elif is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def read_history(path: Path | None) -> list[str]:
    """The newest entries of the history file, oldest first; none if it cannot be read."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    entries = [line for line in lines if line]
    if len(entries) > 2 * _HISTORY_ENTRIES:
        _write_history(path, entries[-_HISTORY_ENTRIES:])
    return [entry.replace(_LINE_SEPARATOR, "\n") for entry in entries[-_HISTORY_ENTRIES:]]


def append_history(path: Path | None, entry: str) -> None:
    """Add an entry, readable by its owner only. A read-only home must not stop a chat."""
    if path is None or not entry.strip() or len(entry) > _LONGEST_ENTRY:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8", errors="replace") as file:
            file.write(entry.replace("\r", "").replace("\n", _LINE_SEPARATOR) + "\n")


def _write_history(path: Path, entries: list[str]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write("\n".join(entries) + "\n")
        temporary.replace(path)


@contextlib.contextmanager
def quiet_keyboard(stream: TextIO, lines: bool = False) -> Iterator[None]:
    """Keys are not echoed; they stay in the terminal's queue, and Ctrl-C still interrupts.

    lines: whether they are read as lines later, and not key by key as an editor does.
    """
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    descriptor = stream.fileno()
    before = termios.tcgetattr(descriptor)
    quiet: list[Any] = list(before)
    quiet[3] &= ~termios.ECHO
    if not lines:
        quiet[0] &= ~termios.ICRNL  # Enter stays the key itself
        quiet[3] &= ~termios.ICANON

    def apply(*_: object) -> None:
        set_modes(quiet)

    def set_modes(modes: list[Any]) -> None:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSANOW, modes)

    # A shell that continues a stopped program gives it the shell's own terminal modes.
    former = signal.signal(signal.SIGCONT, apply)
    try:
        apply()
        yield
    finally:
        signal.signal(signal.SIGCONT, former)
        set_modes(before)


@contextlib.contextmanager
def _paste_marks(stream: TextIO) -> Iterator[None]:
    """Let the terminal mark what is pasted, as the editor does while it reads."""
    if not stream.isatty():
        yield
        return
    stream.write(_PASTE_ON)
    stream.flush()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            stream.write(_PASTE_OFF)
            stream.flush()
