"""Grammars in llguidance's dialect of Lark, put together from rules.

Literals may contain markers that are added tokens (`octavo.text.markers`), which a grammar names by
their ids. What a rule says is the caller's part.
"""

import json
from collections.abc import Mapping
from typing import Any

from octavo.text import json_schema
from octavo.text.markers import Markers

# Any characters; no added token is one.
_TEXT = r"TEXT: /(.|\n)*/"
_WHITESPACE = r"WHITESPACE: /[ \t\r\n]{0,40}/"
_SLASH, _LINE, _LINE_ESCAPE = r"\/", "\n", r"\n"


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
        pattern = json_schema.ascii_classes(pattern)
        return self.rule(f"/{pattern.replace('/', _SLASH).replace(_LINE, _LINE_ESCAPE)}/")

    def json(
        self, schema: Mapping[str, Any], whitespace: str | None = json_schema.WHITESPACE
    ) -> str:
        """JSON of a schema that `json_schema.load` has checked."""
        options = json_schema.options(whitespace)
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def other(self, grammar: str) -> str:
        """What another grammar, in the library's notation, says. Its own rules stay its own."""
        (found,) = json.loads(grammar)["grammars"]
        name = f"g{len(self._others)}"
        self._others.append({**found, "name": name})
        return self.rule(f"@{name}")

    def text(self, start: str) -> str:
        """The rules' text, of the expression where the grammar starts."""
        return "\n".join([f"start: {start}", *self._lines])

    def grammar(self, start: str) -> str:
        """The grammar in the library's notation, of the expression where it starts."""
        return json.dumps({"grammars": [{"lark_grammar": self.text(start)}, *self._others]})
