"""Arguments as literals that are nearly JSON: Python's, and Gemma's.

They differ in how strings, truth values and keys are written, which a `Notation` says. Here is what
they share: the parser, which makes JSON of a literal as it comes, the writer, and the grammar. JSON
itself is part of both, so a schema that has no rules of its own is held to as JSON.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from octavo.text.lark import LarkRules
from octavo.text.tools import json_text
from octavo.text.tools.parameters import (
    Parameters,
    Schema,
    allowed_values,
    kinds_of,
    resolved,
    says,
    values_of,
)
from octavo.text.tools.section_parser import NoCallError, SectionParser, Steps

MAX_DEPTH = 64
_MAX_DEPTH_OF_RULES = 12  # beyond, and beyond so many, a schema has none of its own
_MAX_RULES = 1000
_WORD = re.compile(r"[-+.0-9A-Za-z_]")
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}
_OTHER_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*)")


class Notation(msgspec.Struct, frozen=True):
    """words: true, false and null. string: writes one. key: writes one of an object. comma, colon:
    with the space after it. string_rule, any_key_rule: the grammar of a string, and of keys."""

    words: Mapping[bool | None, str]
    string: Callable[[str], str]
    key: Callable[[str], str]
    comma: str
    colon: str
    string_rule: Callable[[LarkRules, Schema, Parameters], str]
    any_key_rule: Callable[[LarkRules], str]

    def write(self, value: Any) -> str:
        if value is None or isinstance(value, bool):
            return self.words[value]
        if isinstance(value, str):
            return self.string(value)
        if isinstance(value, Mapping):
            pairs = (f"{self.key(k)}{self.colon}{self.write(v)}" for k, v in value.items())
            return f"{{{self.comma.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{self.comma.join(map(self.write, value))}]"
        return json_text.value(value)


class LiteralParser(SectionParser):
    """The parts of a parser that read literals."""

    @abstractmethod
    def string(self, take: Callable[[str], None]) -> Steps[bool]:
        """Whether a string came; if so it is read, and `take` told its JSON as it comes."""

    def value(self, depth: int = 0) -> Steps[None]:
        """Reads a value of an argument."""
        if depth > MAX_DEPTH:
            raise NoCallError
        if (yield from self.string(self.arguments)):
            return
        first = yield from self.peek()
        if first == "[":
            yield from self._several("[", "]", depth, self.value)
        elif first == "{":
            yield from self._several("{", "}", depth, self._pair)
        else:
            self.arguments((yield from self._scalar()))

    def _several(
        self, begin: str, end: str, depth: int, read: Callable[[int], Steps[None]]
    ) -> Steps[None]:
        yield from self.expect(begin)
        self.arguments(begin)
        yield from self.skip()
        count = 0
        while not (yield from self.literal(end)):
            if count:
                yield from self.expect(",")
                yield from self.skip()
                if (yield from self.literal(end)):
                    break
                self.arguments(", ")
            yield from read(depth + 1)
            yield from self.skip()
            count += 1
        self.arguments(end)

    def _pair(self, depth: int) -> Steps[None]:
        if not (yield from self.string(self.arguments)):
            self.arguments(json_text.string((yield from self.bare_key())))
        yield from self.skip()
        yield from self.expect(":")
        self.arguments(": ")
        yield from self.skip()
        yield from self.value(depth)

    def bare_key(self) -> Steps[str]:
        """Reads a key of an object that is no string."""
        return (yield from self._scalar())

    def _scalar(self) -> Steps[str]:
        word = yield from self.run(_WORD, json_text.MOST_DIGITS)
        found = _WORDS.get(word) or json_text.number(word, finite=False) or _other_integer(word)
        if found is None:
            raise NoCallError
        return found


def _other_integer(word: str) -> str | None:
    """An integer that is Python's and not JSON's."""
    if not _OTHER_INTEGER.fullmatch(word):
        return None
    try:
        return str(int(word, 0))
    except ValueError:
        return None


class Literals:
    """The grammar of literals in a notation. parameters: whose schemas they are."""

    def __init__(self, rules: LarkRules, notation: Notation, parameters: Parameters) -> None:
        self._rules, self._notation, self._parameters = rules, notation, parameters
        self._any_rule = ""
        self._known: dict[int, tuple[Schema, str]] = {}  # rules, by the schema's identity

    def value(self, schema: Schema, depth: int = 0) -> str:
        """An expression of a value."""
        schema = resolved(schema, self._parameters.root)
        if not says(schema) and "type" not in schema:
            return self._any()
        if (known := self._known.get(id(schema))) is not None:
            return known[1]
        if self._needs_json(schema, depth):
            return self._json(schema)

        def body(name: str) -> str:
            self._known[id(schema)] = schema, name
            return " | ".join(dict.fromkeys(self._options_of(schema, depth)))

        return self._rules.recursive(body)

    def _needs_json(self, schema: Schema, depth: int) -> bool:
        if values_of(schema) is not None:
            return allowed_values(schema, self._parameters.root) is None
        several = "anyOf" in schema or "oneOf" in schema
        too_large = depth > _MAX_DEPTH_OF_RULES or len(self._known) > _MAX_RULES
        return too_large or "allOf" in schema or (several and self._alternatives(schema) is None)

    def _options_of(self, schema: Schema, depth: int) -> Iterator[str]:
        if (values := allowed_values(schema, self._parameters.root)) is not None:
            yield from (self._rules.literal(self._notation.write(value)) for value in values)
        elif (several := self._alternatives(schema)) is not None:
            yield from (self.value(option, depth + 1) for option in several)
        else:
            yield from self._options(schema, depth)

    def arguments(self, parameters: Parameters, key: Callable[[str], str], other: str) -> str:
        """An expression of all arguments. key: what stands before a value; other: an expression of
        what stands before one that the schema does not list."""
        listed = [
            (name in parameters.required, f"{self._rules.literal(key(name))} {self.value(schema)}")
            for name, schema in parameters.listed.items()
        ]
        others = None
        if parameters.others is not None:
            others = f"{other} {self.value(parameters.others)}"
        return self._listed(listed, others)

    def _listed(self, members: "list[tuple[bool, str]]", others: str | None) -> str:
        """Members in their order, some of which must be there, with commas between them."""
        comma = self._rules.literal(self._notation.comma)
        more = f"({comma} {others})*" if others else '""'
        # What may follow: where something came before, and where nothing did.
        behind = self._rules.rule(more)
        none = self._rules.rule(f"({others} {more})?" if others else '""')
        for needed, member in reversed(members):
            inner = self._rules.rule(f"{member} {behind}")
            if needed:
                behind, none = self._rules.rule(f"{comma} {inner}"), inner
            else:
                behind = self._rules.rule(f"{comma} {inner} | {behind}")
                none = self._rules.rule(f"{inner} | {none}")
        return none

    def _alternatives(self, schema: Schema) -> list[Schema] | None:
        """The schemas of `anyOf`, if it says nothing else."""
        if not says(schema) <= {"anyOf"} or not says(schema) or "type" in schema:
            return None
        options = schema["anyOf"]
        return options if all(isinstance(option, Mapping) for option in options) else None

    def _any(self) -> str:
        """Any value, in the notation."""
        if not self._any_rule:
            scalars = {"type": ["boolean", "null", "number", "string"]}
            comma, colon = map(self._rules.literal, (self._notation.comma, self._notation.colon))
            key = self._notation.any_key_rule(self._rules)
            options = " | ".join(self._options(scalars, 0))
            self._any_rule = self._rules.recursive(
                lambda name: (
                    f'{options} | "[" ({name} ({comma} {name})*)? "]"'
                    f' | "{{" ({key} {colon} {name} ({comma} {key} {colon} {name})*)? "}}"'
                )
            )
        return self._any_rule

    def _json(self, schema: Schema) -> str:
        return self._rules.json(self._parameters.part(schema))

    def _options(self, schema: Schema, depth: int) -> Iterator[str]:
        kinds = kinds_of(schema, self._parameters.root)
        words: list[bool | None] = [True, False] if "boolean" in kinds else []
        words += [None] if "null" in kinds else []
        yield from (self._rules.literal(self._notation.words[word]) for word in words)
        if numbers := sorted(kinds & {"integer", "number"}):
            yield self._json({**schema, "type": numbers})
        if "string" in kinds:
            yield self._notation.string_rule(self._rules, schema, self._parameters)
        if "array" in kinds:
            yield self._array(schema, depth)
        if "object" in kinds:
            yield self._object(schema, depth)

    def _array(self, schema: Schema, depth: int) -> str:
        items, most = schema.get("items", {}), schema.get("maxItems")
        least = schema.get("minItems", 0)
        if not isinstance(items, Mapping) or "prefixItems" in schema or most == 0:
            return self._json({**schema, "type": "array"})
        item = self.value(items, depth + 1)
        comma = self._rules.literal(self._notation.comma)
        last = "" if most is None else most - 1
        several = f"{item} ({comma} {item}){{{max(least - 1, 0)},{last}}}"
        return f'"[" {several if least else f"({several})?"} "]"'

    def _object(self, schema: Schema, depth: int) -> str:
        listed, others = schema.get("properties"), schema.get("additionalProperties")
        required = set(schema.get("required") or ())
        if listed is None and others is None:
            others = True
        if says(schema) & _WHOLE or required - set(listed or ()):
            return self._json({**schema, "type": "object"})
        members = []
        for name, part in (listed or {}).items():
            if part is False:
                continue
            before = self._rules.literal(f"{self._notation.key(name)}{self._notation.colon}")
            value = self.value(part if isinstance(part, Mapping) else {}, depth + 1)
            members.append((name in required, f"{before} {value}"))
        return f'"{{" {self._listed(members, self._others(others, depth))} "}}"'

    def _others(self, schema: Any, depth: int) -> str | None:
        """Members that the schema of an object does not list."""
        if schema is None or schema is False:
            return None
        key = self._notation.any_key_rule(self._rules)
        colon = self._rules.literal(self._notation.colon)
        return f"{key} {colon} {self.value({} if schema is True else schema, depth + 1)}"


_WHOLE = frozenset(("patternProperties", "minProperties", "maxProperties", "propertyNames",
                    "dependentRequired", "dependentSchemas", "dependencies",
                    "unevaluatedProperties"))  # fmt: skip
