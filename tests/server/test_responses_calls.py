"""Tools over `/v1/responses`: calls streamed and whole, and agents that send back what they got."""

import json
import logging

import pytest

import tool_model
from responses_client import PATH, both, read_events, refused, respond, stream
from tool_model import call
from tool_model import script as say

WEATHER = {"type": "function", **tool_model.WEATHER["function"]}
CLOCK = {"type": "function", "name": "clock"}
PATCH = {"type": "custom", "name": "patch"}
FILES = {"type": "namespace", "name": "mcp__files", "tools": [
    {**CLOCK, "name": "read"}, {**PATCH, "name": "write"},
]}  # fmt: skip
TOOLS = [WEATHER, CLOCK, PATCH, FILES]
ROME = '{"city": "Rome"}'
BLOCK = 16


@pytest.fixture(scope="module")
def server(tool_server):
    return tool_server


def ask(server, text, **fields):
    fields = {"tools": TOOLS, "max_output_tokens": 400, **fields}
    return both(server, say(server, text), **fields)


def brief(response):
    """Each item as its type and what it says."""
    return [
        (item["type"], item["content"][0]["text"])
        if "content" in item
        else (item["type"], item["name"], item.get("arguments", item.get("input")))
        for item in response["output"]
    ]


WEATHER_CALL = ("function_call", "weather", ROME)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (call(), [WEATHER_CALL]),
        ("Hello", [("message", "Hello")]),
        ("", [("message", "")]),
        ("I look.\n" + call(), [("message", "I look."), WEATHER_CALL]),
        (f"\n\n{call()}\n{call('clock', '{}')}\n",
         [WEATHER_CALL, ("function_call", "clock", "{}")]),
        (call("mcp__files__read", "{}"), [("function_call", "read", "{}")]),
        (call("patch", '{"input": "*** a\\n\\"b\\" č"}'),
         [("custom_tool_call", "patch", '*** a\n"b" č')]),
        (call("mcp__files__write", '{"input": ""}'), [("custom_tool_call", "write", "")]),
        ("a <tool b", [("message", "a <tool b")]),
    ],
)  # fmt: skip
def test_tol_01_calls_are_the_same_streamed_and_whole(server, text, items):
    found = ask(server, text)
    assert brief(found) == items
    assert found["status"] == "completed"
    calls = [item for item in found["output"] if "call_id" in item]
    assert all(item["call_id"].startswith("call_") for item in calls)
    spaces = {item["name"]: item["namespace"] for item in calls}
    assert all(space == ("mcp__files" if name in ("read", "write") else None)
               for name, space in spaces.items())  # fmt: skip


def test_a_call_that_was_cut_off_stays_what_it_was(server):
    text = call()
    for most in range(3, len(tool_model.ids(server.folder, text)), 12):
        found = ask(server, text, max_output_tokens=most)
        assert found["status"] == "incomplete"
        (item,) = found["output"]
        if item["type"] == "function_call":
            assert ROME.startswith(item["arguments"])
            assert (item["status"] == "completed") is (item["arguments"] == ROME)


@pytest.mark.parametrize("before", ["Hello <to", "Hello <tool_call", "a", ""])
def test_tol_05_text_before_a_stop_string_is_neither_lost_nor_markup(server, before):
    found = ask(server, before + "STOP" + call(), stop="STOP")
    assert brief(found) == [("message", before)]
    assert found["status"] == "completed"


def test_choices_that_make_the_model_call(server):
    def called(**fields):
        found = respond(server, "hi", tools=TOOLS, max_output_tokens=300, **fields)
        return [(item["type"], item["name"]) for item in found["output"]]

    assert called(tool_choice={"type": "custom", "name": "patch"})[0] == (
        "custom_tool_call", "patch",
    )  # fmt: skip
    one = called(tool_choice={"type": "function", "name": "clock"}, parallel_tool_calls=False)
    assert one == [("function_call", "clock")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "clock"},
    ]}  # fmt: skip
    assert set(called(tool_choice=allowed, parallel_tool_calls=False)) == {
        ("function_call", "clock")
    }
    free = ask(server, call(), tool_choice="none")
    assert free["output"][0]["content"][0]["text"].strip().startswith("<tool_call>")


def test_the_echo_shows_what_was_offered_and_the_log_what_was_not(server, caplog):
    with caplog.at_level(logging.WARNING, "octavo"):
        odd = [{"type": "web_search"}, CLOCK, {"type": "image_generation"}]
        found = respond(server, "hi", tools=odd, tool_choice="none", max_output_tokens=1)
    assert found["tools"] == [
        {"type": "function", "name": "clock", "description": None, "parameters": {}, "strict": True}
    ]
    assert found["tool_choice"] == "none"
    warnings = [r.getMessage() for r in caplog.records if "cannot run" in r.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].endswith("web_search, image_generation")


def test_tools_among_the_items_are_offered_too(server):
    item = {"type": "additional_tools", "role": "developer", "tools": [PATCH]}
    text = say(server, call("patch", '{"input": "x"}'))
    found = respond(server, [item, {"role": "user", "content": text}], max_output_tokens=99)
    assert brief(found) == [("custom_tool_call", "patch", "x")]


UNENFORCEABLE = {"type": "object", "not": {}}


@pytest.mark.parametrize(
    ("tools", "param", "says"),
    [
        ([{"type": "web_search"}, {**WEATHER, "name": "a b"}], "tools[1].name", "tools[1].name"),
        ([{**WEATHER, "parameters": UNENFORCEABLE}], "tools", "'weather'"),
        ([{**FILES, "tools": [{**CLOCK, "parameters": UNENFORCEABLE}]}], "tools",
         "'mcp__files__clock'"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "("}}],
         "tools", "'patch'"),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_be_enforced_is_refused_by_its_path(server, tools, param, says):
    error = refused(server, tools=tools)
    assert error["param"] == param
    assert says in error["message"]


def test_what_an_agent_sends_back_is_what_the_model_wrote(server):
    """And the prefix cache holds it: each turn computes only what is new."""
    tools = [{"type": "function", "name": "c", "strict": False}]

    def scripted(turn):
        return "go " + say(server, call("c", f'{{"n": {turn}}}') if turn < 10 else "done")

    items = [{"role": "user", "content": scripted(0)}]
    held = 0
    for turn in range(10):
        found = respond(server, items, tools=tools, max_output_tokens=400)
        usage = found["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= held - 2 * BLOCK
        assert usage["input_tokens"] > held
        held = usage["input_tokens"] + usage["output_tokens"]
        (made,) = found["output"]
        assert json.loads(made["arguments"]) == {"n": turn}
        items.append(made)
        items.append({"type": "function_call_output", "call_id": made["call_id"],
                      "output": scripted(turn + 1)})  # fmt: skip
    assert brief(respond(server, items, tools=tools)) == [("message", "done")]


def test_a_custom_call_is_streamed_as_text(server):
    text = say(server, call("patch", '{"input": "a\\nb"}'))
    events = stream(server, text, tools=TOOLS, max_output_tokens=400)
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == "a\nb"
    assert len(deltas) > 1


def message(role, *texts):
    content = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "role": role, "content": content}


def codex(items, **fields):
    """A request in the shape of Codex CLI's."""
    lark = 'start: "*** Begin Patch" /(.|\\n)*/'
    return {
        "model": "hermes",
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [
            {"type": "function", "name": "exec_command", "description": "Run it.", "strict": False,
             "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}},
                            "required": ["cmd"], "additionalProperties": False}},
            {"type": "custom", "name": "apply_patch", "description": "Patch files.",
             "format": {"type": "grammar", "syntax": "lark", "definition": lark}},
            {"type": "web_search", "external_web_access": False},
            {"type": "image_generation", "output_format": "png"},
            {"type": "local_shell"},
            {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}},
            {"type": "namespace", "name": "mcp__docs__", "description": "Docs.", "tools": [
                {"type": "function", "name": "find", "strict": False, "defer_loading": True,
                 "parameters": {"type": "object", "properties": {}}},
            ]},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-thread",
        "client_metadata": {"x-codex-installation-id": "0"},
        **fields,
    }  # fmt: skip


def run(server, items):
    reply = server.post(PATH, **codex(items))
    assert reply.status_code == 200, reply.text
    events = read_events(reply.content)
    assert events[-1]["type"] == "response.completed"
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    return done, events[-1]["response"]


def test_a_session_as_codex_has_it(server):
    probe = server.post(PATH, **codex([], max_output_tokens=1, stream=False))
    assert probe.status_code == 200, probe.text
    steps = [
        call("exec_command", '{"cmd": "ls"}'),
        call("mcp__docs__find", "{}"),
        call("apply_patch", '{"input": "*** Begin Patch"}'),
        "Done.",
    ]
    scripts = [say(server, text) for text in steps]
    items = [
        message("developer", "<permissions>", "read-only"),
        message("user", "<environment_context>"),
        message("user", "go " + scripts[0]),
    ]
    held = 0
    for turn in range(3):
        (made,), response = run(server, items)
        usage = response["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] >= held - 2 * BLOCK
        held = usage["input_tokens"] + usage["output_tokens"]
        # Codex sends back what it knows of an item, and no ids.
        items.append({k: v for k, v in made.items() if k != "id"})
        kind = made["type"] + "_output"
        output = [{"type": "input_text", "text": scripts[turn + 1]}] if turn else scripts[1]
        items.append({"type": kind, "call_id": made["call_id"], "output": output})
    assert [item["type"] for item in items[3::2]] == [
        "function_call", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert (items[5]["name"], items[5]["namespace"]) == ("find", "mcp__docs__")
    (last,), response = run(server, items)
    assert last["content"][0]["text"] == "Done."
    assert [tool.get("name") for tool in response["tools"]] == [
        "exec_command", "apply_patch", "mcp__docs__",
    ]  # fmt: skip
