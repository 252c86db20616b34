"""Mistral's models: from the tokenizers of version 11 on named calls, before that a list of JSON
objects.

The parsers take both: which one a model writes, and how grammars hold it to that, follows from its
template.
"""

import re
import secrets
import string
from collections.abc import Mapping

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Tool, ToolFormat
from octavo.text.tools.json_object import JsonObjectFormat, JsonObjects
from octavo.text.tools.named_json import LONGEST_NAME, NamedJsonFormat, NamedJsonParser
from octavo.text.tools.section_parser import NoCallError, Steps

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_SPACED = f"{_BEGIN} ["
_LETTERS = string.ascii_letters + string.digits
_LETTER = re.compile("[A-Za-z0-9]")
_ID_LENGTH = 9


class _MistralFormat(ToolFormat):
    name = "mistral"
    begin = _BEGIN
    markers = (_BEGIN, _ID, _ARGUMENTS)

    def new_id(self, index: int, name: str) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))


class Mistral(_MistralFormat, NamedJsonFormat):
    """`[TOOL_CALLS]f[ARGS]{...}`, repeated."""

    middle = _ARGUMENTS

    def matches(self, template: str) -> bool:
        return _BEGIN in template and _ARGUMENTS in template and _ID not in template

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return _MistralParser(self, tools, markers)


class MistralWithIds(Mistral):
    """`[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`, repeated."""

    def matches(self, template: str) -> bool:
        return _BEGIN in template and _ID in template

    def call_start(self, rules: LarkRules, name: str) -> str:
        start, call_id = rules.literal(name + _ID), f"/[A-Za-z0-9]{{{_ID_LENGTH}}}/"
        return f"{start} {call_id} {rules.literal(_ARGUMENTS)}"

    def write_start(self, index: int, name: str) -> str:
        return f"{name}{_ID}{self.new_id(index, name)}{_ARGUMENTS}"


class MistralList(_MistralFormat, JsonObjectFormat):
    """`[TOOL_CALLS][{"name": "f", "arguments": {...}}]`, and perhaps an id in each."""

    opening = "["
    closing = "]"
    several = True

    def matches(self, template: str) -> bool:
        return _BEGIN in template and _ARGUMENTS not in template and _SPACED not in template

    def call_end(self, rules: LarkRules) -> str:
        start, end = rules.literal(', "id": "'), rules.literal('"')
        return f"({start} /[A-Za-z0-9]{{{_ID_LENGTH}}}/ {end})? {super().call_end(rules)}"

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return _MistralParser(Mistral(), tools, markers)


class MistralSpacedList(MistralList):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, as the first tokenizers have it."""

    opening = " ["

    def matches(self, template: str) -> bool:
        return _SPACED in template and _ARGUMENTS not in template


class _MistralParser(NamedJsonParser):
    def section(self, begin: str) -> Steps[None]:
        yield from self.skip()
        if (yield from self.peek()) in "[{" and not (yield from self.ahead(_ARGUMENTS)):
            yield from JsonObjects(self, annotations=("id",)).read()
        else:
            yield from super().section(begin)

    def middle(self, name: str) -> Steps[str | None]:
        call_id = ""
        if (yield from self.literal(_ID)):
            call_id = yield from self.run(_LETTER, LONGEST_NAME)
        if not (yield from self.literal(_ARGUMENTS)) and (yield from self.peek()) != "{":
            raise NoCallError
        return call_id if len(call_id) == _ID_LENGTH else None
