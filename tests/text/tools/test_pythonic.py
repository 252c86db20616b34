"""Calls as Python writes them: strings, numbers and words as JSON, and what a grammar takes."""

import json

import pytest
from tests.text.tools import transcripts
from tests.text.tools.grammars import Calls

from octavo.errors import RequestError
from octavo.text.answer import CallArguments, CallBegin
from octavo.text.lark import LarkRules
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool
from octavo.text.tools.parameters import Parameters
from octavo.text.tools.registry import find

PYTHONIC = find("pythonic")
MARKERS = Markers(transcripts.NoTokens(), ())
SET = Tool("set", parameters={"properties": {}, "additionalProperties": True})


def parse(text, tool_format=PYTHONIC, tools=(SET,)):
    return transcripts.parse(tool_format, MARKERS, text, {one.name: one for one in tools})


@pytest.mark.parametrize(("literal", "value"), [
    ("'a'", "a"), ('"a"', "a"), ("''", ""), ('"""a "b" \'c\'\n"""', "a \"b\" 'c'\n"),
    ("'it\\'s'", "it's"), ("'it's'", "it's"), ('"say "hi" now"', 'say "hi" now'),
    (r"'\n\t\\\x41\u00e9\U0001F336\d\''", "\n\t\\Aé🌶\\d'"), (r"'\ud83c\udf36'", "🌶"),
    (r"'\xg'", r"\xg"), ("'a\nb'", "a\nb"), ("'a\\\nb'", "ab"), ("'[f(a=1)]'", "[f(a=1)]"),
    ("1", 1), ("-1", -1), ("1_000", 1000), ("0x1F", 31), ("+7", 7), ("1.5", 1.5), (".5", 0.5),
    ("007", 7), ("5.", 5.0), ("1e5", 1e5), ("-2.5E-3", -2.5e-3), ("9" * 400, int("9" * 400)),
    ("True", True), ("False", False), ("None", None), ("true", True), ("false", False),
    ("null", None), ("[]", []), ("[1, 'a', [None],]", [1, "a", [None]]), ("{}", {}),
    ("{'a': {'b': [1]}, \"c\": True,}", {"a": {"b": [1]}, "c": True}), ("{1: 2}", None),
])  # fmt: skip
def test_literals_become_json(literal, value):
    found = parse(f"[set( a = {literal} , b={literal})]")
    if literal == "{1: 2}":
        value = {"1": 2}
    assert [(name, json.loads(text), ended) for name, text, ended in found.calls] == [
        ("set", {"a": value, "b": value}, True)
    ]
    assert found.content == ""


@pytest.mark.parametrize(
    "literal", ["nan", "inf", "Infinity", "x", "1x", "1j", "f(2)", "a.b", "*", "-"]
)
def test_what_is_no_literal_ends_the_call_there(literal):
    found = parse(f"[set(a=1, b={literal})] and more")
    assert found.calls == [("set", '{"a": 1, "b": ', False)]
    assert found.content == f"{literal})] and more"


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "glm45", "gemma4"])
def test_a_schema_may_be_true(name):
    tool = Tool("set", parameters={"properties": {"a": True, "b": {}}, "required": ["a"]})
    assert Parameters(tool).enforced().listed == {"a": {}, "b": {}}
    rules = LarkRules(MARKERS)
    assert find(name).section(rules, [tool], 1)
    never = Tool("set", parameters={"properties": {"a": False}})
    with pytest.raises(RequestError, match="'false' of 'a' cannot be enforced"):
        find(name).section(LarkRules(MARKERS), [never], 1)


def test_deep_lists_are_no_literal():
    found = parse(f"[set(a={'[' * 5000})]")
    assert found.calls[0][1].startswith('{"a": [[[')
    assert not found.calls[0][2]


@pytest.mark.parametrize("text", [
    "[1] as in the first", "[set]", "[set (a=1)]", "[other(a=1)]", "see [set(a=1)]", "[", "[set",
    "set(a=1)", "[]", "[ ]", "[set(", '[set("x")]', "[set(a) for a in b]",
])  # fmt: skip
def test_a_list_that_begins_with_no_tool_is_content(text):
    found = parse(text)
    assert (found.content, found.calls) == (text, [])


def test_what_follows_a_call_that_is_no_tool_is_content():
    found = parse("[set(a=1), other(b=2)] done")
    assert found.calls == [("set", '{"a": 1}', True)]
    assert found.content == ", other(b=2)] done"


def test_strings_are_streamed():
    parser = PYTHONIC.parser({"set": SET}, MARKERS)
    events = parser.feed('[set(a="line one\\nli')
    assert isinstance(events[0], CallBegin)
    assert events[1:] == [CallArguments(0, '{"a": "line one\\nli')]
    assert parser.feed("ne") == [CallArguments(0, "ne")]


def test_a_list_within_markers_or_without():
    llama4 = find("llama4_pythonic")
    for text in ("[set(a=1)]", "<|python_start|>[set(a=1)]<|python_end|>"):
        assert parse(text, llama4).calls == [("set", '{"a": 1}', True)]
    found = parse("Then: <|python_start|>[set(a=1)]<|python_end|> ok", llama4)
    assert (found.content, len(found.calls)) == ("Then:  ok", 1)


STRICT = [
    Tool("book", parameters={
        "type": "object", "required": ["to", "kind"], "additionalProperties": False,
        "properties": {
            "to": {"type": "string", "minLength": 2},
            "kind": {"enum": ["one way", "return", None]},
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "pets": {"type": ["boolean", "null"]},
            "stops": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
            "pay": {"type": "object", "properties": {"card": {"type": "boolean"},
                    "sum": {"type": "number"}}, "required": ["sum"]},
            "when": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/day"}]},
        },
        "$defs": {"day": {"const": "today"}},
    }),
    Tool("stop", parameters={"properties": {}}),
]  # fmt: skip


@pytest.mark.parametrize("text", [
    '[book(to="Rome", kind="return")]', "[book(to='Rome', kind='return')]", "[stop()]",
    '[book(to="Rome", kind=None, seats=9, pets=True, stops=["a", "b"], pay={"sum": 1.5})]',
    '[book(to="Rome", kind="one way", pets=None, pay={"card": False, "sum": -1}, when="today")]',
    '[book(to="Rome", kind=None, when=7), stop()]',
])  # fmt: skip
def test_the_grammar_takes_calls_of_the_tools(text):
    refused = Calls(PYTHONIC, STRICT, 2).take(text)
    assert bool(refused) == ("'" in text)  # minLength: JSON's strings alone


@pytest.mark.parametrize(("text", "refused"), [
    ("[fly()]", "fly"), ('[book(kind="return")]', "kind"), ('[book(to="R"', '"'),
    ('[book(to="Rome")]', ")"), ('[book(to="Rome", kind="both"', "b"),
    ('[book(to="Rome", kind=None, seats=0', "0"), ('[book(to="Rome", kind=None, seats=10', "0"),
    ('[book(to="Rome", kind=None, pets=1', "1"), ('[book(to="Rome", kind=None, stops=[]', "]"),
    ('[book(to="Rome", kind=None, stops=["a", "b", "c"]', ","), ("[stop(a=1)]", "a"),
    ('[book(to="Rome", kind=None, pay={"card": True}', "}"), ("[stop(), stop(), stop()]", ", stop"),
    ('[book(to="Rome", kind=None, when="now"', "now"), ("[stop(]", "]"), ("stop()", "stop"),
])  # fmt: skip
def test_the_grammar_refuses_others(text, refused):
    assert Calls(PYTHONIC, STRICT, 2).take(text).startswith(refused)


def test_a_text_without_calls_may_begin_as_a_list_does():
    both = Calls(PYTHONIC, STRICT, 2, text=True)
    for text in ("", "[1] see", "[stop it]", "Call [stop()]", "[book", "[stop()]", "\n[stop()]"):
        assert not both.take(text), text
    assert both.take("[stop(now)]") == "now)]"


def test_without_strict_any_arguments():
    loose = Calls(PYTHONIC, [Tool("book", parameters=STRICT[0].parameters, strict=False)])
    assert not loose.take("[book(a=1, b={\"c\": [True]}, d=None, e='x')]")
    assert not loose.take("[book()]")


@pytest.mark.parametrize(("schema", "word"), [
    ({"properties": {"a b": {}}}, "a b"), ({"minProperties": 1}, "minProperties"),
    ({"anyOf": [{"required": ["a"]}]}, "anyOf"), ({"patternProperties": {"a": {}}}, "pattern"),
    ({"properties": {"a": {"contains": {"$ref": "#/properties/b"}}, "b": {}}}, "ref"),
])  # fmt: skip
def test_what_the_format_cannot_express_is_refused(schema, word):
    with pytest.raises(RequestError, match=f"{word}.*'f'"):
        Calls(PYTHONIC, [Tool("f", parameters=schema)])


NODE = {"type": "object", "properties": {"ok": {"type": "boolean"}, "next": {"$ref": "#/$defs/n"}}}


def test_a_schema_may_lead_back_to_itself():
    tool = Tool("f", parameters={"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": NODE}})
    assert not Calls(PYTHONIC, [tool]).take('[f(a={"ok": True, "next": {"next": {"ok": False}}})]')
    assert Calls(PYTHONIC, [tool]).take('[f(a={"next": {"next": True}})]') == "True}})]"


def test_a_schema_of_many_schemas_is_read_in_bounded_time():
    many = {"anyOf": [{"type": "boolean"}, *({"items": {"$ref": "#/$defs/n"}} for _ in range(40))]}
    tool = Tool("f", parameters={"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": many}})
    assert not Calls(PYTHONIC, [tool]).take("[f(a=[[True]])]")
    assert parse("[f(a=[[True]])]", tools=[tool]).calls == [("f", '{"a": [[true]]}', True)]


def test_values_are_those_of_the_schemas_kind():
    tool = Tool("f", parameters={"properties": {"a": {"type": "string", "enum": ["x", 1, None]}}})
    grammar = Calls(PYTHONIC, [tool])
    assert not grammar.take('[f(a="x")]')
    assert grammar.take("[f(a=1)]")
    assert grammar.take("[f(a=None)]")


@pytest.mark.parametrize("parameters", [
    {"properties": {"a": {"type": 5}}}, {"properties": {"a": 3, "b": True}}, {"required": 1},
    {"properties": {"a": {"anyOf": 1, "allOf": {}, "enum": 2}}}, {"properties": []}, {"$ref": "#"},
    {"properties": {"a": {"$ref": "#/properties/a"}}}, {"additionalProperties": 1},
    {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 30}}},
])  # fmt: skip
@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "gemma4"])
def test_without_strict_no_schema_is_too_odd_to_read_calls(name, parameters):
    tool_format, tool = find(name), Tool("f", parameters=parameters, strict=False)
    text = tool_format.write([Call("f", {"a": "x"})])
    assert parse(text, tool_format, [tool]).calls == [("f", '{"a": "x"}', True)]
    assert not Calls(tool_format, [tool]).take(text)


def test_write_is_python():
    calls = [Call("a", {"x": [True, None, {"k": 1.5}], "y": 'q"'}), Call("b", {})]
    assert PYTHONIC.write(calls) == '[a(x=[True, None, {"k": 1.5}], y="q\\""), b()]'
