"""Calls as Gemma writes them: values as JSON, and what a grammar takes."""

import json

import pytest
from tests.text.tools import transcripts
from tests.text.tools.grammars import Calls

from octavo.errors import RequestError
from octavo.text.answer import CallArguments
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool
from octavo.text.tools.registry import find

GEMMA, FUNCTION = find("gemma4"), find("functiongemma")
MARKERS = Markers(transcripts.NoTokens(), ())


def tool(schema=None, name="f", **properties):
    return Tool(name, parameters={"type": "object", "properties": properties, **(schema or {})})


def parse(text, one, tool_format=GEMMA):
    return transcripts.parse(tool_format, MARKERS, text, {one.name: one})


@pytest.mark.parametrize(("literal", "value"), [
    ('<|"|>a "b" {c}, d\n<|"|>', 'a "b" {c}, d\n'), ('<|"|><|"|>', ""), ('"a\\n"', "a\n"),
    ("42", 42), ("-1.5e3", -1500.0), ("true", True), ("false", False), ("null", None),
    ("None", None), ("[]", []), ('[1,<|"|>a<|"|>,[true]]', [1, "a", [True]]), ("{}", {}),
    ('{a:{b:[1]},<|"|>c d<|"|>:null,"e":<|"|>f<|"|>}', {"a": {"b": [1]}, "c d": None, "e": "f"}),
    ('{ a : 1 , b c : 2 }', {"a": 1, "b c": 2}),
])  # fmt: skip
def test_literals_become_json(literal, value):
    found = parse(f"<|tool_call>call:f{{a:{literal},b: {literal} }}<tool_call|>", tool())
    ((name, arguments, ended),) = found.calls
    assert (name, json.loads(arguments), ended) == ("f", {"a": value, "b": value}, True)
    assert found.content == ""


def test_a_quoted_value_of_a_parameter_that_is_no_string_is_what_its_schema_says():
    text = (
        "<start_function_call>call:f{n:<escape>42<escape>,s:<escape>42<escape>}<end_function_call>"
    )
    one = tool(n={"type": "integer"}, s={"type": "string"})
    assert parse(text, one, FUNCTION).calls == [("f", '{"n": 42, "s": "42"}', True)]


@pytest.mark.parametrize("text", [
    "<|tool_call>call:g{}<tool_call|>", "<|tool_call>f{}<tool_call|>", "<|tool_call>call:f",
    "call:f{}", "<|tool_call> call",
])  # fmt: skip
def test_what_is_no_call_is_content(text):
    found = parse(text, tool())
    assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("literal", ["x", "1x", "<b>", "'a'", "NaN"])
def test_what_is_no_literal_ends_the_call_there(literal):
    found = parse(f"<|tool_call>call:f{{a:1,b:{literal}}}<tool_call|>", tool())
    assert found.calls == [("f", '{"a": 1, "b": ', False)]
    assert found.content == f"{literal}}}<tool_call|>"


def test_strings_are_streamed():
    parser = GEMMA.parser({"f": tool(a={"type": "string"})}, MARKERS)
    assert parser.feed('<|tool_call>call:f{a:<|"|>one\n')[1:] == [CallArguments(0, '{"a": "one\\n')]
    assert parser.feed('two<|"') == [CallArguments(0, "two")]
    assert parser.feed("x") == [CallArguments(0, '<|\\"x')]


STRICT = tool(
    {"required": ["to", "kind"], "additionalProperties": False},
    "book",
    to={"type": "string", "minLength": 2},
    kind={"enum": ["one way", None, 3]},
    seats={"type": "integer", "minimum": 1, "maximum": 9},
    pets={"type": ["boolean", "null"]},
    stops={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    pay={"type": "object", "properties": {"card": {"type": "boolean"}, "sum": {"type": "number"}},
         "required": ["sum"]},
    tags={"type": "object", "additionalProperties": {"type": "string"}},
    code={"type": "string", "pattern": "(^a|b$)"},
)  # fmt: skip


@pytest.mark.parametrize("tool_format", [GEMMA, FUNCTION])
@pytest.mark.parametrize("arguments", [
    {"to": "Rome", "kind": "one way"}, {"to": "\n\n", "kind": None, "seats": 9, "pets": True},
    {"to": "Rome", "kind": 3, "stops": ["a", "b"], "pay": {"card": False, "sum": -1}},
    {"to": "Rome", "kind": 3, "pay": {"sum": 1.5}, "tags": {"a": "b", "ü {}": ""}},
])  # fmt: skip
def test_the_grammar_takes_calls_of_the_tools(tool_format, arguments):
    text = tool_format.write([Call("book", arguments)])
    assert not Calls(tool_format, [STRICT]).take(text)
    assert json.loads(parse(text, STRICT, tool_format).calls[0][1]) == arguments


@pytest.mark.parametrize("arguments", [
    {"kind": None}, {"to": "x", "kind": None}, {"to": "xy", "kind": "both"},
    {"to": "xy", "kind": 3, "seats": 0}, {"to": "xy", "kind": 3, "pets": 1},
    {"to": "xy", "kind": 3, "stops": []}, {"to": "xy", "kind": 3, "stops": ["a", "b", "c"]},
    {"to": "xy", "kind": 3, "pay": {"card": True}}, {"to": "xy", "kind": 3, "tags": {"a": 1}},
    {"to": "xy", "kind": 3, "more": 1}, {"kind": 3, "to": "xy"},
])  # fmt: skip
@pytest.mark.parametrize("tool_format", [GEMMA, FUNCTION])
def test_the_grammar_refuses_others(tool_format, arguments):
    grammar = Calls(tool_format, [STRICT])
    assert grammar.take(tool_format.write([Call("book", arguments)]))
    assert grammar.take(tool_format.write([Call("look", {"to": "xy", "kind": 3})]))


def test_a_string_without_a_rule_of_its_own_is_held_to_as_json():
    """Its pattern has an anchor within a group, which raw text has no expression for."""
    grammar = Calls(GEMMA, [STRICT])
    text = '<|tool_call>call:book{to:<|"|>xy<|"|>,kind:3,code:%s}<tool_call|>'
    assert not grammar.take(text % '"ab"')
    assert grammar.take(text % '"ba"')
    assert parse(text % '"ab"', STRICT).calls[0][1].endswith('"code": "ab"}')


def test_keywords_of_the_whole_are_refused():
    with pytest.raises(RequestError, match=r"maxProperties.*'f'.*strict: false"):
        Calls(GEMMA, [Tool("f", parameters={"maxProperties": 1})])
    assert not Calls(GEMMA, [Tool("f", parameters={"maxProperties": 1}, strict=False)]).take(
        GEMMA.write([Call("f", {"a": 1, "b": "c"})])
    )
