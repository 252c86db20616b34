"""What the parameters of a tool may be, for the formats that write each by itself.

Formats whose arguments are one JSON object need none of this: the schema is the grammar's.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.errors import RequestError
from octavo.text import json_schema
from octavo.text.schema_parts import DEFINITIONS
from octavo.text.tools.base import Tool

Schema = Mapping[str, Any]

KINDS = ("null", "integer", "number", "boolean", "object", "array", "string")
_MAX_REFERENCES = 32  # that lead to one schema
_MAX_SCHEMAS = 500  # that are looked at for the kinds of one
# Of an object as a whole: a list of parameters, one after another, cannot be held to them.
_WHOLE = ("anyOf", "allOf", "oneOf", "enum", "const", "patternProperties", "minProperties",
          "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas",
          "dependencies", "unevaluatedProperties", "not", "if", "then", "else")  # fmt: skip


class Parameters:
    """Of one tool.

    listed: their schemas by name, in order. required: names of those that a call must have.
    others: the schema of those that are not listed; None where there may be none.
    """

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self.root: Schema = tool.parameters
        schema = resolved(self.root, self.root)
        listed = schema.get("properties")
        listed = listed if isinstance(listed, Mapping) else {}
        self._none = next((name for name, part in listed.items() if part is False), None)
        # A schema may also be true, which any value meets.
        self.listed: Mapping[str, Schema] = {
            name: part if isinstance(part, Mapping) else {} for name, part in listed.items()
        }
        self.required = frozenset(n for n in _list(schema.get("required")) if isinstance(n, str))
        others = schema.get("additionalProperties", "properties" not in schema)
        self.others = None if others is False else others if isinstance(others, Mapping) else {}

    def schema(self, name: str) -> Schema:
        """Of a parameter; of one that may not be, any."""
        found = self.listed.get(name, self.others)
        return found if isinstance(found, Mapping) else {}

    def enforced(self) -> "Parameters":
        """As a grammar holds a model to them: without `strict`, any. Raises RequestError where a
        keyword of the whole object would be lost."""
        if not self.tool.strict:
            return Parameters(Tool(self.tool.name, parameters={"additionalProperties": True}))
        schema = resolved(self.root, self.root)
        if keyword := next((name for name in _WHOLE if name in schema), None):
            raise self.error(keyword, "of all parameters together")
        if self._none is not None:
            raise self.error("false", f"of {self._none!r}")
        for name in self.required - self.listed.keys():
            if self.others is None:
                raise self.error("required", f"of {name!r}, which additionalProperties forbids")
            self.listed = {**self.listed, name: self.others}
        return self

    def error(self, keyword: str, what: str) -> RequestError:
        """For what the format cannot express."""
        return RequestError(
            f"tools: {keyword!r} {what} cannot be enforced for {self.tool.name!r} in the format "
            "that this model writes calls in; leave it out, or give the tool strict: false",
            "tools",
        )

    def part(self, schema: Schema) -> dict[str, Any]:
        """A schema from within the parameters, to stand by itself."""
        for ref in _references(schema):
            if not ref.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
                raise self.error("$ref", f"to {ref!r}")
        shared = {name: self.root[name] for name in DEFINITIONS if name in self.root}
        return {**schema, **shared}


def resolved(schema: Schema, root: Schema) -> Schema:
    """What a schema says itself and by references within `root`."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema.get("$ref"), str):
            break
        target = json_schema.target(root, schema["$ref"])
        if not isinstance(target, Mapping):
            break
        own = {name: schema[name] for name in schema if name != "$ref"}
        schema = {**target, **own} if own else target
    return schema


def kinds_of(schema: Schema, root: Schema) -> frozenset[str]:
    """The kinds of values that may satisfy a schema; a number may also be an integer."""
    return _Kinds(root).of(schema)


class _Kinds:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._left = _MAX_SCHEMAS

    def of(self, schema: Any) -> frozenset[str]:
        found = frozenset(KINDS)
        self._left -= 1
        if self._left < 0 or not isinstance(schema, Mapping):
            return found
        schema = resolved(schema, self._root)
        kinds = schema.get("type")
        if names := {kinds} if isinstance(kinds, str) else set(map(str, _list(kinds))):
            found &= names | ({"integer"} if "number" in names else set())
        if (values := values_of(schema)) is not None:
            found &= frozenset().union(*map(_kinds_of_value, values))
        for name in ("anyOf", "oneOf"):
            if options := _list(schema.get(name)):
                found &= frozenset().union(*map(self.of, options))
        for part in _list(schema.get("allOf")):
            found &= self.of(part)
        return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def values_of(schema: Schema) -> list[Any] | None:
    """Those of `enum` or `const`; None where there is neither."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def allowed_values(schema: Schema, root: Schema) -> list[Any] | None:
    """As `values_of`, those of the schema's kinds; None also where it says more than that."""
    values = values_of(schema)
    if values is None or len(says(schema)) > 1:
        return None
    kinds = kinds_of(schema, root)
    return [value for value in values if _kinds_of_value(value) & kinds] or None


def _kinds_of_value(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset(["null"])
    if isinstance(value, bool):
        return frozenset(["boolean"])
    if isinstance(value, int):
        return frozenset(["integer", "number"])
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset([kinds[type(value)]])


def says(schema: Schema) -> frozenset[str]:
    """The keywords of a schema that say something about values, without `type`."""
    return frozenset(schema) - frozenset(json_schema.ANNOTATIONS) - {"type", *DEFINITIONS}


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            left += part.values()
        elif isinstance(part, list):
            left += part
