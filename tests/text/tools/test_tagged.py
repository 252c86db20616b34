"""Calls whose parameters are raw text between tags: values as JSON, and what a grammar takes."""

import json
import math

import pytest
from tests.text.tools import transcripts
from tests.text.tools.grammars import Calls

from octavo.errors import RequestError
from octavo.text.answer import CallArguments, CallBegin, Content
from octavo.text.markers import Markers
from octavo.text.tools.base import Call, Tool
from octavo.text.tools.registry import find

FORMATS = ["qwen3_coder", "glm45", "glm47", "minimax_m2"]
QWEN, GLM, MINIMAX = find("qwen3_coder"), find("glm45"), find("minimax_m2")
MARKERS = Markers(transcripts.NoTokens(), ())


def tool(schema=None, name="f", **properties):
    return Tool(name, parameters={"type": "object", "properties": properties, **(schema or {})})


def parse(tool_format, text, *tools):
    return transcripts.parse(tool_format, MARKERS, text, {one.name: one for one in tools})


def value(raw, schema, root=None):
    text = QWEN.write([Call("f", {"a": raw})])
    ((_, arguments, ended),) = parse(QWEN, text, tool(root, a=schema)).calls
    assert ended
    return json.loads(arguments)["a"]


@pytest.mark.parametrize(("raw", "kinds", "expected"), [
    ("42", "string", "42"), ("42", "integer", 42), ("42", ["string", "integer"], 42),
    ("null", "string", "null"), ("null", ["string", "null"], None), ("null", "integer", "null"),
    ("nul", ["string", "null"], "nul"), (" null ", ["string", "null"], None),
    ("None", ["integer", "null"], None), ("None", ["string", "null"], "None"),
    ("true", "boolean", True), ("False", "boolean", False), ("true", "string", "true"),
    ("yes", "boolean", "yes"), ("4.0", "integer", 4), ("4.5", "integer", "4.5"),
    ("4.5", "number", 4.5), ("-1e3", "number", -1000.0), ("+3", "integer", 3),
    ("1e999", ["number", "string"], "1e999"), ("NaN", "number", "NaN"),
    ("Infinity", "number", "Infinity"),
    ('{"a": [1]}', "object", {"a": [1]}), ("[1, 2]", "array", [1, 2]), ("{", "object", "{"),
    ('{"a": NaN}', "object", '{"a": NaN}'), ("[1e999]", "array", [math.inf]),
    ('["</parameter>"]', "array", ["</parameter>"]), ('{"a": "', ["object", "string"], '{"a": "'),
    ('{"a": "x\ny"}', "object", {"a": "x\ny"}), ("[1]", "object", "[1]"),
    ("9" * 5000, "integer", "9" * 5000), (".5", "number", 0.5),
    ("[" * 100_000, "array", "[" * 100_000),
    ("\n7\n", "integer", 7), (" x ", "string", " x "), ("\nx\n", "string", "\nx\n"),
    ("", "string", ""), ("", "integer", ""), ("\n", "string", "\n"),
])  # fmt: skip
def test_a_raw_value_is_what_its_schema_says(raw, kinds, expected):
    assert value(raw, {"type": kinds}) == expected
    assert value(raw, {"$ref": "#/$defs/x"}, {"$defs": {"x": {"type": kinds}}}) == expected


@pytest.mark.parametrize(("raw", "schema", "expected"), [
    ("1", {"enum": ["1", 2]}, "1"), ("2", {"enum": ["1", 2]}, 2), ("7", {}, 7), ("x", {}, "x"),
    ("[1]", {}, [1]), ("1", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "1"),
    ("1", {"anyOf": [{"type": "number"}, {"type": "null"}]}, 1), ("1", {"const": "1"}, "1"),
    ("1", {"allOf": [{"type": "string"}, {"minLength": 1}]}, "1"), ("1", {"$ref": "#"}, "1"),
])  # fmt: skip
def test_kinds_follow_from_all_that_a_schema_says(raw, schema, expected):
    found = value(raw, schema)
    assert (found, type(found)) == (expected, type(expected))


def test_half_a_surrogate_pair_stays_an_escape():
    found = parse(QWEN, QWEN.write([Call("f", {"a": '["\\ud800\n"]'})]), tool(a={"type": "array"}))
    assert "\\ud800" in found.calls[0][1]
    found.calls[0][1].encode()


def test_a_string_is_streamed_and_its_last_line_break_held_back():
    parser = QWEN.parser({"f": tool(text={"type": "string"})}, MARKERS)
    events = parser.feed("<tool_call>\n<function=f>\n<parameter=text>\nfirst\n")
    assert isinstance(events[0], CallBegin)
    assert events[1:] == [CallArguments(0, '{"text": "first')]
    assert parser.feed("\n") == [CallArguments(0, "\\n")]
    assert parser.feed('"</param') == [CallArguments(0, '\\n\\"')]
    assert parser.feed("etr>\n") == [CallArguments(0, "</parametr>")]
    assert parser.feed("</parameter>") == [CallArguments(0, '"')]


def test_a_string_that_may_be_null_is_streamed_once_it_is_not():
    parser = QWEN.parser({"f": tool(text={"type": ["null", "string"]})}, MARKERS)
    parser.feed("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert parser.feed("nul") == []
    assert parser.feed("ls") == [CallArguments(0, '"nulls')]


@pytest.mark.parametrize("text", [
    "<tool_call>\n<function=g>\n</function>\n</tool_call>", "<function=g>", "<function=",
    "<tool_call>f\n</tool_call>", "a <tool_call> b", "<tool_call><function=f", "<function=f",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "<tool_call>\n<function= f>",
])  # fmt: skip
def test_what_is_no_call_is_content(text):
    found = parse(QWEN, text, tool())
    assert (found.content, found.calls) == (text, [])


def test_without_the_opening_or_a_closing_tag_it_is_still_a_call():
    for text in (
        "<function=f>\n</function>\n</tool_call>", "<function=f>\n</function>",
        "<tool_call><function=f></tool_call>",
    ):  # fmt: skip
        found = parse(QWEN, text, tool())
        assert (found.content, found.calls) == ("", [("f", "{}", True)]), text


def test_a_call_that_breaks_off_stays_and_the_rest_is_content():
    found = parse(QWEN, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\nwhat?", tool())
    assert found.calls == [("f", '{"a": 1', False)]
    assert found.content.strip() == "what?"


def test_glm_takes_a_name_only_before_its_parameters_or_the_end():
    for text in ("<tool_call>f\n</tool_call>", "<tool_call>f</tool_call>"):
        assert parse(GLM, text, tool()).calls == [("f", "{}", True)]
    for text in ("<tool_call>f or g", "<tool_call>f\n", "<tool_call>f\nx</tool_call>"):
        found = parse(GLM, text, tool())
        assert (found.content, found.calls) == (text, [])


def test_minimax_has_several_calls_in_a_section():
    text = MINIMAX.write([Call("f", {"a": "x"}), Call("f", {}), Call("f", {"a": 'y"'})])
    assert text.count("<minimax:tool_call>") == 1
    found = parse(MINIMAX, f"Now\n{text} Done", tool(a={"type": "string"}))
    assert [arguments for _, arguments, _ in found.calls] == ['{"a": "x"}', "{}", '{"a": "y\\""}']
    assert found.content == "Now Done"  # the line break is the format's


def test_a_closing_tag_that_is_an_added_token_cannot_be_spelled_in_a_value():
    markers = Markers(transcripts.NoTokens(GLM.markers), GLM.markers)
    parser = GLM.parser({"f": tool(a={"type": "string"})}, markers)
    text = markers.in_text("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x")
    closing = markers.in_text("</arg_value>\n</tool_call>")
    found = transcripts.answer_of([*parser.feed(text + "</arg_value>" + closing), *parser.finish()])
    assert found.calls == [("f", '{"a": "x</arg_value>"}', True)]


def test_content_is_spelled():
    markers = Markers(transcripts.NoTokens(QWEN.markers), QWEN.markers)
    parser = QWEN.parser({}, markers)
    text = markers.in_text("<tool_call> and </tool_call>")
    assert [*parser.feed(text), *parser.finish()] == [Content("<tool_call> and </tool_call>")]


BOOK = tool(
    {"required": ["to", "kind"], "additionalProperties": False,
     "$defs": {"day": {"enum": ["today", 7]}}},
    "book",
    to={"type": "string"},
    kind={"enum": ["one way", "return", None]},
    seats={"type": "integer", "minimum": 1, "maximum": 9},
    code={"type": "string", "pattern": "^[A-Z]{3}/\\d+$"},
    note={"type": "string", "minLength": 2, "maxLength": 3},
    size={"anyOf": [{"type": "integer", "minimum": 100}, {"type": "string"}]},
    stops={"type": "array", "items": {"type": "string"}, "maxItems": 1},
    when={"$ref": "#/$defs/day"},
    mail={"type": ["string", "null"], "format": "email"},
)  # fmt: skip
NOW = tool(None, "now")


@pytest.mark.parametrize("arguments", [
    {"to": "São\n\n<p>\n", "kind": "return"}, {"to": "", "kind": None},
    {"to": "x", "kind": "one way", "seats": 9, "code": "ABC/12", "note": "né!"},
    {"to": "x", "kind": None, "size": 100, "stops": ["a"], "when": 7, "mail": None},
    {"to": "</parameter", "kind": None, "size": "small", "when": "today", "mail": "a@b.org"},
])  # fmt: skip
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("added", [False, True])
def test_the_grammar_takes_calls_of_the_tools(name, added, arguments):
    tool_format = find(name)
    grammar = Calls(tool_format, [BOOK, NOW], 2 if tool_format.several else 1, added)
    text = tool_format.write([Call("book", arguments)])
    assert not grammar.take(text)
    assert not grammar.take(tool_format.write([Call("now", {})]))
    found = parse(tool_format, text, BOOK)
    assert json.loads(found.calls[0][1]) == arguments


@pytest.mark.parametrize("arguments", [
    {"kind": "return"}, {"to": "x"}, {"to": "x", "kind": "both"}, {"kind": None, "to": "x"},
    {"to": "x", "kind": None, "seats": 0}, {"to": "x", "kind": None, "seats": "two"},
    {"to": "x", "kind": None, "code": "ABC/"}, {"to": "x", "kind": None, "note": "n"},
    {"to": "x", "kind": None, "note": "four"}, {"to": "x", "kind": None, "size": "99"},
    {"to": "x", "kind": None, "stops": ["a", "b"]}, {"to": "x", "kind": None, "when": "now"},
    {"to": "x", "kind": None, "mail": "nobody"}, {"to": "x", "kind": None, "other": 1},
])  # fmt: skip
@pytest.mark.parametrize("name", FORMATS)
def test_the_grammar_refuses_others(name, arguments):
    tool_format = find(name)
    grammar = Calls(tool_format, [BOOK, NOW])
    assert grammar.take(tool_format.write([Call("book", arguments)]))
    assert grammar.take(tool_format.write([Call("books", arguments)]))
    assert grammar.take(tool_format.write([Call("now", {"a": 1})]))


def test_without_strict_any_arguments():
    loose = Calls(QWEN, [Tool("book", parameters=BOOK.parameters, strict=False)])
    assert not loose.take(QWEN.write([Call("book", {"a": 1, "b": "x\ny", "c": {}})]))
    assert not loose.take(QWEN.write([Call("book", {})]))


@pytest.mark.parametrize(("schema", "word"), [
    ({"properties": {"a\n": {}}}, "a"), ({"minProperties": 1}, "minProperties"),
    ({"oneOf": [{"required": ["a"]}]}, "oneOf"), ({"patternProperties": {"a": {}}}, "pattern"),
    ({"properties": {"a": {"type": "string", "format": "iri"}}}, "format"),
    ({"properties": {"a": {"type": "string", "pattern": "a(^b|c)"}}}, "pattern"),
    ({"properties": {"a": {"enum": ["x</parameter>"]}}}, "enum"),
    ({"properties": {"a": {"type": "string", "anyOf": [{"minLength": 1}], "format": "uri"}}},
     "anyOf"),
    ({"properties": {"a": {"minLength": 1, "allOf": [{"minLength": 2}]}}}, "allOf"),
    ({"required": ["b"], "properties": {"a": {}}, "additionalProperties": False}, "required"),
])  # fmt: skip
def test_what_the_format_cannot_express_is_refused(schema, word):
    with pytest.raises(RequestError, match=f"{word}.*'f'"):
        Calls(QWEN, [Tool("f", parameters=schema)])


@pytest.mark.parametrize("form", [
    ("date", "2026-11-30"), ("time", "23:59:00Z"), ("date-time", "2026-02-28T01:02:03.5+01:00"),
    ("email", "a.b+c@example.org"), ("uuid", "12345678-1234-1234-1234-1234567890ab"),
    ("ipv4", "192.168.0.255"), ("ipv6", "1:2:3:4:5:6:7:8"), ("hostname", "a.example"),
    ("uri", "https://example.org/a?b=c#d"[:-2]), ("duration", "PT1H2M3S"),
])  # fmt: skip
def test_formats_of_raw_strings(form):
    name, text = form
    grammar = Calls(QWEN, [tool(a={"type": "string", "format": name})])
    assert not grammar.take(QWEN.write([Call("f", {"a": text})]))
    assert grammar.take(QWEN.write([Call("f", {"a": f"{text} "})]))


@pytest.mark.parametrize(("pattern", "good", "bad"), [
    ("b", ["abc", "b"], ["ac", ""]), ("^b", ["bc"], ["ab"]), ("b$", ["ab"], ["bc"]),
    ("^a|c$", ["ab", "bc"], ["bca"]), ("^(a|b)+$", ["abab"], ["abc"]), ("[|)]", ["x|"], ["x"]),
    ("a/b", ["xa/b"], ["ab"]), (r"\$\/", ["a$/"], ["a/"]), (r"^[^\]]$", ["a"], ["]"]),
    ("^$", [""], ["a"]), ("^", ["", "x"], []),
])  # fmt: skip
def test_patterns_of_raw_strings_are_searched_for(pattern, good, bad):
    grammar = Calls(QWEN, [tool(a={"type": "string", "pattern": pattern})])
    for text in good:
        assert not grammar.take(QWEN.write([Call("f", {"a": text})])), text
    for text in bad:
        assert grammar.take(QWEN.write([Call("f", {"a": text})])), text


def test_a_number_beyond_floats_is_none_where_it_may_be_a_text():
    text = QWEN.write([Call("f", {"a": "1e999"})])
    assert parse(QWEN, text, tool(a={"type": "number"})).calls[0][1] == '{"a": 1e999}'
