"""What is refused of a JSON Schema, and what recursion means."""

import contextlib
import json

import pytest

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text import json_schema
from octavo.text.grammar import grammar_of
from schemas import SCHEMAS

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}


def refused(schema):
    with pytest.raises(RequestError) as caught:
        json_schema.load(schema if isinstance(schema, str) else json.dumps(schema), "the_field")
    assert caught.value.param == "the_field"
    return str(caught.value)


def test_a_word_that_is_no_keyword_is_named_with_the_nearest_one():
    assert "did you mean 'maxLength'" in refused({"type": "string", "maxLenght": 3})
    assert "/properties/a" in refused({"properties": {"a": {"anyOff": []}}})
    assert '["string", "null"]' in refused({"type": "string", "nullable": True})
    json_schema.load('{"properties": {"maxLenght": {}}, "x-mine": 1, "title": "t"}', "f")
    json_schema.load('{"enum": [{"maxLenght": 1}], "default": {"foo": 1}}', "f")


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "false", "nul"])
def test_what_is_no_schema_is_refused(text):
    refused(text)


def test_depth_is_bounded():
    deep = {}
    for _ in range(70):
        deep = {"items": deep}
    assert "nested more than 64 deep" in refused(deep)
    assert "nested more than 64 deep" in refused('{"items":' * 20_000 + "{}" + "}" * 20_000)


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"$ref": "#"},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": [NODE, {"allOf": [{}, {"$ref": "#"}]}]},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
    ],
)
def test_a_schema_without_a_finite_document_is_refused(schema):
    assert "without an end" in refused(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {**NODE, "required": []},
        {**NODE, "type": ["object", "null"]},
        {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
         "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"const": 1}, NODE]},
        {"$defs": {"a~/": {"type": "null"}}, "$ref": "#/$defs/a~0~1"},
    ],
)  # fmt: skip
def test_a_schema_that_ends_is_taken(schema):
    assert json_schema.load(json.dumps(schema), "f") == schema


def test_the_schemas_of_the_tests_are_taken():
    for schema in SCHEMAS:
        json_schema.load(json.dumps(schema), "f")


@pytest.mark.parametrize("odd", [None, 5, -0.0, "x", [], [[]], {}, {"a": None}, [{"a": []}]])
@pytest.mark.parametrize("name", [
    "type", "$ref", "prefixItems", "anyOf", "allOf", "required", "properties", "minItems", "items",
    "pattern", "format",
])  # fmt: skip
def test_any_value_of_a_keyword_is_taken_or_refused(name, odd):
    inner = {"type": "array", "minItems": 1, name: odd}
    with contextlib.suppress(RequestError):
        grammar_of(StructuredOutputsParams(json={"properties": {"a": inner}, "required": ["a"]}))


def test_classes_stand_for_ascii_characters():
    assert json_schema.ascii_classes(r"\d+[\d\w]\s") == r"[0-9]+[0-9A-Za-z0-9_][ \t\r\n\f\v]"
    for same in (r"\\d", r"[^]d]", r"\.\-", r"[a-z]{2}", "a\\", r"\D\W\S"):
        assert json_schema.ascii_classes(same) == same
    assert json_schema.ascii_classes(r"[]\d]\d") == r"[]0-9][0-9]"
    found = json_schema.load('{"properties": {"a": {"pattern": "\\\\d"}}}', "f")
    assert found["properties"]["a"]["pattern"] == "[0-9]"


def test_objects_without_additional_properties():
    schema = {"properties": {"a": {"properties": {}}, "b": {"properties": {"c": {}},
              "additionalProperties": True}}}  # fmt: skip
    closed = json_schema.without_additional_properties(schema, "f")
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert "additionalProperties" not in schema


def test_a_format_says_nothing_of_what_is_no_text():
    schema = json_schema.load('{"format": "date"}', "json")
    assert schema.keys() == {"format", "pattern"}


def test_names_of_properties_that_may_be_any_are_not_said():
    for names in (True, {}, {"type": "string"}):
        inner = {"type": "object", "propertyNames": names, "additionalProperties": False}
        schema = {"type": "object", "properties": {"a": inner, "propertyNames": {}}}
        found = json_schema.load(json.dumps(schema), "json")["properties"]
        assert found == {
            "a": {"type": "object", "additionalProperties": False}, "propertyNames": {},
        }  # fmt: skip
    kept = {"type": "object", "propertyNames": {"maxLength": 3}}
    assert json_schema.load(json.dumps(kept), "json") == kept
