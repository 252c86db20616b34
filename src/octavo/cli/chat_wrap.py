"""Streamed text, wrapped between words at the edge of a terminal.

A word is written once it is complete. Lines of code between ``` or ~~~ fences are written as they
are. Not here: colours, Markdown, and what a terminal does with lines that are already on it.
"""

from collections.abc import Callable

from wcwidth import iter_graphemes, wcswidth, wcwidth

_CLOSING = frozenset("、。，．！？：；）」』】》〉…ー々・”’")  # never first in a line
_OPENING = frozenset("（「『【《〈“‘")  # never last in one
# Control characters except newline and tab, in a form that no terminal obeys.
_HARMLESS = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


def harmless(text: str) -> str:
    """`text` without characters that a terminal would take for commands."""
    return text.translate(_HARMLESS)


class Wrapper:
    """Wraps text that comes in pieces. `width()` is asked for every word, so it may change."""

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._word = ""  # not yet written
        self._wide = False  # whether it ends in a character of two columns
        self._gap = ""  # spaces before it, not yet written
        self._line = ""  # this line so far, as it came
        self._fence = ""  # what opened the block of code that this line belongs to
        self._opening = False  # whether this is the line that opens it
        self._long = False  # within a word that no line can hold: the terminal breaks it

    def feed(self, text: str) -> None:
        """Write what is complete of the text so far."""
        for char in harmless(text):
            if char == "\n":
                self._end_line()
                continue
            self._line += char
            if self._fence:
                self._write(char)
            elif char in " \t":
                opened = self._flush()
                self._long = False
                if opened:
                    self._write(char)
                else:
                    self._gap += "    " if char == "\t" else " "
            else:
                self._add(char)

    def finish(self) -> None:
        """Write the rest; ends the line if there is one."""
        self._flush()
        if self._line:
            self._end_line()
        self._fence = ""

    def _add(self, char: str) -> None:
        wide = not char.isascii() and wcwidth(char) == 2
        if self._long and not wide:
            self._write(char)
            self._column = _past_edge(self._column + max(0, wcwidth(char)), self._width())
            return
        self._long = False
        if self._word and not self._joins(char) and (wide or self._wide) and self._flush():
            self._write(char)
            return
        self._wide = wide or (self._wide and self._joins(char))
        self._word += char
        if len(self._word) > self._width():
            self._flush()
            self._long = True

    def _joins(self, char: str) -> bool:
        """Whether no line may be broken between the current word and `char`."""
        if char in _CLOSING or self._word[-1:] in _OPENING:
            return True
        if char.isascii():
            return False
        *_, last = iter_graphemes(self._word[-12:] + char)
        return len(last) > 1

    def _flush(self) -> bool:
        """Write the word. True if it opened a block of code."""
        word, self._word = self._word, ""
        if not word:
            return False
        self._wide = False
        marks = _fence_marks(word) if self._line.lstrip().startswith(word) else ""
        size, edge = max(0, wcswidth(word)), max(1, self._width())
        start = self._column + len(self._gap)
        if self._column and start + size > edge:
            self._write("\n" + word)
            self._column = size
        else:
            self._write(self._gap + word)
            self._column = start + size
        self._column = _past_edge(self._column, edge)
        self._gap = ""
        if marks:
            self._fence, self._opening = marks, True
        return bool(marks)

    def _end_line(self) -> None:
        self._flush()
        if self._fence and (
            "`" in self._line.strip().lstrip("`")  # code within a line, and no block
            if self._opening
            else _closes(self._line, self._fence)
        ):
            self._fence = ""
        self._opening = self._long = False
        self._write("\n")
        self._line = self._gap = ""
        self._column = 0


def _past_edge(column: int, edge: int) -> int:
    """Where the terminal's own wrapping leaves the cursor; at the edge it waits."""
    return column if column <= edge else (column - 1) % max(1, edge) + 1


def _fence_marks(word: str) -> str:
    """The marks that a block of code opens with, such as ```, or ''."""
    marks = word[: len(word) - len(word.lstrip(word[0]))]
    return marks if word[0] in "`~" and len(marks) >= 3 else ""


def _closes(line: str, fence: str) -> bool:
    marks = line.strip()
    return len(marks) >= len(fence) and not marks.strip(fence[0])
