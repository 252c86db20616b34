"""Calls whose parameters stand as raw text between tags: Qwen3-Coder, GLM, MiniMax.

A parameter's schema says what its text stands for (`raw_value`). A string's text is passed on as it
comes: agents write whole files in one parameter. The closing tag ends a value, wherever it stands.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools import json_text
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.parameters import Parameters, Schema, kinds_of
from octavo.text.tools.raw_value import RawValues, json_of, written
from octavo.text.tools.section_parser import NoCallError, SectionParser, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_KEY = re.compile(r"[^<>\"=\n\ud800-\udfff]")  # no marker
_MAX_KEY = 200
_OTHER_KEY = "[A-Za-z_$][A-Za-z0-9_.$-]{0,63}"


class TaggedFormat(ToolFormat):
    """A format whose sections are `begin`, calls with tags, and `end`.

    call: what stands before and after a name, then what closes the call. key: what stands before
    and after a parameter's name; a third part is what opens its value. value_end: closes it. line:
    what stands between the parts. padded: whether it also stands around a value, and is none of it.
    lead: one character that stands between content and a section. also_begins: what a section may
    begin with where the model forgets `begin`.
    """

    end: str
    call: tuple[str, str, str]
    key: tuple[str, ...]
    value_end: str
    line: str = "\n"
    padded: bool = False
    lead: str = "\n"
    also_begins: tuple[str, ...] = ()

    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        call = rules.rule(" | ".join(self._call(rules, tool) for tool in tools))
        several = f"{call}{{1,{most}}}" if most > 1 else call
        parts = [self._literal(rules, self._before), several, rules.literal(self.end)]
        return " ".join(part for part in parts if part)

    @property
    def _before(self) -> str:
        return self.line if self.call[0] else ""

    def _call(self, rules: LarkRules, tool: Tool) -> str:
        parameters = Parameters(tool).enforced()
        values = RawValues(rules, parameters, self.line if self.padded else "", self.value_end)
        line = self._literal(rules, self.line)
        parts = [rules.literal(self._opened(tool.name))]
        for name, schema in parameters.listed.items():
            if not name or not all(_KEY.fullmatch(letter) for letter in name):
                raise parameters.error("properties", f"called {name!r}")
            one = f"{rules.literal(self._keyed(name))} {values.value(schema)} {line}"
            parts.append(one if name in parameters.required else f"({one})?")
        if parameters.others is not None:
            before, behind = (rules.literal(part) for part in self._around_key)
            name = rules.matching([_OTHER_KEY])
            parts.append(f"({before} {name} {behind} {values.value(parameters.others)} {line})*")
        parts.append(self._literal(rules, self._closed))
        return " ".join(part for part in parts if part)

    def _literal(self, rules: LarkRules, text: str) -> str:
        return rules.literal(text) if text else ""

    def _opened(self, name: str) -> str:
        return f"{self.call[0]}{name}{self.call[1]}{self.line}"

    @property
    def _closed(self) -> str:
        return f"{self.call[2]}{self.line}" if self.call[2] else ""

    @property
    def _around_key(self) -> tuple[str, str]:
        opened = self.line.join(self.key[1:])
        return self.key[0], f"{opened}{self.line}" if self.padded else opened

    def _keyed(self, name: str) -> str:
        return name.join(self._around_key)

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return TaggedParser(self, tools, markers)

    def write(self, calls: Sequence[Call]) -> str:
        found = [self._written(call) for call in calls]
        if self.several:
            return f"{self.begin}{self._before}{''.join(found)}{self.end}"
        return self.separator.join(f"{self.begin}{self._before}{one}{self.end}" for one in found)

    def _written(self, call: Call) -> str:
        padding = self.line if self.padded else ""
        parameters = (
            f"{self._keyed(name)}{written(value)}{padding}{self.value_end}{self.line}"
            for name, value in call.arguments.items()
        )
        return f"{self._opened(call.name)}{''.join(parameters)}{self._closed}"


class TaggedParser(SectionParser):
    """See the module. layout: of the sections."""

    def __init__(self, layout: TaggedFormat, tools: Mapping[str, Tool], markers: Markers) -> None:
        begins = (layout.begin, *layout.also_begins)
        super().__init__(begins, layout.lead, tools, markers, layout.new_id)
        self._layout = layout
        self._parameters = {name: Parameters(tool) for name, tool in tools.items()}
        self._value_ends = [layout.value_end]
        if layout.padded:
            self._value_ends.append(layout.line + layout.value_end)

    def section(self, begin: str) -> Steps[None]:
        opened = begin in self._layout.also_begins
        if not opened:
            yield from self.skip()
        self.body()
        yield from self._call(opened)
        yield from self.skip()
        while not (yield from self.literal(self._layout.end)):
            if not self._layout.several:
                raise NoCallError
            self.body()
            yield from self._call(opened=False)
            yield from self.skip()

    def _call(self, opened: bool) -> Steps[None]:
        """opened: whether what stands before the name has been read."""
        before, behind, _ = self._layout.call
        if not opened:
            yield from self.expect(before)
        name = yield from self.run(_NAME, 64)
        yield from self.expect(behind)
        if name not in self.tools:
            raise NoCallError
        if not behind:  # the name ends where the first parameter or the section's end begins
            yield from self.skip()
            if not ((yield from self.ahead(self._layout.key[0])) or (yield from self._ends())):
                raise NoCallError
        self.begin_call(name)
        yield from self.skip()
        count = 0
        while not (yield from self._ends()):
            yield from self._parameter(self._parameters[name], "{" if not count else ", ")
            count += 1
        if self._layout.call[2]:
            yield from self.literal(self._layout.call[2])
        self.arguments("}" if count else "{}")
        self.end_call()

    def _ends(self) -> Steps[bool]:
        """Whether the call's end comes, or the section's, which closes it too."""
        closing = self._layout.call[2]
        if closing and (yield from self.ahead(closing)):
            return True
        return (yield from self.ahead(self._layout.end))

    def _parameter(self, parameters: Parameters, before: str) -> Steps[None]:
        first, *behind = self._layout.key
        yield from self.expect(first)
        key = yield from self.run(_KEY, _MAX_KEY)
        for number, word in enumerate(behind):
            if number:
                yield from self.skip()
            yield from self.expect(word)
        self.arguments(f"{before}{json_text.string(key)}: ")
        if self._layout.padded:
            yield from self.literal(self._layout.line)
        yield from self._value(parameters.schema(key), parameters.root)
        yield from self.skip()

    def _value(self, schema: Schema, root: Schema) -> Steps[None]:
        kinds = kinds_of(schema, root)
        if "string" in kinds and kinds <= {"string", "null"}:
            text = _String(self, nullable="null" in kinds)
            yield from self.upto(self._value_ends, text.take, due=True)
            text.end()
            return
        composite = yield from self.attempt(self._composite(kinds))
        if composite is not None:
            self.arguments(composite)
            return
        pieces: list[str] = []
        yield from self.upto(self._value_ends, pieces.append, due=True)
        self.arguments(json_of("".join(pieces), schema, root))

    def _composite(self, kinds: Collection[str]) -> Steps[str]:
        """Reads an object or an array and its closing tag. A tag within its strings is text."""
        yield from self.skip()
        first = yield from self.peek()
        if not ((first == "{" and "object" in kinds) or (first == "[" and "array" in kinds)):
            raise NoCallError
        pieces: list[str] = []
        yield from self.json(pieces.append)
        yield from self.skip()
        yield from self.expect(self._layout.value_end)
        return "".join(pieces)


class _String:
    """A string that is passed on as it comes. nullable: unless it is the word null."""

    def __init__(self, parser: SectionParser, nullable: bool) -> None:
        self._parser = parser
        self._held: str | None = "" if nullable else None  # as long as it may be null
        if not nullable:
            parser.arguments('"')

    def take(self, text: str) -> None:
        if self._held is not None:
            self._held += text
            if "null".startswith(self._held.strip()):
                return
            text, self._held = self._held, None
            self._parser.arguments('"')
        self._parser.arguments(json_text.string(text)[1:-1])

    def end(self) -> None:
        if self._held is None:
            self._parser.arguments('"')
        elif self._held.strip() == "null":
            self._parser.arguments("null")
        else:
            self._parser.arguments(json_text.string(self._held))
