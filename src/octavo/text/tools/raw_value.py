"""Values that a format writes as raw text between tags: what one stands for, and its grammar.

What a text such as `42` or `null` stands for depends on the parameter's schema.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.text import json_schema
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

_BOOLEANS = ("true", "false", "True", "False")
_READERS: Mapping[str, Callable[[str], str | None]] = {
    "null": lambda text: "null" if text == "null" else None,
    "integer": json_text.integer,
    "number": json_text.number,
    "boolean": lambda text: text.lower() if text in _BOOLEANS else None,
    "object": lambda text: json_text.composite(text, dict),
    "array": lambda text: json_text.composite(text, list),
}

# Texts that are read as another kind than a string, as expressions; more rather than fewer, so that
# a value's first characters decide which rule is its own.
_READ_AS = {
    "null": "null",
    "integer": r"[+-]?[0-9.](.|\n)*",
    "number": r"[+-]?[0-9.](.|\n)*",
    "boolean": "[tT]rue|[fF]alse",
    "object": r"\{(.|\n)*",
    "array": r"\[(.|\n)*",
}
_ANY = r"(.|\n)*"
_MAX_BRANCHES = 64  # of one value
_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](\.[0-9]{{1,9}})?([zZ]|[+-]{_MINUTE})"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Of `format`: texts that are valid, not each valid one.
_FORMATS = {
    "date": json_schema.DATE,
    "time": _TIME,
    "date-time": f"{json_schema.DATE}[tT]{_TIME}",
    "duration": r"P([0-9]+D(T([0-9]+H)?([0-9]+M)?[0-9]+S)?|[0-9]+W|T([0-9]+H)?([0-9]+M)?[0-9]+S)",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:(//)?[a-zA-Z0-9._~!$&'()*+,;=:@/?-]+",
}


def json_of(text: str, schema: Schema, root: Schema) -> str:
    """The JSON of a raw value of a schema within `root`: the first kind that the schema allows and
    the text can be, from null to an array; else a string."""
    values = values_of(resolved(schema, root)) or ()
    if found := next((one for one in values if written(one) == text), None):
        return json_text.value(found)
    kinds, stripped = kinds_of(schema, root), text.strip()
    for kind, read in _READERS.items():
        if kind in kinds and (found := read(stripped)) is not None:
            return str(found)
    if "string" not in kinds:
        if stripped == "None" and "null" in kinds:
            return "null"  # as templates of Python values have it
        if "number" in kinds and (found := json_text.number(stripped, finite=False)) is not None:
            return found
    return json_text.string(text)


def written(value: Any) -> str:
    """A value as raw text."""
    return value if isinstance(value, str) else json_text.value(value)


class RawValues:
    """The grammar of raw values and of the tag that closes each.

    before: what stands between a value and the tag. parameters: whose schemas they are.
    """

    def __init__(self, rules: LarkRules, parameters: Parameters, before: str, end: str) -> None:
        self._rules, self._parameters = rules, parameters
        self._before, self._end = before, end

    def value(self, schema: Schema) -> str:
        """An expression of a value and its closing tag."""
        branches = list(itertools.islice(self._branches(schema), _MAX_BRANCHES + 1))
        if len(branches) > _MAX_BRANCHES:
            raise self._parameters.error("anyOf", f"of more than {_MAX_BRANCHES} schemas")
        options = [option for branch in branches for option in self._other_kinds(branch)]
        taken = {kind for branch in branches if says(branch) for kind in self._kinds(branch)}
        options += [
            option for branch in branches for option in self._strings(branch, taken - {"string"})
        ]
        return self._rules.rule(" | ".join(dict.fromkeys(options)))

    def _branches(self, schema: Schema, depth: int = 8) -> Iterator[Schema]:
        """The schemas of which a value satisfies one, without `anyOf` in them."""
        schema = resolved(schema, self._parameters.root)
        if "allOf" in schema:
            schema = self._merged(schema)
        options = schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(options, list):
            if values_of(schema) and allowed_values(schema, self._parameters.root) is None:
                raise self._parameters.error("enum", "beside other keywords")
            yield schema
            return
        if not depth:
            raise self._parameters.error("anyOf", "within others")
        if says(schema) - {"anyOf", "oneOf"} and "string" in self._kinds(schema):
            raise self._parameters.error("anyOf", "beside other keywords")
        if says(schema) - {"anyOf", "oneOf"}:
            yield schema
            return
        for option in options:
            own = {"type": schema["type"]} if "type" in schema else {}
            yield from self._branches({**own, **option} if option is not True else own, depth - 1)

    def _merged(self, schema: Schema) -> Schema:
        found: dict[str, Any] = {name: schema[name] for name in schema if name != "allOf"}
        for part in schema["allOf"]:
            part = resolved(part, self._parameters.root)
            if says(part) & says(found) or "allOf" in part:
                if "string" in self._kinds(schema):
                    raise self._parameters.error("allOf", "of what may be a string")
                return schema
            found = {**part, **found}
        return found

    def _kinds(self, schema: Schema) -> frozenset[str]:
        return kinds_of(schema, self._parameters.root)

    def _other_kinds(self, schema: Schema) -> Iterator[str]:
        """Of values that are no strings."""
        kinds = self._kinds(schema) - {"string"}
        if (values := allowed_values(schema, self._parameters.root)) is not None:
            for value in values:
                if not isinstance(value, str):
                    yield self._rules.literal(f"{written(value)}{self._before}{self._end}")
        elif kinds and not (kinds | {"string"} == self._kinds({}) and not says(schema)):
            closing = f"{self._before}{self._end}"
            words = ["null"] if "null" in kinds else []
            words += ["true", "false"] if "boolean" in kinds else []
            yield from (self._rules.literal(word + closing) for word in words)
            if kinds := kinds - {"null", "boolean"}:
                part = self._parameters.part({**schema, "type": sorted(kinds)})
                yield f"{self._rules.json(part)} {self._rules.literal(closing)}"

    def _strings(self, schema: Schema, taken: "set[str]") -> Iterator[str]:
        """taken: kinds as which a text must not be read, for they have rules of their own."""
        if "string" not in self._kinds(schema):
            return
        if (values := allowed_values(schema, self._parameters.root)) is not None:
            for value in values:
                if isinstance(value, str):
                    if self._end in value:
                        raise self._parameters.error("enum", f"with {self._end} in it")
                    yield self._rules.literal(f"{value}{self._before}{self._end}")
            return
        patterns, without = text_patterns(schema, self._parameters), []
        if taken:
            without.append(rf"\s*({'|'.join(sorted({_READ_AS[kind] for kind in taken}))})\s*")
        yield self._rules.text_before(self._end, patterns, without, self._before)


def text_patterns(schema: Schema, parameters: Parameters) -> list[str]:
    """Expressions that a string matches as a whole, each of them, to satisfy a schema."""
    found = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        found.append(rf"(.|\n){{{least},{'' if most is None else most}}}")
    if (format := schema.get("format")) is not None:
        if format not in _FORMATS:
            raise parameters.error("format", repr(format))
        found.append(_FORMATS[format])
    if isinstance(pattern := schema.get("pattern"), str):
        whole = _whole(json_schema.ascii_classes(pattern))
        if whole is None:
            raise parameters.error("pattern", repr(pattern))
        found.append(whole)
    return found


_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def _whole(pattern: str) -> str | None:
    """An expression of the whole texts in which `pattern` is found somewhere; None where an anchor
    stands neither at the beginning nor at the end of one of its alternatives."""
    options: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            options.append([])
        else:
            options[-1].append(piece)
    found = []
    for pieces in options:
        first = pieces[:1] == ["^"]
        last = pieces[-1:] == ["$"] and len(pieces) > first
        inner = pieces[first : len(pieces) - last]
        if "^" in inner or "$" in inner:
            return None
        found.append(f"{'' if first else _ANY}({''.join(inner)}){'' if last else _ANY}")
    return "|".join(found)
