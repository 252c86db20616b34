"""Calls as Gemma writes them: `call:f{k:<|"|>text<|"|>,n:42,o:{a:[1,true]}}`.

Strings are raw between two quotes that are words of the format; keys are bare. The parser takes
JSON's strings and keys as well.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from octavo.errors import RequestError
from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools import json_text
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.literals import LiteralParser, Literals, Notation
from octavo.text.tools.parameters import Parameters, Schema, kinds_of
from octavo.text.tools.raw_value import json_of, text_patterns
from octavo.text.tools.section_parser import NoCallError, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_KEY = re.compile(r"[^:,{}\[\]<>\"\n\ud800-\udfff]")  # no marker
_MAX_KEY = 200
_BARE_KEY = re.compile("[A-Za-z0-9_.$-]+")
_OTHER_KEY = "[A-Za-z_$][A-Za-z0-9_.$-]{0,63}:"


class GemmaFormat(ToolFormat):
    """A format whose sections are `begin`, one call, and `end`. quote: around a string."""

    end: str
    quote: str

    @property
    def notation(self) -> Notation:
        return Notation(
            words={True: "true", False: "false", None: "null"},
            string=self._quoted,
            key=lambda key: key if _BARE_KEY.fullmatch(key) else self._quoted(key),
            comma=",",
            colon=":",
            string_rule=self._string_rule,
            any_key_rule=self._any_key_rule,
        )

    def _quoted(self, text: str) -> str:
        return f"{self.quote}{text}{self.quote}"

    def _string_rule(self, rules: LarkRules, schema: Schema, parameters: Parameters) -> str:
        try:
            patterns = text_patterns(schema, parameters)
        except RequestError:  # which the parser takes, too
            return rules.json(parameters.part({**schema, "type": "string"}))
        return f"{rules.literal(self.quote)} {rules.text_before(self.quote, patterns)}"

    def _any_key_rule(self, rules: LarkRules) -> str:
        quoted = f"{rules.literal(self.quote)} {rules.text_before(self.quote)}"
        return rules.rule(f"{rules.matching([_BARE_KEY.pattern])} | {quoted}")

    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        call = rules.rule(" | ".join(self._call(rules, tool) for tool in tools))
        return f"{rules.literal('call:')} {call} {rules.literal('}' + self.end)}"

    def _call(self, rules: LarkRules, tool: Tool) -> str:
        parameters, notation = Parameters(tool).enforced(), self.notation
        for name in parameters.listed:
            if self.quote in name or not name:
                raise parameters.error("properties", f"called {name!r}")
        arguments = Literals(rules, notation, parameters).arguments(
            parameters, lambda name: f"{notation.key(name)}:", rules.matching([_OTHER_KEY])
        )
        return f"{rules.literal(f'{tool.name}{{')} {arguments}"

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return GemmaParser(self, tools, markers)

    def write(self, calls: Sequence[Call]) -> str:
        return self.separator.join(
            f"{self.begin}call:{call.name}{self.notation.write(call.arguments)}{self.end}"
            for call in calls
        )


class GemmaParser(LiteralParser):
    """See the module. layout: of the sections."""

    def __init__(self, layout: GemmaFormat, tools: Mapping[str, Tool], markers: Markers) -> None:
        super().__init__([layout.begin], layout.separator, tools, markers, layout.new_id)
        self._layout = layout
        self._parameters = {name: Parameters(tool) for name, tool in tools.items()}

    def section(self, begin: str) -> Steps[None]:
        yield from self.skip()
        self.body()
        yield from self.expect("call:")
        name = yield from self.run(_NAME, 64)
        yield from self.expect("{")
        if name not in self.tools:
            raise NoCallError
        self.begin_call(name)
        yield from self.skip()
        count = 0
        while not (yield from self.literal("}")):
            if count:
                yield from self.expect(",")
                yield from self.skip()
                if (yield from self.literal("}")):
                    break
            yield from self._argument(self._parameters[name], "{" if not count else ", ")
            count += 1
        self.arguments("}" if count else "{}")
        self.end_call()
        yield from self.skip()
        yield from self.expect(self._layout.end)

    def _argument(self, parameters: Parameters, before: str) -> Steps[None]:
        pieces: list[str] = []
        if (yield from self.string(pieces.append)):
            key = "".join(pieces)
        else:
            key = json_text.string((yield from self.bare_key()))
        yield from self.skip()
        yield from self.expect(":")
        yield from self.skip()
        self.arguments(f"{before}{key}: ")
        schema = parameters.schema(json_text.read_string(key))
        if "string" not in kinds_of(schema, parameters.root):
            yield from self._maybe_quoted(schema, parameters.root)
        else:
            yield from self.value()
        yield from self.skip()

    def _maybe_quoted(self, schema: Schema, root: Schema) -> Steps[None]:
        """A value that is no string, though the model may write it as one."""
        if not (yield from self.literal(self._layout.quote)):
            yield from self.value()
            return
        pieces: list[str] = []
        yield from self.upto([self._layout.quote], pieces.append, due=True)
        self.arguments(json_of("".join(pieces), schema, root))

    def bare_key(self) -> Steps[str]:
        key = (yield from self.run(_KEY, _MAX_KEY)).strip()
        if not key:
            raise NoCallError
        return key

    def string(self, take: Callable[[str], None]) -> Steps[bool]:
        if (yield from self.literal(self._layout.quote)):
            take('"')
            quote = [self._layout.quote]
            yield from self.upto(quote, lambda text: take(json_text.string(text)[1:-1]), due=True)
            take('"')
            return True
        if (yield from self.peek()) == '"':
            yield from self.json(take)
            return True
        return False
