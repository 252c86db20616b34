"""Tools over `/v1/chat/completions`: what is called, streamed and whole, and what is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import tool_model
from serving import Server
from tool_model import (
    CLOCK,
    NOW,
    PATH,
    ROME,
    TOOLS,
    USER,
    WEATHER,
    ask,
    both,
    call,
    fold,
    say,
    without_ids,
)  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory, engine_path):
    folder = tool_model.write(tmp_path_factory.mktemp("models") / "hermes")
    with Server(folder, {}, max_model_len=4096, num_gpu_blocks_override=2049) as running:
        yield running


@pytest.mark.parametrize(
    ("text", "message", "reason"),
    [
        (call(), {"content": None, "tool_calls": [ROME]}, "tool_calls"),
        ("Hello", {"content": "Hello"}, "stop"),
        ("", {"content": ""}, "stop"),
        ("I look.\n" + call(), {"content": "I look.", "tool_calls": [ROME]}, "tool_calls"),
        (f"{call()}\n{call('clock', '{}')}",
         {"content": None, "tool_calls": [ROME, NOW]}, "tool_calls"),
        (call(arguments='{"city": "</tool"}'),
         {"content": None, "tool_calls": [{**ROME, "arguments": '{"city": "</tool"}'}]},
         "tool_calls"),
        ("a <tool b", {"content": "a <tool b"}, "stop"),
        ('{"name": "weather"}', {"content": '{"name": "weather"}'}, "stop"),
    ],
)  # fmt: skip
def test_tol_01_calls_are_the_same_streamed_and_whole(server, text, message, reason):
    assert both(server, text) == (message, reason)


def test_a_call_that_was_cut_off_stays_what_it_was(server):
    text = call()
    size = len(tool_model.ids(server.folder, text))
    for most in (*range(1, size, 6), size - 2, size - 1):
        message, reason = both(server, text, max_tokens=most)
        assert reason == "length"
        (arguments,) = [c["arguments"] for c in message.get("tool_calls", [])] or [""]
        assert ROME["arguments"].startswith(arguments)
        # Before the name is known it is no call, and content as it was written.
        assert text.startswith(message["content"] or "")
        assert not (message["content"] and arguments)


@pytest.mark.parametrize("stop", ["STOP", "</tool_call>", "Ro", 'e"}'])
def test_tol_05_text_before_a_stop_string_is_neither_lost_nor_markup(server, stop):
    wanted = {
        "STOP": ({"content": "Hello <to"}, "stop"),
        "</tool_call>": ({"content": "Hello <to"}, "stop"),
    }
    if stop in wanted:
        text = "Hello <to" + (stop if stop == "STOP" else "</tool_call>")
        assert both(server, text, stop=stop) == wanted[stop]
    text = call()
    message, reason = both(server, text, stop=stop)
    if stop == "STOP":
        assert reason == "tool_calls"
        return
    (found,) = message["tool_calls"]
    cut = text.partition(stop)[0].partition('"arguments": ')[2].removesuffix("}\n")
    assert found == {"name": "weather", "arguments": cut}
    assert reason == ("tool_calls" if cut == ROME["arguments"] else "stop")


def test_tol_05_what_is_held_back_comes_at_the_end(server):
    for text in ("Hello <tool", "Hello <tool_call", "Hello <"):
        assert both(server, text) == ({"content": text}, "stop")
        assert both(server, text, max_tokens=len(text)) == ({"content": text}, "length")


def test_several_choices_have_calls_of_their_own(server):
    reply = ask(server, call(), n=3)
    calls = [c["message"]["tool_calls"] for c in reply["choices"]]
    assert len({c[0]["id"] for c in calls}) == 3
    events = server.events(PATH, messages=say(server, call()), tools=TOOLS, n=3, max_tokens=400)
    for index in range(3):
        message, reason = fold(events, index)
        assert without_ids(message)["tool_calls"] == [ROME]
        assert reason == "tool_calls"


def test_a_call_that_must_be_made(server):
    assert both(server, call(), tool_choice="required")[1] == "tool_calls"
    # The script is only where the grammar starts to look: the rest is forced.
    message, reason = both(server, "Hello", tool_choice="required", max_tokens=2000)
    assert message["tool_calls"][0]["name"] in ("weather", "clock")
    named = {"type": "function", "function": {"name": "clock"}}
    message, reason = both(server, call("clock", "{}"), tool_choice=named)
    assert message == {"content": None, "tool_calls": [NOW]}
    assert reason == "stop", "as OpenAI has it where the tool was named"


def test_one_call_ends_an_answer_that_may_have_no_other(server):
    text = f"{call()}\n{call('clock', '{}')}"
    for choice in ("auto", "required"):
        found = both(server, text, parallel_tool_calls=False, tool_choice=choice)
        assert found == ({"content": None, "tool_calls": [ROME]}, "tool_calls")


def test_tools_that_may_be_called_now(server):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    found = both(server, call("clock", "{}"), tool_choice=choice)
    assert found == ({"content": None, "tool_calls": [NOW]}, "tool_calls")
    seen = ask(server, "x", tool_choice=choice)["usage"]["prompt_tokens"]
    assert seen == ask(server, "x")["usage"]["prompt_tokens"], "the prompt shows all"


def test_without_a_choice_text_is_text(server):
    message, reason = both(server, call(), tool_choice="none")
    assert message == {"content": call()}
    assert reason == "stop"


def test_tools_are_not_shown_where_the_operator_says_so(make_server, server):
    hidden = make_server(
        {"exclude_tools_when_tool_choice_none": True}, folder=server.folder, max_model_len=4096,
        num_gpu_blocks_override=513,
    )  # fmt: skip
    counts = [ask(s, "x", tool_choice="none")["usage"]["prompt_tokens"] for s in (server, hidden)]
    assert counts[0] > counts[1]


def test_log_probabilities_and_ids_are_those_of_all_tokens(server):
    ids = [*tool_model.ids(server.folder, call()), 257]
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    choice = ask(server, call(), **fields)["choices"][0]
    assert choice["token_ids"] == ids
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(tokens[:-1]) == call()
    body = {"messages": say(server, call()), "tools": TOOLS, "max_tokens": 400, **fields}
    events = server.events(PATH, **body)
    parts = [c for e in events for c in e["choices"]]
    assert [i for c in parts for i in c["token_ids"]] == ids
    assert [e for c in parts for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert without_ids(fold(events)[0])["tool_calls"] == [ROME]


ID = "call_1"
CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": ID, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
]}  # fmt: skip
ANSWERED = {"role": "tool", "tool_call_id": ID, "content": "sunny"}


def test_calls_and_their_results_are_shown_to_the_model(server):
    messages = [USER, CALLED, ANSWERED]
    tokens = server.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert call() + "<|eot|><|tool|>sunny<|eot|>" in text
    assert '"name": "clock"' in text
    parts = [USER, CALLED, {**ANSWERED, "content": [{"type": "text", "text": "sunny"}]}]
    assert server.post("/tokenize", messages=parts, tools=TOOLS).json()["tokens"] == tokens
    indexed = {**CALLED, "tool_calls": [{**CALLED["tool_calls"][0], "index": 0}]}
    same = server.post("/tokenize", messages=[USER, indexed, ANSWERED], tools=TOOLS)
    assert same.json()["tokens"] == tokens


def changed_call(**changes):
    call = CALLED["tool_calls"][0]
    function = {**call["function"], **changes.pop("function", {})}
    return [USER, {**CALLED, "tool_calls": [{**call, "function": function, **changes}]}]


def function(**changes):
    return [{"type": "function", "function": {**WEATHER["function"], **changes}}]


DEEP = {"type": "object", "properties": {"a": {"type": "string"}}}
for _ in range(70):
    DEEP = {"type": "object", "properties": {"a": DEEP}}

BAD = [
    ({"tools": []}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": ["weather"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
    ({"tools": function(name="a b")}, "tools[0].function.name"),
    ({"tools": function(name="x" * 65)}, "tools[0].function.name"),
    ({"tools": function(name=5)}, "tools[0].function.name"),
    ({"tools": function(description=5)}, "tools[0].function.description"),
    ({"tools": function(strict="yes")}, "tools[0].function.strict"),
    ({"tools": function(arguments={})}, "tools[0].function.arguments"),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
    ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters.type"),
    ({"tools": function(parameters={"type": "object", "maxLenght": 5})}, "tools"),
    ({"tools": function(parameters={"type": "object", "not": {}})}, "tools"),
    ({"tools": function(parameters=DEEP)}, "tools"),
    ({"tools": function(parameters={"type": "object", "properties": {
        "a": {"type": "string", "pattern": "(?=a)b"}}})}, "tools"),
    ({"tools": function(parameters={"type": "object", "properties": {
        "a": {"enum": ["x" * 99 + str(i) for i in range(9999)]}}})}, "tools"),
    ({"tools": function(parameters={"$ref": "#/$defs/a", "$defs": {"a": {
        "type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}}})},
     "tools"),
    ({"tools": function(description="x" * 1_000_000)}, "tools"),
    ({"tools": [CLOCK] * 600}, "tools"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": None, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
     "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "wether"}}},
     "tool_choice.function.name"),
    ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "weather"}}}, "tool_choice.type"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
     "tool_choice.allowed_tools.mode"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [WEATHER["function"]]}, "functions"),
    ({"function_call": {"name": "weather"}}, "function_call"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
     "reasoning_effort"),
    ({"messages": [USER, ANSWERED]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLED, {**ANSWERED, "tool_call_id": "other"}]},
     "messages[2].tool_call_id"),
    ({"messages": [USER, ANSWERED, CALLED]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLED, {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
    ({"messages": [USER, CALLED, {"role": "tool", "tool_call_id": ID}]}, "messages[2].content"),
    ({"messages": [{**USER, "tool_calls": CALLED["tool_calls"]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "tool_call_id": ID}]}, "messages[0].tool_call_id"),
    ({"messages": [{**USER, "reasoning": "hm"}]}, "messages[0].reasoning"),
    ({"messages": [USER, {**CALLED, "function_call": {"name": "weather", "arguments": "{}"}}]},
     "messages[1].function_call"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [USER, {"role": "assistant", "content": "x", "reasoning": "a",
                          "reasoning_content": "b"}]}, "messages[1].reasoning_content"),
    ({"messages": changed_call(function={"arguments": "{"})},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": changed_call(function={"arguments": "[1]"})},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": changed_call(function={"arguments": '{"a": NaN}'})},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": changed_call(function={"arguments": "[" * 9999})},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": changed_call(function={"name": None})},
     "messages[1].tool_calls[0].function.name"),
    ({"messages": changed_call(function={"args": "{}"})},
     "messages[1].tool_calls[0].function.args"),
    ({"messages": changed_call(id=None)}, "messages[1].tool_calls[0].id"),
    ({"messages": changed_call(type="custom")}, "messages[1].tool_calls[0].type"),
    ({"messages": [USER, {**CALLED, "tool_calls": [5]}]}, "messages[1].tool_calls[0]"),
    ({"messages": [USER, {**CALLED, "tool_calls": "x"}]}, "messages[1].tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_input_is_one_error_that_names_its_field(server, fields, param):
    body = {"messages": [USER], "tools": TOOLS, "max_tokens": 4, **fields}
    for stream in (False, True):
        reply = server.post(PATH, stream=stream, **body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == param, error
        assert len(error["message"]) < 700


def test_bad_input_disturbs_nobody(server):
    """A stream beside it goes on while all of it is refused."""
    said = [{"role": "user", "content": f"!slow {say(server, call())[0]['content']}"}]
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(server.events, PATH, messages=said, tools=TOOLS, max_tokens=400)
        heavy = [fields for fields, param in BAD if param == "tools"]
        bodies = [{"messages": [USER], "tools": TOOLS, **fields} for fields in heavy]
        assert {server.post(PATH, **body).status_code for body in bodies} == {400}
        message, reason = fold(beside.result())
    assert (without_ids(message)["tool_calls"], reason) == ([ROME], "tool_calls")


def test_a_model_with_no_known_format_is_only_made_to_call(make_server, tmp_path):
    template = tool_model.TEMPLATE.replace("tool_call>", "call>")
    server = make_server(folder=tool_model.write(tmp_path / "m", template), max_model_len=4096,
                         num_gpu_blocks_override=513)  # fmt: skip
    reply = server.post(PATH, messages=[USER], tools=TOOLS)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    assert "hermes" in error["message"]
    assert both(server, call(), tool_choice="required")[0]["tool_calls"] == [ROME]


def test_a_flag_names_the_format_and_the_start_says_which_it_is(make_server, tmp_path, caplog):
    template = tool_model.TEMPLATE.replace("tool_call>", "call>")
    folder = tool_model.write(tmp_path / "m", template)
    with caplog.at_level("INFO"):
        server = make_server(folder=folder, tool_call_parser="qwen3_json", max_model_len=4096,
                             num_gpu_blocks_override=513)  # fmt: skip
    assert any("tool calls: hermes" in record.getMessage() for record in caplog.records)
    assert both(server, call())[0]["tool_calls"] == [ROME]
    name = "vllm:tool_call_parser_invocations_total"
    assert server.metric(name, outcome="calls") == 2
    ask(server, "Hello")
    assert server.metric(name, outcome="no_calls") == 1


def test_tol_01_the_official_client_puts_a_stream_together(server):
    import openai  # its import takes a second

    tools = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    text = f"I look.\n{call()}\n{call('clock', '{}')}"
    asked = {"model": "hermes", "messages": say(server, text), "tools": tools, "max_tokens": 400}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
        assert calls == [("weather", '{"city": "Rome"}'), ("clock", "{}")]
    # As a client sends it back, with all fields that it knows.
    back = [*asked["messages"], whole.message.model_dump()]
    back += [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in
             whole.message.tool_calls]  # fmt: skip
    reply = server.post(PATH, messages=back, tools=TOOLS, max_tokens=4)
    assert reply.status_code == 200, reply.text
