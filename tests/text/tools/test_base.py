"""What every format keeps: parsers in every chunking and cut off anywhere, grammars, any text."""

import json
import random
from functools import partial

import pytest
from tests.text.tools import grammars, transcripts

from octavo.text.tools.base import Call, Tool
from octavo.text.tools.registry import FORMATS

FORMATS_AND_MARKERS = [
    pytest.param(one, markers, id=f"{type(one).__name__}-{kind}")
    for one in FORMATS
    for kind, markers in zip(("text", "tokens"), transcripts.both_markers(one), strict=True)
]
EACH_FORMAT = pytest.mark.parametrize(
    "tool_format", [pytest.param(one, id=type(one).__name__) for one in FORMATS]
)
IN_EACH_FORMAT = pytest.mark.parametrize(("tool_format", "markers"), FORMATS_AND_MARKERS)


def with_count(few, many):
    """How many texts are tried: `many` in `make test-slow`."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def written(tool_format, made):
    """The text of a transcript, and its content."""
    # Where nothing opens a section, calls begin the answer.
    before = made.before if tool_format.begin or not made.calls else ""
    calls = tool_format.write(made.calls) if made.calls else ""
    return before + calls + made.after, before + made.after


@with_count(30, 100)
@IN_EACH_FORMAT
def test_what_is_written_is_parsed_in_every_chunking(tool_format, markers, count):
    for seed, made in enumerate(transcripts.of_format(tool_format, count)):
        text, content = written(tool_format, made)
        read = partial(transcripts.parse, tool_format, markers, text)
        found = read()
        assert [name for name, _, _ in found.calls] == [call.name for call in made.calls], text
        assert all(ended for _, _, ended in found.calls)
        assert [json.loads(text) for _, text, _ in found.calls] == [
            call.arguments for call in made.calls
        ]
        assert found.content == content
        assert read(cut=partial(transcripts.at_random, seed=seed)) == found
        if seed % 4 == 0:
            assert read(cut=transcripts.characters) == found


@with_count(1, 3)
@IN_EACH_FORMAT
def test_a_text_in_two_pieces_is_parsed_as_the_whole(tool_format, markers, count):
    # The first one of this seed has three calls, with content before and after, in each format.
    for made in transcripts.of_format(tool_format, count, seed=188):
        text = markers.in_text(written(tool_format, made)[0])[:240]
        whole = transcripts.events_of(tool_format.parser(made.tools, markers), [text])
        for pieces in transcripts.in_two(text):
            parser = tool_format.parser(made.tools, markers)
            assert transcripts.events_of(parser, pieces) == whole


@IN_EACH_FORMAT
def test_a_text_that_is_cut_off_keeps_what_it_has(tool_format, markers):
    for made in transcripts.of_format(tool_format, count=3, seed=2):
        text = markers.in_text(written(tool_format, made)[0])[:240]
        whole = transcripts.answer_of(
            transcripts.events_of(tool_format.parser(made.tools, markers), [text])
        )
        for end in range(len(text)):
            parser = tool_format.parser(made.tools, markers)
            found = transcripts.answer_of(transcripts.events_of(parser, [text[:end]]))
            assert_begins(found, whole, markers.spelled(text[:end]))


def assert_begins(found, whole, text):
    """Whether the answer in `text` has nothing that the whole one has not, but what is undecided
    where it ends."""
    assert len(found.calls) <= len(whole.calls)
    for (name, arguments, ended), (other, complete, _) in zip(
        found.calls, whole.calls, strict=False
    ):
        assert name == other
        assert arguments == complete if ended else complete.startswith(arguments)
    common = 0
    while found.content[: common + 1] == whole.content[: common + 1] and common < len(
        found.content
    ):
        common += 1
    assert text.endswith(found.content[common:])


@EACH_FORMAT
def test_the_grammar_takes_what_is_written(tool_format):
    tools = list(transcripts.TOOLS.values())
    for added in (False, True):
        most = 3 if tool_format.several else 1
        grammar = grammars.Calls(tool_format, tools, most, added)
        # A marker in a string is no token; a tokenizer that has it cannot write it there.
        found = transcripts.of_format(tool_format, count=15, seed=3, with_markers=not added)
        for made in found:
            for calls in [made.calls] if tool_format.several else [[c] for c in made.calls]:
                if calls:
                    text = tool_format.write(calls)
                    assert grammar.take(text) == "", text


@EACH_FORMAT
def test_characters_of_markers_inside_strings_are_text(tool_format):
    """Where the markers are tokens of the tokenizer, what spells them in a string is none."""
    _, markers = transcripts.both_markers(tool_format)
    spelled = "".join(tool_format.markers).replace('"', "'")
    text = markers.in_text(tool_format.write([Call("get_weather", {"city": "Rome"})]))
    text = text.replace("Rome", f"x{spelled}y")
    for pieces in ([text], list(text)):
        parser = tool_format.parser(transcripts.TOOLS, markers)
        ((name, arguments, ended),) = transcripts.answer_of(
            transcripts.events_of(parser, pieces)
        ).calls
        assert (name, json.loads(arguments), ended) == (
            "get_weather", {"city": f"x{spelled}y"}, True)  # fmt: skip


REFUSED = [
    Call("get_wether", {"city": "Rome"}), Call("get_weather", {"city": "Rome", "days": "soon"}),
    Call("get_weather", {"days": 3}), Call("now", {"zone": "UTC"}),
]  # fmt: skip


@EACH_FORMAT
def test_the_grammar_refuses_other_names_and_arguments_and_calls(tool_format):
    tools = list(transcripts.TOOLS.values())
    grammar = grammars.Calls(tool_format, tools)
    right = Call("get_weather", {"city": "Rome", "days": 3})
    assert grammar.take(tool_format.write([right])) == ""
    for wrong in REFUSED:
        assert grammar.take(tool_format.write([wrong])) != "", wrong
    assert grammar.take(tool_format.write([right, right])) != ""
    if tool_format.several:
        two = grammars.Calls(tool_format, tools, 2)
        assert two.take(tool_format.write([right, right])) == ""
        assert two.take(tool_format.write([right, right, right])) != ""


@EACH_FORMAT
def test_a_tool_that_is_not_strict_takes_any_arguments(tool_format):
    lax = Tool("f", parameters={"properties": {"a": {"type": "integer"}}}, strict=False)
    grammar = grammars.Calls(tool_format, [lax])
    assert grammar.take(tool_format.write([Call("f", {"b": [1, {"c": "x"}]})])) == ""


@with_count(40, 100)
@IN_EACH_FORMAT
def test_any_text_is_parsed_and_nothing_of_it_is_lost(tool_format, markers, count):
    draw = random.Random(4)
    call, other = (tool_format.write([Call(name, {"a": "x"})]) for name in ("now", "nobody"))
    pieces = [*tool_format.markers, call, call, call[: len(call) // 2], other, *["§"] * 20]
    pieces += ['"name": "now"', '{"name": "now", ', "now", "f", "name", "arguments", "null", "1"]
    pieces += '{}[]()<>"\\:,=| \n'
    for seed in range(count):
        text = markers.in_text("".join(draw.choices(pieces, k=draw.randrange(1, 14))))
        if draw.random() < 0.3:
            text = text[: draw.randrange(1, len(text) + 1)]
        parser = partial(tool_format.parser, transcripts.TOOLS, markers)
        events = transcripts.events_of(parser(), [text])
        assert events == transcripts.events_of(parser(), list(text)), text
        assert events == transcripts.events_of(parser(), transcripts.at_random(text, seed)), text
        str(events).encode()  # a surrogate cannot be
        calls = transcripts.answer_of(events).calls
        assert all(isinstance(json.loads(a), dict) for _, a, ended in calls if ended), text
        if all(ended for _, _, ended in calls):
            kept = "".join(one.text for one in events if hasattr(one, "text"))
            assert kept.count("§") == text.count("§"), text
