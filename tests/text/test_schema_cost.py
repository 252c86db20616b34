"""Schemas that would cost seconds, gigabytes or the process are refused, and say why."""

import json

import pytest

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text import schema_cost
from octavo.text.grammar import grammar_of


def chain(count, link, end=None):
    """Definitions of which each refers to the next."""
    defs = {str(i): link(f"#/$defs/{i + 1}") for i in range(count)}
    return {"$defs": {**defs, str(count): end or {"type": "null"}}, "$ref": "#/$defs/0"}


def patterns(count):
    return [{"type": "string", "pattern": f".*{i:04}.{{20}}"} for i in range(count)]


def prop(ref):
    return {"type": "object", "properties": {"a": {"$ref": ref}}}


COSTLY = {
    # what the library recurses through until its stack ends
    "references": (chain(900, lambda ref: {"$ref": ref}), "schemas within each other"),
    "properties": (chain(300, prop), "schemas within each other"),
    "many references": (chain(1200, lambda ref: {"$ref": ref}), "different references"),
    "nested definitions": (chain(40, lambda ref: json.loads('{"items":' * 20 + json.dumps(
        {"$ref": ref}) + "}" * 20)), "schemas within each other"),
    # what takes it minutes
    "patterns": ({"allOf": patterns(30)}, "patterns and formats for one value"),
    "patterns of a property": ({"allOf": [{"properties": {"a": p}} for p in patterns(30)]},
                               "patterns and formats for one value"),
    "patterns by references": (chain(30, lambda ref: {"allOf": [{"$ref": ref}, *patterns(1)]}),
                               "patterns and formats for one value"),
    "names": ({"type": "object", "patternProperties": {f"^{i}.*{i}$": {} for i in range(100)}},
              "patternProperties"),
    "optional": ({"properties": {str(i): {} for i in range(600)}, "required": ["1"]},
                 "properties of one object that are not required"),
    "optional in parts": ({"allOf": [{"properties": {f"{j}{i}": {} for i in range(300)}}
                                     for j in "ab"]}, "that are not required"),
    "a remainder": ({"type": "integer", "multipleOf": 10_000_003}, "remainders of multipleOf"),
    "remainders": ({"properties": {str(i): {"multipleOf": 1000 + i} for i in range(200)}},
                   "remainders of multipleOf"),
    "a product": ({"allOf": [{"type": "integer", "multipleOf": 97}, {"multipleOf": 89}]},
                  "remainders of multipleOf for one value"),
    "1e300": ({"type": "number", "multipleOf": 1e300}, "remainders of multipleOf"),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_schema_is_refused_with_the_reason(name):
    schema, words = COSTLY[name]
    with pytest.raises(RequestError, match="is too complex: at most") as caught:
        schema_cost.check(schema, "the_field")
    assert words in str(caught.value)
    assert caught.value.param == "the_field"
    with pytest.raises(RequestError, match="too complex"):
        grammar_of(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "schema",
    [
        chain(150, prop),
        chain(150, lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": ref}]}),
        chain(60, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}),
        {"allOf": [{"properties": {f"p{i}": p}} for i, p in enumerate(patterns(12))]},
        {"anyOf": [{"properties": {"a": p}} for p in patterns(100)]},
        {"properties": {str(i): {"type": "string", "format": "uuid"} for i in range(500)}},
        {"properties": {str(i): {"type": "number", "multipleOf": 0.01} for i in range(500)}},
        {"allOf": [{"multipleOf": 2}, {"multipleOf": 3}, {"multipleOf": 5}]},
        {"properties": {str(i): {} for i in range(900)}, "required": list(map(str, range(500)))},
        {"anyOf": [{"properties": {str(i): {} for i in range(500)}}] * 3},
        {"multipleOf": "many", "patternProperties": [], "format": ["date"], "$ref": 5},
        {"type": "object", "properties": {"next": {"$ref": "#"}, "all": {"items": {"$ref": "#"}}}},
    ],
)
def test_what_costs_little_is_taken(schema):
    schema_cost.check(schema, "the_field")
