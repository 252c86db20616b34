"""Tools and thinking over the Messages API, whole and streamed; turns and the prefix cache."""

import json

import pytest

import tool_model
from messages_client import answer, both, refused, send, stream, tokens_of
from octavo.server.messages_events import SIGNATURE
from serving import Server
from tool_model import call

MODEL = "hermes"
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": tool_model.WEATHER["function"]["parameters"],
}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
TOOLS = [WEATHER, CLOCK]
ROME = {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
NOW = {"type": "tool_use", "name": "clock", "input": {}}


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine_path):
    folder = tool_model.write(tmp_path_factory.mktemp("models") / MODEL, tool_model.THINKING)
    with Server(folder, {}, max_model_len=8192, num_gpu_blocks_override=4097) as running:
        yield running


def script(server, text):
    return f"say [{tool_model.ids(server.folder, text)}]"


def fields(**more):
    return {"model": MODEL, "max_tokens": 400, "tools": TOOLS, **more}


def said(server, text, **more):
    """(content without ids, stop_reason), asserted to be equal whole and streamed."""
    found = both(server, script(server, text), **fields(**more))
    return found["content"], found["stop_reason"]


@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        (call(), [ROME], "tool_use"),
        (call("clock", "{}"), [NOW], "tool_use"),
        ("Hello", [{"type": "text", "text": "Hello"}], "end_turn"),
        ("I look.\n" + call(), [{"type": "text", "text": "I look."}, ROME], "tool_use"),
        (f"{call()}\n{call('clock', '{}')}", [ROME, NOW], "tool_use"),
        ("a <tool b", [{"type": "text", "text": "a <tool b"}], "end_turn"),
    ],
)
def test_calls_are_the_same_streamed_and_whole(server, text, content, reason):
    assert said(server, text) == (content, reason)


def test_a_call_that_was_cut_off_has_the_arguments_that_were_whole(server):
    text = call()
    for most in range(20, len(tool_model.ids(server.folder, text)), 6):
        content, reason = said(server, text, max_tokens=most)
        assert reason == "max_tokens"
        for block in content:
            if block["type"] == "tool_use":
                assert block["input"] in ({}, ROME["input"])


def test_the_events_of_a_call(server):
    events = stream(server, script(server, "Well.\n" + call()), **fields())
    kinds = [e["type"] for e in events]
    assert kinds[:4] == ["message_start", "ping", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = next(e for e in events if e.get("content_block", {}).get("type") == "tool_use")
    assert (start["index"], start["content_block"]["input"]) == (1, {})
    assert start["content_block"]["id"].startswith("toolu_")
    parts = [e["delta"]["partial_json"] for e in events
             if e["type"] == "content_block_delta" and "partial_json" in e["delta"]]  # fmt: skip
    assert len(parts) > 1
    assert json.loads("".join(parts)) == ROME["input"]


def thought(text):
    return {"type": "thinking", "thinking": text, "signature": SIGNATURE}


SO = {"type": "text", "text": "so"}


@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        ("<think>\nhm\n</think>\n\nso", [thought("hm"), SO], "end_turn"),
        ("<think>hm</think>", [thought("hm")], "end_turn"),
        ("<think>hm", [thought("hm")], "end_turn"),
        ("<think>hm</think>so\n" + call(), [thought("hm"), SO, ROME], "tool_use"),
    ],
)
def test_thinking_is_a_block_of_its_own(server, text, content, reason):
    assert said(server, text) == (content, reason)
    shown = {"type": "adaptive", "display": "summarized"}
    assert said(server, text, thinking=shown) == (content, reason)
    omitted = [thought(""), *content[1:]]
    assert said(server, text, thinking={**shown, "display": "omitted"}) == (omitted, reason)


def test_tokens_of_thinking_are_counted(server):
    found = answer(server, script(server, "<think>hm</think>so"), **fields())
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    last = stream(server, script(server, "<think>hm</think>so"), **fields())[-2]
    assert last["usage"]["output_tokens_details"] == {"thinking_tokens": 2}


def test_thinking_has_a_budget(server, monkeypatch):
    monkeypatch.setattr("octavo.server.messages_conversation.MIN_BUDGET", 3)
    text = "<think>hmmmm</think>so"
    assert said(server, text)[0] == [thought("hmmmm"), SO]
    content, _ = said(server, text, thinking={"type": "enabled", "budget_tokens": 3})
    assert content[0] == thought("hmm")
    assert said(server, "so", thinking={"type": "disabled"}) == ([SO], "end_turn")


def test_an_answer_may_have_a_form(server):
    form = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    asked = fields(tools=None, output_config=form, temperature=0)
    (block,) = answer(server, "no script", **asked, thinking={"type": "disabled"})["content"]
    assert list(json.loads(block["text"])) == ["city"]


@pytest.mark.parametrize(
    ("choice", "most"),
    [({"type": "any"}, 9), ({"type": "tool", "name": "clock"}, 1),
     ({"type": "any", "disable_parallel_tool_use": True}, 1)],
)  # fmt: skip
def test_calls_can_be_forced(server, choice, most):
    # The script says no call: what the model may not write, it does not write.
    found = answer(server, "no script", **fields(tool_choice=choice, temperature=0))
    calls = [block for block in found["content"] if block["type"] == "tool_use"]
    assert calls == found["content"]
    assert len(calls) <= most
    names = {"clock"} if choice["type"] == "tool" else {"clock", "weather"}
    assert {block["name"] for block in calls} <= names


def test_no_tool_is_called_where_none_may_be(server):
    content, reason = said(server, call(), tool_choice={"type": "none"})
    assert reason == "end_turn"
    assert [block["type"] for block in content] == ["text"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name must be"),
        ({"tools": [WEATHER, WEATHER]}, "two tools are named 'weather'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
         "tools[0].input_schema.type must be 'object'"),
        ({"tools": [{**CLOCK, "strict": True,
                     "input_schema": {"type": "object", "not": {}}}]}, "not"),
        ({"tool_choice": {"type": "tool", "name": "cloc"}}, "did you mean 'clock'"),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(server, more, words):
    assert words in refused(server, **fields(**more))["message"]


def test_a_schema_that_cannot_be_enforced_is_a_promise_only_if_strict(server):
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": ""}}}}
    loose = {**WEATHER, "input_schema": schema}
    wrong = call(arguments='{"town": 1}')
    found = answer(server, script(server, wrong), **fields(tools=[loose]))
    assert [block["input"] for block in found["content"]] == [{"town": 1}]
    assert "weather" in refused(server, **fields(tools=[{**loose, "strict": True}]))["message"]
    # A schema that can be is, strict or not: the model cannot write what it does not allow.
    held = answer(server, script(server, wrong), **fields(tools=[WEATHER], max_tokens=60))
    assert "town" not in json.dumps(held["content"])


def test_examples_of_input_are_shown(server):
    shown = {**WEATHER, "input_examples": [{"city": "Łódź"}]}
    plain, more = (
        send(server, path="/v1/messages/count_tokens", **fields(tools=[tool], max_tokens=None))
        for tool in (WEATHER, shown)
    )
    assert more.json()["input_tokens"] > plain.json()["input_tokens"] + len(
        "Examples of its input:"
    )


def test_a_count_has_the_tools(server):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{**ROME, "id": "toolu_1"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1",
                                      "content": "warm"}, {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    counts = []
    for more in ({}, {"tools": None}, {"tool_choice": {"type": "none"}}, {"messages": messages}):
        counted = send(server, path="/v1/messages/count_tokens", **fields(max_tokens=None, **more))
        counts.append(counted.json()["input_tokens"])
        assert counts[-1] == tokens_of(answer(server, **fields(**{"max_tokens": 4, **more})))
    assert counts[0] > counts[1] + 100


def test_the_block_of_an_answer_is_the_block_of_a_prompt(server):
    """What a client sends back is rendered as the model wrote it."""
    asked = {"role": "user", "content": script(server, "I look.\n" + call())}
    first = answer(server, **fields(messages=[asked]))
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "warm"}
    turns = [asked, {"role": "assistant", "content": first["content"]},
             {"role": "user", "content": [result]}]  # fmt: skip
    second = answer(server, **fields(messages=turns))
    # All but the last token was computed in the first turn, in blocks of 16.
    before = tokens_of(first) + first["usage"]["output_tokens"] - 1
    assert second["usage"]["cache_read_input_tokens"] >= before // 16 * 16


def test_ten_turns_of_claude_code_find_the_prompt_before_in_the_cache(server):
    """Its header, its reminders and its cache marks are others in each turn."""
    mark = {"cache_control": {"type": "ephemeral"}}
    messages, before = [], 0
    for turn in range(10):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={turn * 7919:05x};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "You are brief. " * 8},
                  {"type": "text", "text": "Use tools.", **mark}]  # fmt: skip
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"{turn} degrees"}
            for block in (messages[-1]["content"] if messages else [])
            if block["type"] == "tool_use"
        ]
        calls = turn % 4 == 0
        said = call("clock", "{}") if calls else "ok"
        asked = {"type": "text", "text": script(server, said), **mark}
        messages = [
            *map(without_marks, messages),
            {"role": "user", "content": [*results, asked]},
            {"role": "system", "content": f"{1000 - turn} tokens are left."},
        ]
        body = fields(messages=messages, system=system, metadata={"user_id": f"session_{turn}"})
        found = answer(server, **body)
        assert found["stop_reason"] == ("tool_use" if calls else "end_turn")
        assert found["usage"]["cache_read_input_tokens"] >= before // 16 * 16, turn
        before = tokens_of(found)
        messages.append({"role": "assistant", "content": found["content"]})
    assert before > 1500


def without_marks(message):
    if isinstance(message["content"], str):
        return message
    content = [{k: v for k, v in block.items() if k != "cache_control"}
               for block in message["content"]]  # fmt: skip
    return {**message, "content": content}
