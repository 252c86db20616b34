"""Answers as content blocks: the events of a stream, and the whole that they add up to."""

import itertools
import json

import msgspec
import pytest

from octavo.server.messages_events import (
    SIGNATURE,
    Blocks,
    Message,
    MessageUsage,
    call_id,
    complete_part,
    content,
    stop_of,
)
from octavo.server.replies import Usage
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Reasoning

CALL = [CallBegin(0, "chatcmpl-tool-ab", "f"), CallArguments(0, '{"a": '), CallArguments(0, "1}"),
        CallEnd(0)]  # fmt: skip
ANSWERS = {
    "nothing": [],
    "text": [Content("a"), Content("b")],
    "thinking": [Reasoning("hm"), Reasoning("m"), Content("a")],
    "thinking alone": [Reasoning("hm")],
    "a call": CALL,
    "calls and text": [Reasoning("x"), Content("y"), *CALL, CallBegin(1, "id2", "g"),
                       CallArguments(1, "{}"), CallEnd(1), Content("z")],
    "a call that is cut off": [Content("y"), CallBegin(0, "i", "f"), CallArguments(0, '{"a": "b"')],
    "a call without arguments yet": [CallBegin(0, "i", "f")],
}  # fmt: skip


def shaped(events, **options):
    blocks = Blocks(**options)
    found = [e for event in events for e in blocks.feed([event])]
    return [*found, *blocks.finish()]


def plain(events):
    return [json.loads(msgspec.json.encode(event)) for event in events]


def read(events):
    """The blocks as Anthropic's client adds them up, which says what order they must have."""
    blocks, inputs, opened = [], {}, None
    for event in events:
        if event["type"] == "content_block_start":
            assert (opened, event["index"]) == (None, len(blocks))
            opened = event["index"]
            blocks.append(dict(event["content_block"]))
            continue
        assert event["index"] == opened
        if event["type"] == "content_block_stop":
            opened = None
            continue
        block, delta = blocks[-1], event["delta"]
        field = {"text_delta": "text", "thinking_delta": "thinking",
                 "signature_delta": "signature"}.get(delta["type"])  # fmt: skip
        if field:
            block[field] += delta[field]
        else:
            assert (block["type"], delta["type"]) == ("tool_use", "input_json_delta")
            inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
    assert opened is None
    for index, text in inputs.items():
        blocks[index]["input"] = complete_part(text)
    return blocks


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_whole(name):
    events = shaped(ANSWERS[name])
    assert read(plain(events)) == plain(content(events))


@pytest.mark.parametrize("name", ANSWERS)
def test_events_may_come_in_any_portions(name):
    events = ANSWERS[name]
    for cut in range(len(events) + 1):
        blocks = Blocks()
        found = [*blocks.feed(events[:cut]), *blocks.feed(events[cut:]), *blocks.finish()]
        assert plain(found) == plain(shaped(events))


def test_the_blocks_of_an_answer():
    assert plain(content(shaped(ANSWERS["calls and text"]))) == [
        {"type": "thinking", "thinking": "x", "signature": SIGNATURE},
        {"type": "text", "text": "y"},
        {"type": "tool_use", "id": "toolu_ab", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "toolu_id2", "name": "g", "input": {}},
        {"type": "text", "text": "z"},
    ]
    assert content(shaped([])) == []
    assert plain(content(shaped(ANSWERS["a call that is cut off"])))[1]["input"] == {"a": "b"}


def test_the_events_of_a_stream():
    assert plain(shaped([Reasoning("x"), *CALL])) == [
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "thinking_delta", "thinking": "x"}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "signature_delta", "signature": SIGNATURE}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1,
         "content_block": {"type": "tool_use", "id": "toolu_ab", "name": "f", "input": {}}},
        {"type": "content_block_delta", "index": 1,
         "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
        {"type": "content_block_delta", "index": 1,
         "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"type": "content_block_stop", "index": 1},
    ]  # fmt: skip


def test_thinking_that_is_not_shown_has_its_signature_alone():
    events = shaped([Reasoning("x"), Reasoning("y"), Content("a")], shows_thinking=False)
    assert plain(content(events)) == [
        {"type": "thinking", "thinking": "", "signature": SIGNATURE},
        {"type": "text", "text": "a"},
    ]
    assert "thinking_delta" not in json.dumps(plain(events))


def test_the_calls_of_an_answer_are_counted():
    for name, count in (("text", 0), ("a call", 1), ("calls and text", 2)):
        blocks = Blocks()
        blocks.feed(ANSWERS[name])
        assert blocks.calls == count


@pytest.mark.parametrize(
    ("ending", "found"),
    [
        (("stop", None, 0), ("end_turn", None)),
        (("stop", 7, 0), ("end_turn", None)),  # a stop token's id
        (("stop", "END", 0), ("stop_sequence", "END")),
        (("stop", "END", 1), ("stop_sequence", "END")),
        (("stop", None, 2), ("tool_use", None)),
        (("length", None, 0), ("max_tokens", None)),
        (("length", None, 1), ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended(ending, found):
    assert stop_of(*ending) == found


def test_usage_counts_a_cached_token_once():
    usage = MessageUsage.of(Usage.of(100, 7, 64))
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (36, 64)
    assert (usage.cache_creation_input_tokens, usage.output_tokens) == (0, 7)


def test_ids_of_calls_begin_as_anthropics_do():
    assert call_id("chatcmpl-tool-0a1b") == "toolu_0a1b"
    assert call_id("abc123def") == "toolu_abc123def"


def leaves(value):
    if isinstance(value, dict):
        return list(itertools.chain(*(leaves(v) for v in value.values())))
    return list(itertools.chain(*map(leaves, value))) if isinstance(value, list) else [value]


def test_of_arguments_that_are_cut_off_the_whole_values_are_left():
    value = {"a": 'x\\"y', "b": [1, 2, {"c": "d:e,", "f": []}], "g": {"h": None, "i": -1.5e3},
             "j": "é{[", "k": True, "": {"": ""}}  # fmt: skip
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        found = [complete_part(text[:cut]) for cut in range(len(text) + 1)]
        assert found[0] == {}
        assert found[-1] == value
        known = leaves(value)
        for before, after in itertools.pairwise(found):
            assert leaves(before) == known[: len(leaves(before))]  # none that is cut short
            assert len(leaves(before)) <= len(leaves(after))


def test_arguments_that_no_object_can_have_are_no_fault_of_the_server():
    assert complete_part('{"a": "x\\ud83d", "b": "\\ud83d\\ude00"}') == {
        "a": "x\ufffd",
        "b": "\U0001f600",
    }
    assert complete_part('{"a": [' + "1" * 5000 + "]}") == {"a": [float("inf")]}
    assert complete_part('{"a": 1, "b": ' + "1" * 5000) == {"a": 1}
    assert complete_part('{"a": ' + "[" * 5000 + "]" * 5000 + "}") == {}


def test_a_message_has_all_the_fields_of_anthropics():
    message = Message(
        "i", "message", "assistant", "m", [], "end_turn", None, MessageUsage(1, 0, 2, 3)
    )
    assert plain([message])[0] == {
        "id": "i", "type": "message", "role": "assistant", "model": "m", "content": [],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 1, "cache_creation_input_tokens": 0,
                  "cache_read_input_tokens": 2, "output_tokens": 3},
    }  # fmt: skip
