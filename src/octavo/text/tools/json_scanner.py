"""One JSON value in a text that comes in pieces: where it ends, and whether it is JSON.

What it stands for is not decoded.
"""

import json
import re
from collections.abc import Callable
from typing import Literal

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_HEX = frozenset("0123456789abcdefABCDEF")

_Expected = Literal[
    "value", "value or end", "key", "key or end", ":", ", or end", "string", "escape", "hex", "word"
]


class JsonScanner:
    """Reads one value, and nothing after it, in any pieces.

    complete: the value has ended. failed: it is no JSON, from the character where `feed` stopped.

    Models write line breaks inside strings as they are, which JSON forbids: they are passed on as
    their escapes.
    """

    def __init__(self) -> None:
        self.complete = self.failed = False
        self._expected: _Expected = "value"
        self._closers: list[str] = []
        self._is_key = False  # the string that is being read
        self._digits = 0  # of \uXXXX, that are missing
        self._word = ""
        self._steps: dict[_Expected, Callable[[str, int, list[str]], int]] = {
            "string": self._string,
            "escape": self._escape,
            "hex": self._hex,
            "word": self._scalar,
        }

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads `text` from `at` on. Returns where it stopped, and the JSON text until there."""
        written: list[str] = []
        while at < len(text) and not self.complete and not self.failed:
            at = self._steps.get(self._expected, self._structure)(text, at, written)
        return at, "".join(written)

    def _structure(self, text: str, at: int, written: list[str]) -> int:
        space = _SPACE.match(text, at)
        assert space is not None  # it matches nothing, too
        written.append(space[0])
        at = space.end()
        if at == len(text):
            return at
        letter, expected = text[at], self._expected
        if expected.endswith("end") and letter == self._closers[-1]:
            self._closers.pop()
            self._value_ended()
        elif expected in ("key", "key or end") and letter == '"':
            self._is_key, self._expected = True, "string"
        elif expected == ":" and letter == ":":
            self._expected = "value"
        elif expected == ", or end" and letter == ",":
            self._expected = "key" if self._closers[-1] == "}" else "value"
        elif expected in ("value", "value or end"):
            return self._begin_value(letter, at, written)
        else:
            self.failed = True
            return at
        written.append(letter)
        return at + 1

    def _begin_value(self, letter: str, at: int, written: list[str]) -> int:
        if letter == "{":
            self._closers.append("}")
            self._expected = "key or end"
        elif letter == "[":
            self._closers.append("]")
            self._expected = "value or end"
        elif letter == '"':
            self._is_key, self._expected = False, "string"
        elif _WORD.match(letter, 0, 1)[0]:  # type: ignore[index]  # it matches nothing, too
            self._word, self._expected = "", "word"
            return at
        else:
            self.failed = True
            return at
        written.append(letter)
        return at + 1

    def _value_ended(self) -> None:
        self.complete = not self._closers
        self._expected = ", or end"

    def _string(self, text: str, at: int, written: list[str]) -> int:
        plain = _PLAIN.match(text, at)
        assert plain is not None  # it matches nothing, too
        written.append(plain[0])
        at = plain.end()
        if at == len(text):
            return at
        letter = text[at]
        if letter == '"':
            if self._is_key:
                self._expected = ":"
            else:
                self._value_ended()
        elif letter == "\\":
            self._expected = "escape"
        else:
            letter = json.dumps(letter)[1:-1]
        written.append(letter)
        return at + 1

    def _escape(self, text: str, at: int, written: list[str]) -> int:
        if text[at] == "u":
            self._expected, self._digits = "hex", 4
        elif text[at] in '"\\/bfnrt':
            self._expected = "string"
        else:
            self.failed = True
            return at
        written.append(text[at])
        return at + 1

    def _hex(self, text: str, at: int, written: list[str]) -> int:
        if text[at] not in _HEX:
            self.failed = True
            return at
        self._digits -= 1
        if not self._digits:
            self._expected = "string"
        written.append(text[at])
        return at + 1

    def _scalar(self, text: str, at: int, written: list[str]) -> int:
        more = _WORD.match(text, at)
        assert more is not None  # it matches nothing, too
        self._word += more[0]
        if more.end() < len(text):
            if _SCALAR.fullmatch(self._word):
                self._value_ended()
            else:
                self.failed = True
        written.append(more[0])
        return more.end()
