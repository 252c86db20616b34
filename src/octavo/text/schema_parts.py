"""The parts of a JSON Schema: subschemas, and what references within it lead to."""

from collections.abc import Iterator, Mapping
from typing import Any

from octavo.errors import RequestError

MAX_DEPTH = 64

# Keywords whose value is a schema, a list of schemas, or schemas by name.
ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties", "additionalItems")  # fmt: skip
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINITIONS, "dependentSchemas")


def schemas(schema: Mapping[str, Any], param: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every subschema that is an object, with where it is. Raises RequestError if too deep."""
    left: list[tuple[str, Any, int]] = [("", schema, 0)]
    while left:
        path, part, depth = left.pop()
        if depth > MAX_DEPTH:
            raise too_deep(param)
        if not isinstance(part, dict):
            continue
        yield path or "the schema", part
        left += [(f"{path}/{step}", inner, depth + 1) for step, inner in inside(part)]


def inside(part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The subschemas of one, with the steps that lead to them."""
    for name in ONE:
        if isinstance(part.get(name), dict):
            yield name, part[name]
    for name in LISTS:
        if isinstance(part.get(name), list):
            yield from ((f"{name}/{i}", inner) for i, inner in enumerate(part[name]))
    for name in NAMED:
        if isinstance(part.get(name), dict):
            yield from ((f"{name}/{key}", inner) for key, inner in part[name].items())


def too_deep(param: str) -> RequestError:
    return RequestError(f"{param} is nested more than {MAX_DEPTH} deep", param)


def target(schema: Mapping[str, Any], ref: str) -> Any:
    """What a reference within the schema points to; None where that is nothing."""
    if ref == "#":
        return schema
    if not ref.startswith("#/"):
        return None
    part: Any = schema
    for step in ref[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        elif isinstance(part, dict) and step in part:
            part = part[step]
        else:
            return None
    return part
