"""Kimi K2: a section of calls, each with an id that has the tool's name and a number."""

import re
from collections.abc import Mapping

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Tool
from octavo.text.tools.named_json import NamedJsonFormat, NamedJsonParser
from octavo.text.tools.section_parser import Steps

_CALL, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_CALL_END = "<|tool_call_end|>"
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_DIGIT = re.compile("[0-9]")


class KimiK2(NamedJsonFormat):
    name = "kimi_k2"
    begin = _SECTION
    opening = _CALL
    middle = _ARGUMENTS
    closing = _CALL_END
    end = _SECTION_END
    several = True
    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _CALL_END)

    def matches(self, template: str) -> bool:
        return _SECTION in template

    def call_start(self, rules: LarkRules, name: str) -> str:
        start, number = rules.literal(f"{_CALL}functions.{name}:"), "/[0-9]{1,3}/"
        return f"{start} {number} {rules.literal(_ARGUMENTS)}"

    def write_start(self, index: int, name: str) -> str:
        return f"{_CALL}{self.new_id(index, name)}{_ARGUMENTS}"

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return _KimiK2Parser(self, tools, markers)

    def new_id(self, index: int, name: str) -> str:
        return f"functions.{name}:{index}"


class _KimiK2Parser(NamedJsonParser):
    """The ids are those that the model gives: it counts the calls of a conversation."""

    def opening(self) -> Steps[None]:
        yield from super().opening()
        yield from self.literal("functions.")

    def middle(self, name: str) -> Steps[str | None]:
        yield from self.expect(":")
        number = yield from self.run(_DIGIT, 6)
        yield from super().middle(name)
        return f"functions.{name}:{number}" if number else None
