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
    """A format whose sections are `begin`, then JSON objects between `opening` and `closing`.

    begins, end: what else may open a section, and what closes one, for the parser. ends: what
    closes one instead, by what has opened it. key: of the arguments. between: two calls of one
    section. lead: one character that stands between content and a section. annotations: keys of an
    object that say nothing; their values are texts.
    """

    begins: tuple[str, ...] = ()
    opening: str = ""
    closing: str = ""
    end: str = ""
    ends: Mapping[str, str] = {}
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
        return f"{start} {rules.json(tool.schema)} {self.call_end(rules)}"

    def call_end(self, rules: LarkRules) -> str:
        """An expression of what follows the arguments in an object."""
        return rules.literal("}")

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
        self._layout = layout

    def section(self, begin: str) -> Steps[None]:
        listed = begin.endswith("[")
        if begin == "{":
            self.unread(1)
        bare = not self._layout.begin
        yield from JsonObjects(self, self._layout.annotations, bare).read(listed)
        if end := self._layout.ends.get(begin, self._layout.end):
            yield from self.skip()
            yield from self.expect(end)


class JsonObjects:
    """Reads the calls of a section for its parser. annotations: see `JsonObjectFormat`. bare: the
    objects may be no calls even if they have a tool's name: their next key, or their end, decides.
    """

    def __init__(
        self, parser: SectionParser, annotations: Collection[str], bare: bool = False
    ) -> None:
        self._parser, self._annotations, self._bare = parser, annotations, bare

    def read(self, listed: bool = False) -> Steps[None]:
        """One object, several, or a list of them. listed: its bracket has been read."""
        parser = self._parser
        yield from parser.skip()
        listed = listed or (yield from parser.literal("["))
        yield from parser.skip()
        more = True
        while more:
            yield from self._object()
            skipped = yield from parser.skip(SPACE + ",;")
            more = (yield from parser.peek()) == "{"
            if not more and not listed:
                parser.unread(skipped)
        if listed:
            yield from parser.expect("]")

    def _object(self) -> Steps[None]:
        """Reads one object; if it is no call, it is content."""
        parser = self._parser
        parser.body()
        found = _Object()
        yield from parser.expect("{")
        yield from parser.skip()
        while not (yield from parser.literal("}")):
            key = yield from self._string()
            yield from parser.skip()
            yield from parser.expect(":")
            yield from parser.skip()
            yield from self._member(found, key)
            yield from parser.skip()
            if (yield from parser.peek()) != "}":
                yield from parser.expect(",")
                yield from parser.skip()
        if found.name is None or found.rejected:
            parser.reject()
            return
        self._announce(found)
        if found.arguments is None:
            parser.arguments("{}")
            parser.end_call()
        parser.drop()

    def _member(self, found: "_Object", key: str) -> Steps[None]:
        parser = self._parser
        first = yield from parser.peek()
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
        parser = self._parser
        found.name = yield from self._string()
        if found.name not in parser.tools:
            found.rejected = True
            parser.reject()
        elif not self._bare or found.arguments is not None:
            self._announce(found)

    def _announce(self, found: "_Object") -> None:
        if found.announced or found.name is None:
            return
        found.announced = True
        self._parser.begin_call(found.name)
        if found.arguments is not None:
            self._parser.arguments(found.arguments)
            self._parser.end_call()

    def _arguments(self, found: "_Object") -> Steps[None]:
        parser = self._parser
        if not found.rejected:
            self._announce(found)
        if (yield from parser.literal("null")):
            found.arguments = "{}"
            if found.announced:
                parser.arguments("{}")
        elif found.announced:
            found.arguments = ""  # they have gone
            yield from parser.json(parser.arguments)
        elif found.rejected:
            yield from self._other(found)
        else:
            pieces: list[str] = []
            yield from parser.json(pieces.append)
            found.arguments = "".join(pieces)
        if found.announced:
            parser.end_call()

    def _other(self, found: "_Object") -> Steps[None]:
        """A value that no call has: the object is content, and so is what it has inside."""
        parser = self._parser
        found.rejected = True
        parser.reject()
        yield from parser.json(lambda _: parser.reject())
        parser.reject()

    def _string(self) -> Steps[str]:
        parser = self._parser
        if (yield from parser.peek()) != '"':
            raise NoCallError
        pieces: list[str] = []
        yield from parser.json(pieces.append)
        found: str = json.loads("".join(pieces))
        return found


class _Object:
    """What is known of an object so far. arguments: their JSON text."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments: str | None = None
        self.announced = self.rejected = False
