"""Llama 3.1 to 3.3, and Llama 4 with its JSON prompt: a bare object with `parameters`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.lark import LarkRules
from octavo.text.tools.base import Tool
from octavo.text.tools.json_object import JsonObjectFormat

_TAG = "<|python_tag|>"
_SPACE = r"[ \t\r\n]{0,40}"
# What begins a call, up to its arguments; %s are names of tools.
_BEGIN = rf'\{{{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"{_SPACE}:' + (
    rf'{_SPACE}"(%s)"{_SPACE},{_SPACE}"(parameters|arguments)"{_SPACE}:'
)
_MAX_SCHEMAS = 50  # the library looks out for one beginning of each at every character of a text
_PROMPT = re.compile(r'\\?"parameters\\?": dictionary of argument')


class Llama3Json(JsonObjectFormat):
    """Calls are told from other JSON by their keys and by a tool's name, wherever they stand."""

    name = "llama3_json"
    aliases = ("llama4_json",)
    begins = (_TAG, "{")
    key = "parameters"
    several = True
    between = "; "
    markers = (_TAG,)
    annotations = ("type",)  # models write "type": "function", as it stands in their prompt

    def matches(self, template: str) -> bool:
        return _PROMPT.search(template) is not None

    def section_beside_json(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        call = rules.rule(" | ".join(rules.json(self._object(tool)) for tool in tools))
        more = f" ({rules.literal(self.between)} {call}){{0,{most - 1}}}" if most > 1 else ""
        return f"{call}{more}"

    def in_text(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        """Calls are held from where the name and the key of the arguments have been written; one
        that has its arguments before its name is not. Of tools with many different schemas,
        arguments are any JSON object."""
        space = rules.rule(f"/{_SPACE}/")
        names: dict[str, list[str]] = {}
        for tool in tools:
            names.setdefault(json.dumps(tool.schema), []).append(re.escape(tool.name))
        if len(names) > _MAX_SCHEMAS:
            names = {json.dumps({"type": "object"}): [re.escape(tool.name) for tool in tools]}
        calls = []
        for schema, those in names.items():
            begin = rules.rule(f"TEXT /{_BEGIN % '|'.join(those)}/", "lazy")
            calls.append(f'{begin} {space} {rules.json(json.loads(schema))} {space} "}}"')
        call = rules.rule(" | ".join(calls))
        answer = f"({call} | TEXT)" if most == 1 else f"({call}{{0,{most}}} TEXT)"
        return f"{rules.literal(_TAG)}? {answer}"

    def _object(self, tool: Tool) -> Mapping[str, Any]:
        """The schema of a call."""
        at = f"#/properties/{self.key}"
        return {
            "type": "object",
            "properties": {"name": {"const": tool.name}, self.key: _moved(tool.schema, at)},
            "required": ["name", self.key],
            "additionalProperties": False,
        }


def _moved(part: Any, at: str) -> Any:
    """A schema, or a part of one, that is to stand `at` a place of another: what its references
    lead to does, too."""
    if isinstance(part, list):
        return [_moved(inner, at) for inner in part]
    if not isinstance(part, Mapping):
        return part
    found = {name: _moved(inner, at) for name, inner in part.items()}
    ref = part.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        found["$ref"] = at + ref[1:]
    return found
