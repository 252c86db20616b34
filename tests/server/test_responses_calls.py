"""Tools over `/v1/responses`: calls streamed and whole, and agents that send back what they got."""

import json
import logging

import pytest

import tool_model
from responses_client import both, refused, respond, stream
from serving import Server
from tool_model import call

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
def server(tmp_path_factory, engine_path):
    folder = tool_model.write(tmp_path_factory.mktemp("models") / "hermes")
    with Server(folder, {}, max_model_len=8192, num_gpu_blocks_override=2049) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    import openai  # its import takes a second

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def say(server, text):
    return f"say [{tool_model.ids(server.folder, text)}]"


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
    for most in range(1, len(tool_model.ids(server.folder, text)), 5):
        found = ask(server, text, max_output_tokens=most)
        assert found["status"] == "incomplete"
        (item,) = found["output"]
        if item["type"] == "function_call":
            assert ROME.startswith(item["arguments"])
            assert (item["status"] == "completed") is (item["arguments"] == ROME)


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


def test_the_official_client_s_loop_of_calls(client, server):
    items = [{"role": "user", "content": say(server, "I look.\n" + call())}]
    with client.responses.stream(
        model="hermes", input=items, tools=TOOLS, max_output_tokens=400
    ) as events:
        told = [event.type for event in events]
        first = events.get_final_response()
    assert "response.function_call_arguments.delta" in told
    message, made = first.output
    assert (message.content[0].text, made.name, made.arguments) == ("I look.", "weather", ROME)
    items += first.output
    items.append({"type": "function_call_output", "call_id": made.call_id,
                  "output": "sunny " + say(server, "It is sunny.")})  # fmt: skip
    last = client.responses.create(model="hermes", input=items, tools=TOOLS)
    assert last.output_text == "It is sunny."
    assert last.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - BLOCK


def test_the_official_client_parses_arguments_of_a_model_of_pydantic(client, server):
    import openai
    from pydantic import BaseModel

    class weather(BaseModel):  # noqa: N801 - the tool's name
        city: str

    tool = openai.pydantic_function_tool(weather)["function"]
    parsed = client.responses.parse(
        model="hermes",
        input=say(server, call()),
        tools=[{"type": "function", **tool}],
        max_output_tokens=400,
    )
    assert parsed.output[0].parsed_arguments == {"city": "Rome"}


def test_a_custom_call_is_streamed_as_text(server):
    text = say(server, call("patch", '{"input": "a\\nb"}'))
    events = stream(server, text, tools=TOOLS, max_output_tokens=400)
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == "a\nb"
    assert len(deltas) > 1
