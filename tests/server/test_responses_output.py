"""From an answer's events to items, and to the events of a stream that tells of them."""

import json
import random

import msgspec
import pytest

from octavo.server.replies import TokenLogprob
from octavo.server.responses_output import InputReader, Output
from octavo.server.responses_tools import ToolName
from octavo.text.answer import CallArguments, CallBegin, CallEnd, Content, Reasoning

NAMES = {
    "patch": ToolName("custom", "patch"),
    "files__read": ToolName("function", "read", "files"),
}
PATCH = '{"input": "a \\"b\\"\\n\\u010d\\ud83c\\udf36 é"}'
ANSWER = [
    Reasoning("Let me "),
    Reasoning("see."),
    Content("\n\n"),
    Content("I will "),
    Content("look.\n"),
    CallBegin(0, "chatcmpl-tool-0a1b", "weather"),
    CallArguments(0, '{"city": '),
    CallArguments(0, '"Brno"}'),
    CallEnd(0),
    Content("\n"),
    CallBegin(1, "abcdefghi", "files__read"),
    CallArguments(1, "{}"),
    CallEnd(1),
    CallBegin(2, "chatcmpl-tool-2", "patch"),
    CallArguments(2, PATCH),
    CallEnd(2),
]


def made(events, complete=True, cut=None):
    """(items, stream events) as JSON; cut: how many events come at once."""
    output = Output(lambda name: NAMES.get(name, ToolName("function", name)))
    told = []
    size = cut or len(events) or 1
    for start in range(0, len(events), size):
        told += list(output.feed(events[start : start + size]))
    told += list(output.finish(complete))
    plain = json.loads(msgspec.json.encode([output.items, told]))
    return plain[0], plain[1]


def without_ids(items):
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


def folded(told):
    """The items that a reader of the stream puts together."""
    items = {}
    for event in told:
        at = event["output_index"]
        kind = event["type"]
        if kind == "response.output_item.added":
            assert at == len(items)
            items[at] = {**event["item"], "text": ""}
        elif kind.endswith(".delta"):
            assert event["item_id"] == items[at]["id"]
            items[at]["text"] += event["delta"]
        elif kind.endswith("output_item.done"):
            done = event["item"]
            content = done.get("content") or [{"text": done.get("arguments", done.get("input"))}]
            assert items[at].pop("text") == content[0]["text"]
            items[at] = done
    return [items[at] for at in sorted(items)]


def test_the_items_of_an_answer():
    items, _ = made(ANSWER)
    assert without_ids(items) == [
        {"type": "reasoning", "status": "completed", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Let me see."}]},
        {"type": "message", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "\n\nI will look.\n", "annotations": [],
                      "logprobs": []}]},
        {"type": "function_call", "status": "completed", "call_id": "call_0a1b", "name": "weather",
         "arguments": '{"city": "Brno"}', "namespace": None},
        {"type": "function_call", "status": "completed", "call_id": "abcdefghi", "name": "read",
         "arguments": "{}", "namespace": "files"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "patch",
         "input": 'a "b"\nč🌶 é', "namespace": None},
    ]  # fmt: skip
    prefixes = [item["id"].split("_")[0] for item in items]
    assert prefixes == ["rs", "msg", "fc", "fc", "ctc"]
    assert len({item["id"] for item in items}) == 5


def test_a_stream_tells_of_each_item_in_order():
    _, told = made(ANSWER)
    assert [event["type"].removeprefix("response.") for event in told] == [
        "output_item.added", "content_part.added",
        "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta",
        "custom_tool_call_input.done", "output_item.done",
    ]  # fmt: skip
    added = [event["item"] for event in told if event["type"] == "response.output_item.added"]
    assert {item["status"] for item in added} == {"in_progress"}
    assert [item.get("content", item.get("arguments", item.get("input"))) for item in added] == [
        [], [], "", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize("complete", [True, False])
def test_every_prefix_of_an_answer_in_every_chunking_has_the_items_of_its_stream(complete):
    for length in range(len(ANSWER) + 1):
        whole, _ = made(ANSWER[:length], complete)
        assert whole, "an answer has an item"
        for cut in (1, 2, 5):
            items, told = made(ANSWER[:length], complete, cut)
            assert without_ids(items) == without_ids(whole)
            assert folded(told) == items


def test_what_is_cut_off_says_so():
    items, _ = made(ANSWER[:8], complete=False)
    assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]
    assert items[2]["arguments"] == '{"city": "Brno"}'
    items, _ = made([CallBegin(0, "x", "patch"), CallArguments(0, '{"input": "a\\')], False)
    assert (items[0]["input"], items[0]["status"]) == ("a", "incomplete")


def test_whitespace_alone_makes_a_message_only_where_it_is_all_there_is():
    items, _ = made([Content(" "), Content("\n")])
    assert [item["content"][0]["text"] for item in items] == [" \n"]
    items, _ = made([Reasoning("x"), Content("\n\n")])
    assert [item["type"] for item in items] == ["reasoning"]
    items, _ = made([])
    assert [item["content"][0]["text"] for item in items] == [""]


def test_logprobs_are_those_of_the_message():
    def token(text):
        return TokenLogprob(text, -0.5, [], [])

    output = Output(lambda name: ToolName("function", name))
    told = [
        event
        for events, tokens in (
            ([Reasoning("x")], "abc"), ([], "d"), ([Content("hi")], "e"), ([], "f"),
            ([Content("!")], "g"), ([], "h"),
        )
        for event in output.feed(events, [token(letter) for letter in tokens])
    ]  # fmt: skip
    told += list(output.finish(True))
    deltas = [e for e in told if e["type"] == "response.output_text.delta"]
    assert [(e["delta"], [p.token for p in e["logprobs"]]) for e in deltas] == [
        ("hi", ["d", "e"]), ("!", ["f", "g"]), ("", ["h"]),
    ]  # fmt: skip
    assert [p.token for p in output.items[1].content[0].logprobs] == list("defgh")


@pytest.mark.parametrize(
    "text", ["", "plain", 'q " \\ / \b\f\n\r\t', "č漢字🌶\u2028\x7f", "\x01", "a" * 99]
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_input_is_read_in_pieces_of_any_size(text, ascii_only):
    raw = json.dumps({"input": text}, ensure_ascii=ascii_only)
    rng = random.Random(len(raw))
    for size in (1, 2, 3, 7, len(raw)):
        reader = InputReader()
        assert "".join(reader.feed(raw[i : i + size]) for i in range(0, len(raw), size)) == text
    for _ in range(20):
        cut = rng.randrange(len(raw))
        reader = InputReader()
        first = reader.feed(raw[:cut])
        assert text.startswith(first)
        assert first + reader.feed(raw[cut:]) == text


def test_half_a_pair_of_surrogates_never_leaves():
    reader = InputReader()
    assert reader.feed('{"input": "a\\udc00b"}') == "a?b"
