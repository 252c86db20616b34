"""What `octavo chat` shows: answers on standard output, all else on standard error.

On a terminal, both are wrapped and notes are dim; elsewhere they are written as they are. What a
model thinks before it answers is dim, above the answer; elsewhere it is no part of the answer, and
goes to standard error.
Not here: reading (chat_input.py), and what is said (chat.py, chat_commands.py).
"""

import contextlib
from collections.abc import Iterator
from typing import TextIO

from octavo.cli.chat_wrap import Wrapper
from octavo.progress import columns


class Screen:
    """The two streams. colours: False for terminals and users that want none."""

    def __init__(self, out: TextIO, err: TextIO, colours: bool) -> None:
        self._out = out
        self._err = err
        self._wraps = out.isatty()
        self._dim = colours and err.isatty()
        self._dims_answers = colours and out.isatty()
        self._thinking = False
        self.shows_figures = err.isatty()
        self._wrapper = Wrapper(out.write, lambda: columns(out))
        self._open = False  # whether the last line of the answer lacks its end

    @contextlib.contextmanager
    def answer(self) -> Iterator[None]:
        """While `show` is called; the last line is ended also when that is interrupted."""
        self._open = False
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._end_thinking()
                if self._wraps:
                    self._wrapper.finish()
                elif self._open:
                    self._out.write("\n")
                self._out.flush()

    def show(self, text: str) -> None:
        """The next piece of an answer."""
        if text:
            self._end_thinking()
        if self._wraps:
            self._wrapper.feed(text)
        else:
            self._out.write(text)
        if text:
            self._open = not text.endswith("\n")
        self._out.flush()

    def think(self, text: str) -> None:
        """The next piece of the reasoning before it."""
        if not self._thinking:
            self._thinking = True
            if self._dims_answers:
                self._out.write("\033[2m")
        if self._wraps:
            self._wrapper.feed(text)
            self._out.flush()
        else:
            self._err.write(text)
            self._err.flush()

    def _end_thinking(self) -> None:
        if not self._thinking:
            return
        self._thinking = False
        if self._wraps:
            self._wrapper.finish()
            self._out.write("\033[0m\n" if self._dims_answers else "\n")
        else:
            self._err.write("\n")
            self._err.flush()

    def note(self, text: str) -> None:
        """A line of the program's own."""
        self._out.flush()
        lines = self._wrapped(text)
        self._err.write(f"\033[2m{lines}\033[0m\n" if self._dim else f"{lines}\n")
        self._err.flush()

    def text(self, text: str) -> None:
        """Lines that were asked for, such as help."""
        self._out.flush()
        self._err.write(f"{self._wrapped(text)}\n")
        self._err.flush()

    def prompt(self, text: str) -> None:
        """What stands before a line that is typed."""
        self._err.write(text)
        self._err.flush()

    def _wrapped(self, text: str) -> str:
        if not self._err.isatty():
            return text
        parts: list[str] = []
        wrapper = Wrapper(parts.append, lambda: columns(self._err))
        wrapper.feed(text)
        wrapper.finish()
        return "".join(parts).removesuffix("\n")
