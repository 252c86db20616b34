"""Grammars in llguidance's dialect of Lark, put together from rules.

Literals may contain markers that are added tokens (`octavo.text.markers`), which a grammar names by
their ids. What a rule says is the caller's part.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from octavo.text import json_schema
from octavo.text.markers import Markers

# Any characters; no added token is one.
_TEXT = r"TEXT: /(.|\n)*/"
_WHITESPACE = r"WHITESPACE: /[ \t\r\n]{0,40}/"
_ANY = r"(.|\n)*"


class LarkRules:
    """The rules of one grammar as they are made. Expressions refer to rules by their names."""

    def __init__(self, markers: Markers | None = None) -> None:
        self._markers = markers
        self._lines = [_TEXT, _WHITESPACE]
        self._others: list[dict[str, Any]] = []

    def rule(self, body: str, option: str | None = None) -> str:
        """A new rule; returns its name. option: such as `lazy`."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{f'[{option}]' if option else ''}: {body}")
        return name

    def recursive(self, body: Callable[[str], str]) -> str:
        """A new rule, whose body is told its name; returns its name."""
        name = self.rule("")
        place = len(self._lines) - 1
        self._lines[place] = f"{name}: {body(name)}"
        return name

    def literal(self, text: str) -> str:
        """Exactly `text`; markers that are added tokens are these."""
        return " ".join(self.literals(text))

    def literals(self, text: str) -> list[str]:
        """`text` cut at the markers that are added tokens, as an expression for each part."""
        parts = self._markers.parts(text) if self._markers else [text]
        return [f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in parts]

    def until(self, end: str) -> str:
        """Any text, to the end of the first `end` in it."""
        is_text = len(self.literals(end)) == 1 and self.literal(end).startswith('"')
        return self.rule(f"TEXT {self.literal(end)}", "lazy" if is_text else None)

    def regex(self, pattern: str) -> str:
        """What an expression matches."""
        return self.rule(f"/{_slashed(json_schema.ascii_classes(pattern))}/")

    def json(
        self, schema: Mapping[str, Any], whitespace: str | None = json_schema.WHITESPACE
    ) -> str:
        """JSON of a schema that `json_schema.load` has checked."""
        options = json_schema.options(whitespace)
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def other(self, grammar: str) -> str:
        """What another grammar, in the library's notation or Lark's, says. Its rules stay its
        own."""
        found = {"lark_grammar": grammar}
        if grammar.startswith("{"):
            (found,) = json.loads(grammar)["grammars"]
        name = f"g{len(self._others)}"
        self._others.append({**found, "name": name})
        return self.rule(f"@{name}")

    def matching(self, every: Iterable[str], none: Iterable[str] = ()) -> str:
        """Text that each expression of `every` matches as a whole, and none of `none`; any text
        where there are none."""
        # What a complement alone leaves has texts that are no UTF-8, too.
        parts = [*(f"/{_slashed(one)}/" for one in [*every] or [_ANY])]
        parts += [f"~/{_slashed(one)}/" for one in none]
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {' & '.join(parts)}")
        return name

    def text_before(
        self, end: str, every: Iterable[str] = (), none: Iterable[str] = (), before: str = ""
    ) -> str:
        """Text as of `matching` in which the marker `end` is not, then `before` and `end`."""
        if self._markers is not None and end in self._markers.token_ids:
            text = self.matching(every, none)
            if before:  # the text is the longest that there is: `before` is part of it
                self._lines.append(f"{text}B: {text} {json.dumps(before)}")
                text += "B"
            return f"{text} {self.literal(end)}"
        text = self.matching(every, [*none, f"{_ANY}{re.escape(end)}{_ANY}"])
        return self.rule(text, f"suffix={json.dumps(before + end)}")

    def text(self, start: str) -> str:
        """The rules' text, of the expression where the grammar starts."""
        return "\n".join([f"start: {start}", *self._lines])

    def grammar(self, start: str) -> str:
        """The grammar in the library's notation, of the expression where it starts."""
        return json.dumps({"grammars": [{"lark_grammar": self.text(start)}, *self._others]})


def _slashed(pattern: str) -> str:
    """An expression as it stands between slashes."""
    return re.sub(r"\\(.)|/|\n", lambda found: _between_slashes(found[0]), pattern, flags=re.DOTALL)


def _between_slashes(piece: str) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(piece, piece)
