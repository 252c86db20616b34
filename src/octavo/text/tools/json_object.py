"""Calls as JSON objects with a name and arguments: `{"name": "f", "arguments": {...}}`.

What stands around them is the format's part. The parser takes one object, several, or a list of
them, keys in any order, and `parameters` as a name of the arguments.
"""

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.section_parser import SPACE, NoCallError, SectionParser, Steps

_ARGUMENTS = ("arguments", "parameters")


class JsonObjectFormat(ToolFormat):
    """A format whose sections are `begin`, JSON objects with `opening` before and `closing` behind.

    begins: what else may open a section for the parser. end: closes a section for the parser. key:
    of the arguments. between: two calls of one section. lead: one character that stands between
    content and a section. annotations: keys of an object that say nothing; their values are texts.
    """

    begins: tuple[str, ...] = ()
    opening: str = ""
    closing: str = ""
    end: str = ""
    key: str = "arguments"
    between: str = ", "
    lead: str = ""
    annotations: tuple[str, ...] = ()

    @abstractmethod
    def matches(self, template: str) -> bool: ...

    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        call = rules.rule(" | ".join(self._call(rules, tool) for tool in tools))
        parts = [rules.literal(self.opening), call]
        if most > 1:
            parts.append(f"({rules.literal(self.between)} {call}){{0,{most - 1}}}")
        parts.append(rules.literal(self.closing))
        return " ".join(part for part in parts if part)

    def _call(self, rules: LarkRules, tool: Tool) -> str:
        start = rules.literal(f'{{"name": {json.dumps(tool.name)}, "{self.key}": ')
        return f"{start} {rules.json(tool.schema)} {rules.literal('}')}"

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return JsonObjectParser(self, tools, markers)

    def write(self, calls: Sequence[Call]) -> str:
        objects = [
            json.dumps({"name": call.name, self.key: call.arguments}, ensure_ascii=False)
            for call in calls
        ]
        if self.several:
            return f"{self.begin}{self.opening}{self.between.join(objects)}{self.closing}"
        sections = [f"{self.begin}{self.opening}{one}{self.closing}" for one in objects]
        return self.separator.join(sections)


class JsonObjectParser(SectionParser):
    """See the module. layout: of the sections."""

    def __init__(
        self, layout: JsonObjectFormat, tools: Mapping[str, Tool], markers: Markers
    ) -> None:
        begins = (layout.begin, *layout.begins)
        super().__init__(begins, layout.lead, tools, markers, layout.new_id)
        self._end = layout.end
        self._annotations: Collection[str] = layout.annotations

    def section(self, begin: str) -> Steps[None]:
        yield from self.skip()
        listed = yield from self.literal("[")
        yield from self.skip()
        if (yield from self.peek()) != "{":
            raise NoCallError
        while (yield from self.peek()) == "{":
            yield from self._object()
            yield from self.skip(SPACE + ",;")
        if listed:
            yield from self.expect("]")
            yield from self.skip()
        if self._end:
            yield from self.expect(self._end)

    def _object(self) -> Steps[None]:
        """Reads one object; if it is no call, it is content."""
        self.body()
        found = _Object()
        yield from self.expect("{")
        yield from self.skip()
        while not (yield from self.literal("}")):
            key = yield from self._string()
            yield from self.skip()
            yield from self.expect(":")
            yield from self.skip()
            yield from self._member(found, key)
            yield from self.skip()
            if (yield from self.peek()) != "}":
                yield from self.expect(",")
                yield from self.skip()
        if not found.announced:
            self.reject()
        elif found.arguments is None:
            self.arguments("{}")
            self.end_call()

    def _member(self, found: "_Object", key: str) -> Steps[None]:
        first = yield from self.peek()
        if key == "name" and first == '"' and found.name is None and not found.rejected:
            yield from self._name(found)
        elif key in _ARGUMENTS and first in "{n" and found.arguments is None:
            yield from self._arguments(found)
        elif key in self._annotations and first == '"':
            yield from self._string()
        elif found.announced:
            raise NoCallError
        else:
            yield from self._other(found)

    def _name(self, found: "_Object") -> Steps[None]:
        found.name = yield from self._string()
        if found.name not in self.tools:
            found.rejected = True
            self.reject()
            return
        found.announced = True
        self.begin_call(found.name)
        if found.arguments is not None:
            self.arguments(found.arguments)
            self.end_call()

    def _arguments(self, found: "_Object") -> Steps[None]:
        if (yield from self.literal("null")):
            found.arguments = "{}"
            if found.announced:
                self.arguments("{}")
        elif found.announced:
            found.arguments = ""  # they have gone
            yield from self.json(self.arguments)
        elif found.rejected:
            yield from self._other(found)
        else:
            pieces: list[str] = []
            yield from self.json(pieces.append)
            found.arguments = "".join(pieces)
        if found.announced:
            self.end_call()

    def _other(self, found: "_Object") -> Steps[None]:
        """A value that no call has: the object is content, and so is what it has inside."""
        found.rejected = True
        self.reject()
        yield from self.json(lambda _: self.reject())
        self.reject()

    def _string(self) -> Steps[str]:
        if (yield from self.peek()) != '"':
            raise NoCallError
        pieces: list[str] = []
        yield from self.json(pieces.append)
        found: str = json.loads("".join(pieces))
        return found


class _Object:
    """What is known of an object so far. arguments: their JSON text."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.announced = self.rejected = False
