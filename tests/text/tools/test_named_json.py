"""Calls as a name and the JSON of its arguments."""

import re

import pytest
from tests.text.tools.transcripts import TOOLS, Answer, both_markers, events_of, read

from octavo.text.answer import CallBegin
from octavo.text.tools.deepseek import DeepSeekV3, DeepSeekV31
from octavo.text.tools.kimi_k2 import KimiK2
from octavo.text.tools.mistral import Mistral, MistralWithIds

NOW = ("now", "{}", True)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def ids(tool_format, text):
    """Of the calls in a text."""
    markers, _ = both_markers(tool_format)
    parser = tool_format.parser(TOOLS, markers)
    return [one.id for one in parser.feed(text) if isinstance(one, CallBegin)]


def test_white_space_of_the_layout_may_be_missing_or_more():
    fence = f"{BEGIN}{CALL}function{SEPARATOR}now```json{{}}```{CALL_END}{END}"
    assert read(DeepSeekV3(), fence) == Answer("", [NOW])
    assert read(DeepSeekV3(), fence.replace("{}", "\n\n {}\n")) == Answer("", [NOW])


@pytest.mark.parametrize("text", [
    f"{BEGIN}{CALL}now{SEPARATOR}{CALL_END}{END}", f"{BEGIN}{CALL}now{SEPARATOR}{END}",
    f"{BEGIN}{CALL}now{SEPARATOR}{{}}{END}",
    f"\n{BEGIN}\n{CALL}now{SEPARATOR} {{}}{CALL_END}\n{END}",
])  # fmt: skip
def test_calls_without_arguments_or_closing_words(text):
    assert read(DeepSeekV31(), text) == Answer("", [NOW])
    two = text.replace(END, f"{CALL}now{SEPARATOR}{{}}{CALL_END}{END}")
    assert read(DeepSeekV31(), two) == Answer("", [NOW, NOW])


@pytest.mark.parametrize("call", [
    f"{CALL}other{SEPARATOR}{{}}{CALL_END}", f"{CALL}other{SEPARATOR}{{\"a\": 1}}{CALL_END}",
    f"{CALL}{SEPARATOR}{{}}{CALL_END}", f"{CALL}{'x' * 65}{SEPARATOR}{{}}{CALL_END}", "", "now{}",
])  # fmt: skip
def test_what_is_no_call_of_a_tool_is_content_as_written(call):
    text = f"Hi {BEGIN}{call}{END} Bye"
    assert read(DeepSeekV31(), text) == Answer(text, [])


def test_a_call_behind_one_of_no_tool():
    other, now = (f"{CALL}{name}{SEPARATOR}{{}}{CALL_END}" for name in ("other", "now"))
    assert read(DeepSeekV31(), f"{BEGIN}{other}{now}{END}") == Answer(f"{BEGIN}{other}", [NOW])
    assert read(DeepSeekV31(), f"{BEGIN}{now}{other}{END}") == Answer(f"{other}{END}", [NOW])


def test_mistral_s_layouts_are_all_read():
    for text in ("[TOOL_CALLS]now[ARGS]{}", "[TOOL_CALLS]now{}",
                 "[TOOL_CALLS]now[CALL_ID]a[ARGS]{}",
                 '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', '[TOOL_CALLS][{"name": "now"}]',
                 '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdefgh9"}]',
                 '[TOOL_CALLS]{"name": "now", "arguments": {}}'):  # fmt: skip
        assert read(Mistral(), text) == Answer("", [NOW])
        assert read(Mistral(), f"Hi{text}{text}") == Answer("Hi", [NOW, NOW])
    assert read(Mistral(), "[TOOL_CALLS]now I see") == Answer("[TOOL_CALLS]now I see", [])


def test_ids_of_mistral_have_nine_letters_and_digits():
    text = "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"
    first, second = ids(Mistral(), text)
    assert first != second
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in (first, second))
    given = MistralWithIds()
    assert ids(given, "[TOOL_CALLS]now[CALL_ID]abcdefgh9[ARGS]{}") == ["abcdefgh9"]
    (made,) = ids(given, "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", made)


def test_ids_of_kimi_have_the_name_and_the_number_that_it_gives():
    def call(name):
        return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"

    text = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    both = text.format(call("functions.now:3") + call("functions.send-mail.v2:4"))
    assert ids(KimiK2(), both) == ["functions.now:3", "functions.send-mail.v2:4"]
    same = text.format(call("functions.now:0") * 2)
    assert ids(KimiK2(), same) == ["functions.now:0", "functions.now:1"]
    assert ids(KimiK2(), text.format(call("now:0"))) == ["functions.now:0"]
    assert read(KimiK2(), same) == Answer("", [NOW, NOW])


def test_a_name_that_is_cut_off_is_content():
    markers, _ = both_markers(DeepSeekV31())
    parser = DeepSeekV31().parser(TOOLS, markers)
    (event,) = events_of(parser, [f"{BEGIN}{CALL}no"])
    assert event.text == f"{BEGIN}{CALL}no"
