"""JSON Schemas as people post them, made from parts: 300 in all, each with finite documents."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = (
    "name",
    "age",
    "city",
    "items",
    "price",
    "tags",
    "id",
    "status",
    "notes",
    "a b",
    "é",
    'q"',
)


def _text(draw: random.Random) -> Schema:
    return draw.choice([
        {"type": "string", "maxLength": draw.randint(1, 12)},
        {"type": "string", "minLength": 2, "maxLength": 5, "title": "T", "description": "d"},
        {"type": "string", "pattern": r"^[A-Z]\d{2,4}$"},
        {"type": "string", "pattern": r"^(red|green|blue)-\w{1,3}$"},
        {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "date-time", "time"])},
        {"type": "string", "enum": ["one", "two", "three ü"], "default": "one"},
        {"const": "fixed \\ \" /"},
    ])  # fmt: skip


def _number(draw: random.Random) -> Schema:
    return draw.choice([
        {"type": "integer", "minimum": -5, "maximum": 250},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": -1.5, "maximum": 99.75},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": [1, "1", None, True, [1, 2], {"a": 1}]},
    ])  # fmt: skip


def _array(draw: random.Random, depth: int) -> Schema:
    item = schema(draw, depth + 1)
    return draw.choice([
        {"type": "array", "items": item, "maxItems": 2},
        {"type": "array", "items": item, "minItems": 1, "maxItems": 3},
        {"type": "array", "prefixItems": [_text(draw), _number(draw)], "items": False,
         "minItems": 2},
    ])  # fmt: skip


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(_WORDS, draw.randint(0, 4))
    made: Schema = {
        "type": "object",
        "properties": {name: schema(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": False,
    }
    if names and draw.random() < 0.2:
        made["title"], made["$comment"] = "A title", "for people"
    return made


def _any_of(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [schema(draw, depth + 1), draw.choice([{"type": "null"}, _number(draw)])]}


def _types(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.sample(["integer", "null", "boolean"], 2)}


def schema(draw: random.Random, depth: int = 0) -> Schema:
    """A random one; documents are the shorter the deeper it is."""
    leaves: list[Callable[[], Schema]] = [lambda: _text(draw), lambda: _number(draw)]
    inner = [lambda: _object(draw, depth), lambda: _array(draw, depth),
             lambda: _any_of(draw, depth), lambda: _types(draw, depth)]  # fmt: skip
    if depth == 0:
        return _object(draw, 0) if draw.random() < 0.7 else draw.choice(inner)()
    return draw.choice(leaves if depth > 2 else [*leaves, *leaves, *inner])()


def _with_definitions(draw: random.Random) -> Schema:
    """`$defs` and `$ref`, one of which refers to itself."""
    return {
        "$defs": {
            "point": _object(draw, 2),
            "node": {
                "type": "object",
                "properties": {
                    "value": _number(draw),
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value"],
                "additionalProperties": False,
            },
        },
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}, "list": {"$ref": "#/$defs/node"}},
        "required": ["at"],
        "additionalProperties": False,
    }


def _made() -> list[Schema]:
    draw = random.Random(2026)
    return [*(schema(draw) for _ in range(260)), *(_with_definitions(draw) for _ in range(40))]


SCHEMAS = _made()
