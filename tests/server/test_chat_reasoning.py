"""Reasoning over `/v1/chat/completions`: apart from the answer, streamed and whole, and counted."""

import json

import pytest

import tool_model
from serving import Server
from tool_model import PATH, ROME, TOOLS, USER, ask, both, call, fold, say

ROOM = {"max_model_len": 4096, "num_gpu_blocks_override": 2049}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "thinks"
    return tool_model.write(folder, tool_model.THINKING)


@pytest.fixture(scope="module")
def server(folder, engine_path):
    with Server(folder, {}, **ROOM) as running:
        yield running


def thought(text, content, **more):
    return {"reasoning": text, "reasoning_content": text, "content": content, **more}


@pytest.mark.parametrize(
    ("text", "message", "reason", "count"),
    [
        ("<think>\nhm\n</think>\n\nHello", thought("hm", "Hello"), "stop", 4),
        ("<think>hm</think>Hello", thought("hm", "Hello"), "stop", 2),
        ("Hello", {"content": "Hello"}, "stop", 0),
        ("Hello <think>", {"content": "Hello <think>"}, "stop", 0),
        ("<think>hm", thought("hm", None), "stop", 2),
        ("<think>hm</think>", thought("hm", None), "stop", 2),
        ("<think>hm</think>" + call(), thought("hm", None, tool_calls=[ROME]), "tool_calls", 2),
        ("<think>hm" + call(), thought("hm", None, tool_calls=[ROME]), "tool_calls", 2),
        ("<think>hm</think>a\n" + call(), thought("hm", "a", tool_calls=[ROME]), "tool_calls", 2),
    ],
)  # fmt: skip
def test_reasoning_is_the_same_streamed_and_whole(server, text, message, reason, count):
    assert both(server, text) == (message, reason)
    used = ask(server, text)["usage"]
    assert used["completion_tokens_details"] == {"reasoning_tokens": count}


def test_reasoning_that_is_cut_off_is_reasoning(server):
    text = "<think>hm</think>Hello"
    for most in range(1, 9):
        message, reason = both(server, text, max_tokens=most)
        assert reason == "length"
        assert "hm".startswith(message.get("reasoning", ""))
        assert "Hello".startswith(message["content"] or "")
    assert both(server, "<think>a STOP", stop="STOP")[0] == thought("a ", None)


def test_a_prompt_that_forbids_thinking_begins_the_answer(server):
    for fields in (
        {"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}},
    ):  # fmt: skip
        assert both(server, "Hello", **fields) == ({"content": "Hello"}, "stop")
    kept = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert both(server, "<think>hm</think>a", **kept)[0] == thought("hm", "a")
    assert both(server, "<think>hm</think>a", reasoning_effort="high")[0] == thought("hm", "a")


def test_a_prompt_that_ends_in_reasoning(make_server, tmp_path):
    template = tool_model.THINKING + "{% if add_generation_prompt %}<think>\n{% endif %}"
    server = make_server(folder=tool_model.write(tmp_path / "m", template), **ROOM)
    assert both(server, "hm</think>a")[0] == thought("hm", "a")
    assert both(server, "hm")[0] == thought("hm", None)
    assert ask(server, "hm</think>a")["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 2
    }


def test_reasoning_may_be_left_out(server):
    text = "<think>hm</think>Hello"
    assert both(server, text, include_reasoning=False) == ({"content": "Hello"}, "stop")
    reply = ask(server, text, include_reasoning=False)
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    reply = ask(server, "<think>hm", include_reasoning=False)
    assert reply["choices"][0]["message"]["content"] is not None


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_flag_leaves_one_of_the_names(make_server, folder, field):
    server = make_server({"reasoning_field": field}, folder=folder, **ROOM)
    text = "<think>hm</think>a"
    message = ask(server, text)["choices"][0]["message"]
    assert {k for k in message if "reasoning" in k} == {field}
    events = server.events(PATH, messages=say(server, text))
    assert {k for k in fold(events)[0] if "reasoning" in k} == {field}


def test_a_form_holds_behind_the_reasoning(server):
    asked = {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": SCHEMA}}, "tools": None}  # fmt: skip
    message, reason = both(server, '<think>no {</think>{"a": true}', **asked)
    assert message == thought("no {", '{"a": true}')
    assert reason == "stop"
    message, _ = both(server, '<think>hm</think>{"a": tr', **asked, max_tokens=12)
    assert '{"a": true}'.startswith(message["content"])


def test_a_budget_ends_the_reasoning(server):
    text = "<think>" + "x" * 50 + "</think>Hello"
    for budget in (0, 5):
        reply = ask(server, text, thinking_token_budget=budget, max_tokens=30)
        assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}
        assert reply["choices"][0]["message"].get("reasoning", "") == "x" * budget


def test_thoughts_go_back_to_the_model(server):
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
        ],
    }
    prompts = []
    for thoughts in ({"reasoning": "hm"}, {"reasoning_content": "hm"},
                     {"reasoning": "hm", "reasoning_content": "hm"}, {}):  # fmt: skip
        messages = [USER, {**called, **thoughts}, {"role": "tool", "tool_call_id": "a",
                    "content": "x"}]  # fmt: skip
        reply = server.post("/tokenize", messages=messages, tools=TOOLS)
        assert reply.status_code == 200, reply.text
        prompts.append(json.dumps(reply.json()["tokens"]))
    assert prompts[0] == prompts[1] == prompts[2] != prompts[3]
    unanswered = [USER, {"role": "assistant", "content": None, "reasoning": "hm"}]
    assert server.post("/tokenize", messages=unanswered).status_code == 200


def test_a_budget_needs_a_model_that_thinks(make_server, tmp_path):
    server = make_server(folder=tool_model.write(tmp_path / "m"), **ROOM)
    reply = server.post(PATH, messages=[USER], thinking_token_budget=5)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "thinking_token_budget"
    assert "completion_tokens_details" not in ask(server, "a")["usage"]
