"""What is a call, what is content and what is neither, where all formats decide it alike."""

import pytest
from tests.text.tools import transcripts
from tests.text.tools.transcripts import TOOLS, Answer, both_markers, parse

from octavo.text.answer import CallArguments, CallBegin, Content
from octavo.text.tools.hermes import Hermes

HERMES = Hermes()
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
NOW = ("now", "{}", True)


def read(text):
    """The answer, the same for markers of both kinds and in every chunking."""
    found = []
    for markers in both_markers(HERMES):
        cuts = (transcripts.whole, transcripts.characters, lambda t: transcripts.at_random(t, 0))
        found += [parse(HERMES, markers, text, cut=cut) for cut in cuts]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(("text", "content", "calls"), [
    # White space that is only between calls is none of the answer's content.
    (CALL, "", [NOW]),
    (f"\n\n{CALL}\n", "", [NOW]),
    (f"{CALL}\n{CALL}", "", [NOW, NOW]),
    (f"{CALL}{CALL} \n\n{CALL}", "", [NOW, NOW, NOW]),
    # Content loses the one line break that the format puts before a call, and nothing else.
    (f"Hi\n{CALL}", "Hi", [NOW]),
    (f"Hi{CALL}", "Hi", [NOW]),
    (f"Hi \n\n{CALL}", "Hi \n", [NOW]),
    (f" Hi\n{CALL}\n\nBye\n", " Hi\n\nBye\n", [NOW]),
    (f"{CALL}\nand\n{CALL}", "\nand", [NOW, NOW]),
    # Without a call, all of it is content.
    ("", "", []),
    ("\n Hi \n", "\n Hi \n", []),
    (" \n", " \n", []),
])  # fmt: skip
def test_white_space_around_calls(text, content, calls):
    assert read(text) == Answer(content, calls)


@pytest.mark.parametrize("text", [
    '<tool_call>\n{"name": "other", "arguments": {"a": "</tool_call>"}}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"arguments": {"name": "now"}}\n</tool_call>',
    '<tool_call>\n{"arguments": [], "name": "now"}\n</tool_call>',
    '<tool_call>\n{"id": 1, "name": "now", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"nested": {"name": "now", "arguments": {}}}\n</tool_call>',
    "<tool_call>\n{now}\n</tool_call>", "<tool_call>now()</tool_call>", "<tool_call></tool_call>",
    "<tool_call>[]</tool_call>", "<tool_call>{}</tool_call>", "</tool_call>", "Use <tool_call> so",
])  # fmt: skip
def test_what_is_no_call_of_a_tool_is_content_as_written(text):
    assert read(text) == Answer(text, [])
    assert read(f"Hi\n{text}\n\nBye\n") == Answer(f"Hi\n{text}\n\nBye\n", [])
    assert read(f"{text}\n{CALL}") == Answer(text, [NOW])


@pytest.mark.parametrize(("text", "content", "calls"), [
    # Undecided text is content, and so is the beginning of a marker.
    ("Hello <to", "Hello <to", []),
    ("Hello <tool", "Hello <tool", []),
    ("Hi\n", "Hi\n", []),
    ('<tool_call>\n{"na', '<tool_call>\n{"na', []),
    ('<tool_call>\n{"name": "no', '<tool_call>\n{"name": "no', []),
    ('<tool_call>{"arguments": {}, "name": "no', '<tool_call>{"arguments": {}, "name": "no', []),
    (f'{CALL}\n<tool_call>{{"na', '\n<tool_call>{"na', [NOW]),
    # But a section's marker with nothing in it is no content.
    ("Hi\n<tool_call>", "Hi\n", []),
    ("<tool_call>\n", "", []),
    # What has begun as a call stays one.
    ('<tool_call>\n{"name": "now"', "", [("now", "", False)]),
    ('<tool_call>\n{"name": "now", "arg', "", [("now", "", False)]),
    ('<tool_call>\n{"name": "now", "arguments": {"a": "x', "", [("now", '{"a": "x', False)]),
    ('<tool_call>{"name": "now", "arguments": {"a": "\\u00', "", [("now", '{"a": "\\u00', False)]),
    (CALL[: -len("</tool_call>")], "", [NOW]),
])  # fmt: skip
def test_an_answer_that_is_cut_off(text, content, calls):
    assert read(text) == Answer(content, calls)


def test_a_closing_marker_that_is_cut_off_is_no_content():
    plain, _ = both_markers(HERMES)
    for end in range(1, len("</tool_call>")):
        assert parse(HERMES, plain, CALL[:-end]) == Answer("", [NOW])


def test_a_call_that_goes_wrong_stays_one_and_content_follows():
    wrong = '<tool_call>\n{"name": "now", "arguments": {"a": nope}}\n</tool_call>\nSorry.'
    assert read(wrong) == Answer("}}\n</tool_call>\nSorry.", [("now", '{"a": nope', False)])
    text = '<tool_call>\n{"name": "now", "arguments": "x"}\n</tool_call>\n' + CALL
    assert read(text) == Answer(', "arguments": "x"}\n</tool_call>', [("now", "", False), NOW])
    more = '<tool_call>\n{"name": "now", "arguments": {}, "more": 1}\n</tool_call>'
    assert read(more) == Answer(', "more": 1}\n</tool_call>', [NOW])


def test_the_characters_of_a_token_are_no_marker():
    """Where a tokenizer has the marker as a token, only the token is one."""
    _, tokens = both_markers(HERMES)
    parser = HERMES.parser(TOOLS, tokens)
    assert [*parser.feed(CALL), *parser.finish()] == [Content(CALL)]


def test_a_call_is_told_as_soon_as_it_is_known():
    plain, _ = both_markers(HERMES)
    parser = HERMES.parser(TOOLS, plain)
    assert parser.feed("Hel") == [Content("Hel")]
    assert parser.feed('lo\n<tool_call>\n{"name": "now') == [Content("lo")]
    (begin,) = parser.feed('"')
    assert isinstance(begin, CallBegin)
    assert begin.name == "now"
    assert parser.feed(', "arguments": {"a"') == [CallArguments(0, '{"a"')]
    assert parser.feed(': "b c') == [CallArguments(0, ': "b c')]


def test_ids_are_new_for_each_call():
    plain, _ = both_markers(HERMES)
    events = HERMES.parser(TOOLS, plain).feed(CALL + CALL)
    ids = [event.id for event in events if isinstance(event, CallBegin)]
    assert len(set(ids)) == 2
    assert all(one.startswith("chatcmpl-tool-") for one in ids)


def test_a_long_answer_takes_time_in_proportion():
    """An answer of the size of a context, each piece by itself, in steps that do not grow."""
    plain, _ = both_markers(HERMES)
    parser = HERMES.parser(TOOLS, plain)
    parser.feed('<tool_call>{"name": "now", "arguments": {"a": "')
    assert sum(len(parser.feed("some words ")) for _ in range(20_000)) == 20_000
    assert len(parser._text) < 100
