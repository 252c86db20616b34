"""Reasoning over `/v1/responses`: items of its own, which come back with the next request."""

import json

import pytest

import tool_model
from responses_client import both, respond, stream
from serving import Server
from tool_model import call
from tool_model import script as say

TOOLS = [{"type": "function", **tool_model.WEATHER["function"]}, {"type": "custom", "name": "p"}]
BLOCK = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine_path):
    folder = tool_model.write(tmp_path_factory.mktemp("models") / "thinks", tool_model.THINKING)
    with Server(folder, {}, max_model_len=8192, num_gpu_blocks_override=2049) as running:
        yield running


def brief(response):
    return [
        (item["type"], item["content"][0]["text"] if "content" in item else item["name"])
        for item in response["output"]
    ]


@pytest.mark.parametrize(
    ("text", "items", "count"),
    [
        ("<think>\nhm\n</think>\n\nHello", [("reasoning", "hm"), ("message", "Hello")], 4),
        ("Hello", [("message", "Hello")], 0),
        ("<think>hm</think>", [("reasoning", "hm")], 2),
        ("<think>hm</think>\n" + call(), [("reasoning", "hm"), ("function_call", "weather")], 2),
        ("<think>hm" + call("p", '{"input": "x"}'),
         [("reasoning", "hm"), ("custom_tool_call", "p")], 2),
        ("<think>hm</think>a\n" + call(),
         [("reasoning", "hm"), ("message", "a"), ("function_call", "weather")], 2),
    ],
)  # fmt: skip
def test_reasoning_is_an_item_streamed_and_whole(server, text, items, count):
    found = both(server, say(server, text), tools=TOOLS, max_output_tokens=400)
    assert brief(found) == items
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    for item in found["output"]:
        if item["type"] == "reasoning":
            assert item["id"].startswith("rs_")
            assert (item["summary"], item["status"]) == ([], "completed")


def test_what_is_cut_off_while_it_reasons_is_incomplete(server):
    found = both(server, say(server, "<think>hmm"), max_output_tokens=3)
    assert brief(found) == [("reasoning", "hm")]
    assert (found["status"], found["output"][0]["status"]) == ("incomplete", "incomplete")


def test_reasoning_may_be_hidden_limited_and_turned_off(server):
    text = say(server, "<think>hm</think>Hello")
    hidden = both(server, text, include_reasoning=False)
    assert brief(hidden) == [("message", "Hello")]
    assert hidden["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    short = both(server, say(server, "<think>hmmm</think>ok"), thinking_token_budget=2)
    assert brief(short)[0] == ("reasoning", "hm")
    none = respond(server, "hi", reasoning={"effort": "none"}, max_output_tokens=1)
    some = respond(server, "hi", reasoning={"effort": "low"}, max_output_tokens=1)
    assert none["usage"]["input_tokens"] > some["usage"]["input_tokens"]  # an empty block
    assert none["reasoning"] == {"effort": "none", "summary": None}


def test_a_form_follows_reasoning(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "n", "schema": schema}
    text = say(server, '<think>hm</think>{"a": true}')
    found = both(server, text, text={"format": form})
    assert brief(found)[0] == ("reasoning", "hm")
    assert json.loads(found["output"][1]["content"][0]["text"]) == {"a": True}


def test_the_events_of_reasoning(server):
    events = stream(server, say(server, "<think>hm</think>ok"))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[2:9] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert events[3]["part"] == {"type": "reasoning_text", "text": ""}


def test_a_loop_of_calls_with_reasoning_finds_each_turn_in_the_prefix_cache(server):
    def scripted(turn):
        city = f'{{"city": "C{turn}"}}'
        text = f"<think>\nhm {turn}\n</think>\n\n" + call(arguments=city) if turn < 4 else "done"
        return "go " + say(server, text)

    items = [{"role": "user", "content": scripted(0)}]
    held = 0
    for turn in range(4):
        found = respond(server, items, tools=TOOLS, max_output_tokens=400)
        usage = found["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= held - 2 * BLOCK
        held = usage["input_tokens"] + usage["output_tokens"]
        thought, made = found["output"]
        assert thought["content"][0]["text"] == f"hm {turn}"
        items += [thought, made]
        items.append({"type": "function_call_output", "call_id": made["call_id"],
                      "output": scripted(turn + 1)})  # fmt: skip
    assert brief(respond(server, items, tools=TOOLS)) == [("message", "done")]
