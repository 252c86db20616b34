"""Calls as a name followed by the JSON of its arguments, each between words of its format."""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.section_parser import NoCallError, SectionParser, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]")
LONGEST_NAME = 64


class NamedJsonFormat(ToolFormat):
    """A format whose sections are `begin`, calls, `end`. A call is `opening`, a name, `middle`, the
    arguments, `closing`; `between` stands between two.

    Where these have white space, the parser takes any or none. lead: one character that stands
    between content and a section.
    """

    opening: str = ""
    middle: str = ""
    closing: str = ""
    between: str = ""
    end: str = ""
    lead: str = ""

    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        call = rules.rule(" | ".join(self._call(rules, tool) for tool in tools))
        parts = [call]
        if most > 1:
            parts.append(f"({rules.literal(self.between)} {call}){{0,{most - 1}}}")
        parts.append(rules.literal(self.end))
        return " ".join(part for part in parts if part)

    def _call(self, rules: LarkRules, tool: Tool) -> str:
        start = self.call_start(rules, tool.name)
        return f"{start} {rules.json(tool.schema)} {rules.literal(self.closing)}"

    def call_start(self, rules: LarkRules, name: str) -> str:
        """An expression of a call up to its arguments."""
        return rules.literal(f"{self.opening}{name}{self.middle}")

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return NamedJsonParser(self, tools, markers)

    def write(self, calls: Sequence[Call]) -> str:
        texts = [
            f"{self.write_start(i, call.name)}{json.dumps(call.arguments, ensure_ascii=False)}"
            f"{self.closing}"
            for i, call in enumerate(calls)
        ]
        if self.several:
            return f"{self.begin}{self.between.join(texts)}{self.end}"
        return self.separator.join(f"{self.begin}{text}{self.end}" for text in texts)

    def write_start(self, index: int, name: str) -> str:
        """What is written of a call before its arguments."""
        return f"{self.opening}{name}{self.middle}"


class NamedJsonParser(SectionParser):
    """See the module. layout: of the sections."""

    def __init__(
        self, layout: NamedJsonFormat, tools: Mapping[str, Tool], markers: Markers
    ) -> None:
        super().__init__((layout.begin,), layout.lead, tools, markers, layout.new_id)
        self._layout = layout

    def section(self, begin: str) -> Steps[None]:
        layout = self._layout
        while True:
            yield from self._call()
            if not layout.several:
                return
            yield from self.skip()
            if layout.end and (yield from self.literal(layout.end)):
                return
            if not (yield from self.ahead(layout.opening)):
                raise NoCallError

    def opening(self) -> Steps[None]:
        """Reads what comes before a name."""
        yield from self.expect_words(self._layout.opening)

    def middle(self, name: str) -> Steps[str | None]:
        """Reads what comes between a name and the arguments. Returns the id that it gives."""
        yield from self.expect_words(self._layout.middle)
        return None

    def _call(self) -> Steps[None]:
        yield from self.opening()
        self.body()
        name = yield from self.run(_NAME, LONGEST_NAME)
        call_id = yield from self.middle(name)
        yield from self.skip()
        if name not in self.tools:
            self.reject()
            yield from self._arguments(lambda _: self.reject())
            yield from self._closing()
            self.reject()
            return
        self.begin_call(name, call_id)
        yield from self._arguments(self.arguments)
        self.end_call()
        yield from self._closing()
        self.drop()

    def _arguments(self, take: Callable[[str], None]) -> Steps[None]:
        if (yield from self.peek()) == "{":
            yield from self.json(take)
            return
        layout = self._layout
        for words in (layout.closing, layout.end, layout.opening, layout.begin):
            if words and (yield from self.ahead(words.split()[0])):
                take("{}")
                return
        raise NoCallError

    def _closing(self) -> Steps[None]:
        for word in self._layout.closing.split():
            yield from self.skip()
            yield from self.literal(word)
