"""What is refused of a JSON Schema before it becomes a grammar.

llguidance refuses keywords that it knows and cannot enforce, and ignores those that it does not
know. Here a misspelled keyword, one that would be ignored although it means something, a schema
nested too deep, and one that only infinite documents satisfy are errors that say where.
"""

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import RequestError, nearest, shown
from octavo.text import schema_cost
from octavo.text.schema_parts import LISTS, NAMED, ONE, schemas, too_deep
from octavo.text.schema_parts import MAX_DEPTH as MAX_DEPTH
from octavo.text.schema_parts import target as target

# Up to so many characters between the tokens of JSON: enough for an indent of four spaces at depth
# nine, and too few for a text of whitespace, in which weak models end when any number is allowed.
WHITESPACE = r"[ \t\r\n]{0,40}"

_VALUES = ("type", "enum", "const", "required", "minProperties", "maxProperties", "minItems",
           "maxItems", "uniqueItems", "minContains", "maxContains", "dependentRequired",
           "dependencies", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
           "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "$ref", "$dynamicRef",
           "$recursiveRef")  # fmt: skip
# They say something to people or to programs, and nothing about which documents are valid.
ANNOTATIONS = ("title", "description", "default", "example", "examples", "deprecated", "readOnly",
                "writeOnly", "$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor",
                "$vocabulary", "contentEncoding", "contentMediaType", "contentSchema",
                "discriminator", "externalDocs", "xml", "strict")  # fmt: skip
_KEYWORDS = frozenset((*ONE, *LISTS, *NAMED, *_VALUES, *ANNOTATIONS))
_LONGEST = max(map(len, _KEYWORDS)) + 10  # a name that may be a misspelled keyword
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\r\n\f\v"}
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"  # that exists
# Formats of which the library takes more: 29 February of each year, year 0, leap seconds at any
# time of day. The patterns leave these out, and say nothing else.
_EXACT = {
    "date": f"^{DATE}$",
    "date-time": f"^{DATE}" + "[Tt ][0-9]{2}:[0-9]{2}:[0-5]",
    "time": "^[0-9]{2}:[0-9]{2}:[0-5]",
}
_ANY_NAME: tuple[object, ...] = (True, {}, {"type": "string"})
_INSTEAD = {
    "nullable": 'is OpenAPI\'s; write "type": ["string", "null"], say',
    "x-guidance": "is the library's; use whitespace_pattern and the other fields of "
    "structured_outputs",
}


def options(whitespace: str | None = WHITESPACE) -> dict[str, object]:
    """Of the library, for a schema. whitespace: an expression; None for none at all."""
    found: dict[str, object] = {"whitespace_flexible": whitespace is not None, "lenient": False}
    if whitespace is not None:
        found["whitespace_pattern"] = whitespace
    return found


def load(text: str, param: str) -> dict[str, Any]:
    """The schema in `text`, checked. Raises RequestError, whose field is `param`."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise too_deep(param) from None
    except ValueError as error:
        raise RequestError(f"{param} is not JSON: {error}", param) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must be a JSON Schema, an object, not {shown(schema)}", param)
    for path, part in schemas(schema, param):
        _check_keywords(path, part, param)
    schema_cost.check(schema, param)
    if not _Finite(schema).holds():
        raise RequestError(
            f"{param} recurs without an end: no finite document satisfies it; let a property "
            "that leads back to the schema be optional, or null",
            param,
        )
    for _, part in schemas(schema, param):
        _make_exact(part)
    return schema


def _make_exact(part: dict[str, Any]) -> None:
    """Let what the library enforces of texts be what validators check, and leave out what says
    nothing: that names are strings, as zod writes of records."""
    if part.get("propertyNames") in _ANY_NAME:
        del part["propertyNames"]
    if isinstance(part.get("pattern"), str):
        part["pattern"] = ascii_classes(part["pattern"])
    form = part.get("format")
    if isinstance(form, str) and form in _EXACT:
        if "pattern" not in part:
            part["pattern"] = _EXACT[form]
        elif isinstance(every := part.setdefault("allOf", []), list):
            every.append({"pattern": _EXACT[form]})


def ascii_classes(pattern: str) -> str:
    r"""An expression in which \d, \w and \s stand for ASCII characters, as in ECMAScript.

    Rust's expressions, which llguidance takes, would have the digits of all scripts in \d.
    """
    found: list[str] = []
    inside, rest = False, iter(pattern)
    for letter in rest:
        if letter == "\\":
            following = next(rest, "")
            plain = _CLASSES.get(following)
            found.append(f"\\{following}" if plain is None else plain if inside else f"[{plain}]")
            continue
        if letter == "[" and not inside:
            inside = True
        elif letter == "]" and inside and found[-1] not in ("[", "^"):
            inside = False
        found.append(letter)
    return "".join(found)


def without_additional_properties(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """A copy in which objects that list properties have no others, unless it says so itself."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part in schemas(copy, param):
        if "properties" in part:
            part.setdefault("additionalProperties", False)
    return copy


def _check_keywords(path: str, part: Mapping[str, Any], param: str) -> None:
    for name in part:
        if name in _KEYWORDS or (name.startswith("x-") and name not in _INSTEAD):
            continue
        if (instead := _INSTEAD.get(name)) is None:
            instead = f"is no keyword of JSON Schema{nearest(name[:_LONGEST], _KEYWORDS)}"
        raise RequestError(f"{param}: {shown(name)} in {shown(path, 80)} {instead}", param)


class _Finite:
    """Whether some finite document satisfies a schema, as far as its recursion decides that.

    The least fixed point over the targets of `$ref`: each is taken for infinite until what it
    refers to is known to be finite.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._finite: set[str] = set()
        parts = [part for _, part in schemas(schema, "")]
        self._targets = {
            ref: found
            for part in parts
            if isinstance(ref := part.get("$ref"), str)
            and (found := target(schema, ref)) is not None
        }

    def holds(self) -> bool:
        while True:
            found = {ref for ref, target in self._targets.items() if self._is_finite(target)}
            if found == self._finite:
                return self._is_finite(self._schema)
            self._finite = found

    def _is_finite(self, part: Any) -> bool:
        if not isinstance(part, dict) or "enum" in part or "const" in part:
            return True
        ref = part.get("$ref")
        if isinstance(ref, str) and ref in self._targets and ref not in self._finite:
            return False
        for name in ("anyOf", "oneOf"):
            options = part.get(name)
            if isinstance(options, list) and not any(map(self._is_finite, options)):
                return False
        every = part.get("allOf")
        if isinstance(every, list) and not all(map(self._is_finite, every)):
            return False
        return not self._must_nest(part)

    def _must_nest(self, part: dict[str, Any]) -> bool:
        """Whether each value holds one that cannot be finite."""
        types = part.get("type", ["object", "array", "null"])
        types = types if isinstance(types, list) else [types]
        return not any(
            not self._endless_object(part) if kind == "object"
            else not self._endless_array(part) if kind == "array"
            else True
            for kind in types
        )  # fmt: skip

    def _endless_object(self, part: dict[str, Any]) -> bool:
        required, properties = part.get("required"), part.get("properties")
        if not isinstance(required, list) or not isinstance(properties, dict):
            return False
        return not all(
            self._is_finite(properties.get(name)) for name in required if isinstance(name, str)
        )

    def _endless_array(self, part: dict[str, Any]) -> bool:
        least = part.get("minItems", 0)
        if not isinstance(least, int) or least < 1:
            return False
        first = part.get("prefixItems")
        first = first if isinstance(first, list) else []
        needed = [*first[:least], *([part.get("items")] if len(first) < least else [])]
        return not all(map(self._is_finite, needed))
