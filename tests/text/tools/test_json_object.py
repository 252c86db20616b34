"""Calls as JSON objects: keys in any order, lists, arguments as they were written."""

import pytest
from tests.text.tools import transcripts
from tests.text.tools.transcripts import Answer, both_markers, read

from octavo.text.tools.granite import Granite
from octavo.text.tools.hermes import Hermes
from octavo.text.tools.llama3 import Llama3Json
from octavo.text.tools.phi4_mini import Phi4MiniJson

NOW = ("now", "{}", True)
CITY = ("get_weather", '{"city": "Rome"}', True)


@pytest.mark.parametrize(("inside", "calls"), [
    ('{"name": "now", "arguments": {}}', [NOW]),
    ('{"name": "now", "parameters": {}}', [NOW]),
    ('{"name": "now"}', [NOW]),
    ('{"name": "now", "arguments": null}', [NOW]),
    ('{ "name" :\\n"now"\\n,\\n"arguments" : { } }', [("now", "{ }", True)]),
    ('{"arguments": {"city": "Rome"}, "name": "get_weather"}', [CITY]),
    ('{"arguments": {"name": "now"}, "name": "now"}', [("now", '{"name": "now"}', True)]),
    ('{"name": "n\\\\u006fw", "arguments": {}}', [NOW]),
    ('[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]',
     [NOW, CITY]),
    ('{"name": "now", "arguments": {}}\\n{"name": "now", "arguments": {}}', [NOW, NOW]),
])  # fmt: skip
def test_objects_that_are_calls(inside, calls):
    inside = inside.replace("\\n", "\n").replace("\\\\", "\\")
    assert read(Hermes(), f"<tool_call>\n{inside}\n</tool_call>") == Answer("", calls)


def test_arguments_are_passed_on_as_they_were_written():
    """Spaces, the order of keys, numbers and escapes too."""
    written = '{"z":1.0,  "a": [1e2,-0], "k\\u0065y": "\\u00e9\\/ é", "z": 2}'
    text = f'<tool_call>\n{{"name": "now", "arguments": {written}}}\n</tool_call>'
    assert read(Hermes(), text).calls == [("now", written, True)]


def test_line_breaks_in_strings_become_escapes():
    text = '<tool_call>{"name": "now", "arguments": {"code": "a\n\tb"}}</tool_call>'
    assert read(Hermes(), text).calls == [("now", '{"code": "a\\n\\tb"}', True)]


def test_markers_in_strings_are_text():
    text = '<tool_call>{"name": "now", "arguments": {"a": "</tool_call> <tool_call>"}}</tool_call>'
    assert read(Hermes(), text) == Answer("", [("now", '{"a": "</tool_call> <tool_call>"}', True)])


def test_other_objects_of_a_list_are_content():
    text = '<|tool_call|>[{"name": "now"}, {"name": "other"}, {"name": "now"}]'
    assert read(Granite(), text) == Answer(', {"name": "other"}', [NOW, NOW])
    text = '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "other"}]'
    assert read(Granite(), text) == Answer(', {"name": "other"}]', [NOW])
    text = '<|tool_call|>[{"name": "other"}]'
    assert read(Granite(), text) == Answer(text, [])


def test_granite_has_two_markers():
    for begin in ("<|tool_call|>", "<tool_call>"):
        assert read(Granite(), f'Hi{begin}[{{"name": "now"}}]') == Answer("Hi", [NOW])


def test_bare_objects_of_llama():
    call = '{"name": "now", "parameters": {}}'
    for text in (call, f"<|python_tag|>{call}", f"\n{call}\n", call.replace("{", "{ ", 1)):
        assert read(Llama3Json(), text) == Answer("", [NOW])
    assert read(Llama3Json(), f"{call}; {call};{call}") == Answer("", [NOW, NOW, NOW])
    assert read(Llama3Json(), f"Sure: {call} Done.") == Answer("Sure:  Done.", [NOW])
    typed = '{"type": "function", "name": "now", "parameters": {}}'
    assert read(Llama3Json(), typed) == Answer("", [NOW])


@pytest.mark.parametrize("text", [
    '{"city": "Rome", "days": 3}', '{"name": "Rome", "parameters": {}}', "{}", "a {b} c", "{",
    '{"name": "now", "year": 1}', '{"name": "now",', '[{"a": {"name": "now"}}]',
    "<|python_tag|>print(1)",
    '{"calls": [{"name": "now", "parameters": {}}]}', '{"a": "{\\"name\\": \\"now\\"}"}',
])  # fmt: skip
def test_other_json_in_llama_s_answers_is_content(text):
    assert read(Llama3Json(), text) == Answer(text, [])


def test_other_json_is_streamed_as_it_comes():
    markers, _ = both_markers(Llama3Json())
    parser = Llama3Json().parser(transcripts.TOOLS, markers)
    parser.feed('{"cities": [')
    assert [event.text for event in parser.feed('"Rome", "Par')] == ['"Rome", "Par']


def test_phi_writes_a_list_behind_a_word():
    call = '[{"name": "now", "arguments": {}}]'
    assert read(Phi4MiniJson(), f"functools{call}") == Answer("", [NOW])
    assert read(Phi4MiniJson(), f"<|tool_call|>{call}<|/tool_call|>") == Answer("", [NOW])
    for text in ("Use functools", "functools.partial", "functools[0]"):
        assert read(Phi4MiniJson(), text) == Answer(text, [])
