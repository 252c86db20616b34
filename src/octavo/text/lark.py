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


class LarkRules:
    """The rules of one grammar as they are made. Expressions refer to rules by their names."""

    def __init__(self, markers: Markers | None = None) -> None:
        self._markers = markers
        self._lines = [_TEXT, _WHITESPACE]

    def rule(self, body: str, option: str | None = None) -> str:
        """A new rule; returns its name. option: such as `lazy`."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{f'[{option}]' if option else ''}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly `text`; markers that are added tokens are these."""
        parts = self._markers.parts(text) if self._markers else [text]
        return " ".join(f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in parts)

    def json(
        self, schema: Mapping[str, Any], whitespace: str | None = json_schema.WHITESPACE
    ) -> str:
        """JSON of a schema that `json_schema.load` has checked."""
        options = json_schema.options(whitespace)
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def text(self, start: str) -> str:
        """The grammar's text, of the expression where it starts."""
        return "\n".join([f"start: {start}", *self._lines])
