"""Calls as Python writes them: `[f(a=1, b="x"), g()]`. Llama 3.2's small models and ToolACE.

What stands around the list is the format's part. A string ends at a quote that something follows
which may follow a string: some models do not escape quotes, nor line breaks.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from octavo.text.answer import Parser
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools import json_text
from octavo.text.tools.base import Call, Tool, ToolFormat
from octavo.text.tools.literals import LiteralParser, Literals, Notation
from octavo.text.tools.parameters import Parameters, Schema, says
from octavo.text.tools.section_parser import SPACE, NoCallError, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_KEY = re.compile(r"[^=,()\[\]{}'\"\s\ud800-\udfff]")  # no marker
_MAX_KEY = 200
_OTHER_KEY = "[A-Za-z_][A-Za-z0-9_]{0,63}="
_QUOTES = ('"""', "'''", '"', "'")
_PLAIN = re.compile(r"[^'\"\\]+")
_MAX_SPACE = 200  # after a quote
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
            "\\": "\\", "'": "'", '"': '"', "\n": ""}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]")
_SINGLE_QUOTED = r"'([^'\\\n]|\\[\\'\"nrt])*'"


def _string_rule(rules: LarkRules, schema: Schema, parameters: Parameters) -> str:
    text = rules.json(parameters.part({**schema, "type": "string"}))
    free = not says(schema) & {"minLength", "maxLength", "pattern", "format"}
    return f"{text} | {rules.matching([_SINGLE_QUOTED])}" if free else text


def _any_key_rule(rules: LarkRules) -> str:
    return rules.json({"type": "string"})


NOTATION = Notation(
    words={True: "True", False: "False", None: "None"},
    string=json_text.string,
    key=json_text.string,
    comma=", ",
    colon=": ",
    string_rule=_string_rule,
    any_key_rule=_any_key_rule,
)


class PythonicFormat(ToolFormat):
    """A format whose sections are `begin`, calls between `opening` and `closing`, and `end`.

    between: two calls. space: what a model may write after `begin` and before `end`. wrap: what
    may stand around a list that begins an answer, where there is no `begin`.
    """

    several = True
    opening: str = "["
    closing: str = "]"
    between: str = ", "
    end: str = ""
    space: str = ""
    wrap: tuple[str, str] | None = None
    notation: Notation = NOTATION

    def section(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str:
        call = rules.rule(
            " | ".join(f"{rules.literal(t.name)} {self._call(rules, t)}" for t in tools)
        )
        more = f" ({rules.literal(self.between)} {call}){{0,{most - 1}}}" if most > 1 else ""
        space = f"{rules.literal(self.space)}?" if self.space else ""
        opening = rules.literal(self.opening) if self.opening else ""
        closing = f"{rules.literal(self.closing) if self.closing else ''}"
        rest = f"{more} {closing}"
        if self.begin:
            return f"{space} {opening} {call}{rest} {space} {rules.literal(self.end)}"
        # One terminal, as a text that is no call may have the same beginning.
        first = " | ".join(
            f"{rules.matching([self._begin([tool])])} {self._call(rules, tool, opened=True)}"
            for tool in tools
        )
        bare = rules.rule(f"({first}){rest}")
        if self.wrap is None:
            return bare
        begin, end = map(rules.literal, self.wrap)
        return rules.rule(f"{bare} | {begin} {opening} {call}{rest} {end}")

    def in_text(self, rules: LarkRules, tools: Sequence[Tool], most: int) -> str | None:
        if self.begin:
            return None
        text = rules.matching([], [f"{self._begin(tools)}(.|\n)*"])
        return f"({self.section(rules, tools, most)} | {text})"

    def _begin(self, tools: Sequence[Tool]) -> str:
        """An expression of what begins a list that nothing else opens, up to the arguments."""
        names = "|".join(re.escape(tool.name) for tool in tools)
        return rf"[ \n]{{0,8}}{re.escape(self.opening)}({names})\("

    def _call(self, rules: LarkRules, tool: Tool, opened: bool = False) -> str:
        """What follows a name. opened: its parenthesis has been there."""
        parameters = Parameters(tool).enforced()
        for name in parameters.listed:
            if not name or not all(_KEY.fullmatch(letter) for letter in name):
                raise parameters.error("properties", f"called {name!r}")
        literals = Literals(rules, self.notation, parameters)
        other = rules.matching([_OTHER_KEY])
        arguments = literals.arguments(parameters, "{}=".format, other)
        return f"{'' if opened else rules.literal('(')} {arguments} {rules.literal(')')}"

    def parser(self, tools: Mapping[str, Tool], markers: Markers) -> Parser:
        return PythonicParser(self, tools, markers)

    def write(self, calls: Sequence[Call]) -> str:
        body = self.between.join(map(self._written, calls))
        return f"{self.begin}{self.opening}{body}{self.closing}{self.end}"

    def _written(self, call: Call) -> str:
        pairs = (f"{name}={self.notation.write(value)}" for name, value in call.arguments.items())
        return f"{call.name}({', '.join(pairs)})"


class Pythonic(PythonicFormat):
    name = "pythonic"

    def matches(self, template: str) -> bool:
        words = ("python list", "[func_name1(", "tool_call.name + '('")
        return any(word in template for word in words)


class PythonicParser(LiteralParser):
    """See the module. layout: of the sections."""

    def __init__(self, layout: PythonicFormat, tools: Mapping[str, Tool], markers: Markers) -> None:
        begin, end = layout.wrap or (layout.begin, layout.end)
        begins = [word for word in (begin, "" if layout.begin else layout.opening) if word]
        super().__init__(begins, "", tools, markers, layout.new_id)
        self._opening, self._closing, self._end = layout.opening, layout.closing, end

    def section(self, begin: str) -> Steps[None]:
        bare = begin == self._opening
        if not bare:
            yield from self.skip()
        self.body()
        if bare and not self.first:
            raise NoCallError
        if self._opening and not bare:
            yield from self.expect(self._opening)
        yield from self._calls(self._closing or self._end)
        if self._closing and not bare and self._end:
            yield from self.skip()
            yield from self.expect(self._end)

    def _calls(self, closing: str) -> Steps[None]:
        """Reads one call or more, and what closes them."""
        yield from self.skip()
        yield from self._call()
        yield from self.skip(SPACE + ",")
        while not (yield from self.literal(closing)):
            self.body()
            yield from self._call()
            yield from self.skip(SPACE + ",")

    def _call(self) -> Steps[None]:
        name = yield from self.run(_NAME, 64)
        yield from self.expect("(")
        if name not in self.tools:
            raise NoCallError
        yield from self.skip()
        before = "{"
        while not (yield from self.literal(")")):
            if before != "{":
                yield from self.expect(",")
                yield from self.skip()
                if (yield from self.literal(")")):
                    break
            key = yield from self._key()
            if before == "{":  # what follows a name may still be no call, as in `[f("x")]`
                self.begin_call(name)
            self.arguments(f"{before}{json_text.string(key)}: ")
            before = ", "
            yield from self.value()
            yield from self.skip()
        if before == "{":
            self.begin_call(name)
        self.arguments("}" if before != "{" else "{}")
        self.end_call()

    def _key(self) -> Steps[str]:
        """Reads an argument's name, and what stands between it and the value."""
        key = yield from self.run(_KEY, _MAX_KEY)
        yield from self.skip()
        yield from self.expect("=")
        if not key:
            raise NoCallError
        yield from self.skip()
        return key

    def string(self, take: Callable[[str], None]) -> Steps[bool]:
        quote = yield from self._quote()
        if not quote:
            return False
        take('"')
        while True:
            letter = yield from self.peek()
            if letter == "\\":
                yield from self._escape(take)
            elif letter == quote[0] and (yield from self._ends(quote)):
                yield from self.expect(quote)
                take('"')
                return True
            elif letter in "'\"":
                yield from self.expect(letter)
                take(json_text.string(letter)[1:-1])
            else:
                take(json_text.string(self.here(_PLAIN))[1:-1])

    def _quote(self) -> Steps[str]:
        first = yield from self.peek()
        if first not in ("'", '"'):
            return ""
        count = 1
        while count < 3 and (yield from self.after(count)) == first:
            count += 1
        quote = first * (3 if count == 3 else 1)
        yield from self.expect(quote)
        return quote

    def _ends(self, quote: str) -> Steps[bool]:
        """Whether the quote that comes next ends the string."""
        for place in range(1, len(quote)):
            if (yield from self.after(place)) != quote[0]:
                return False
        for place in range(len(quote), _MAX_SPACE):
            letter = yield from self.after(place)
            if letter not in SPACE:
                return letter in ",)]}:"
        return True

    def _escape(self, take: Callable[[str], None]) -> Steps[None]:
        letter = yield from self.after(1)
        digits = _DIGITS.get(letter, 0)
        code = ""
        for place in range(2, 2 + digits):
            digit = yield from self.after(place)
            if not _HEX.fullmatch(digit):
                break
            code += digit
        if digits and len(code) == digits and int(code, 16) < 0x110000:
            found, length = chr(int(code, 16)), 2 + digits
        elif letter in _ESCAPES:
            found, length = _ESCAPES[letter], 2
        else:  # Python's rule for an escape that is none
            found, length = "\\", 1
        self.advance(length)
        take(json_text.string(found)[1:-1])
