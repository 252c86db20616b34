"""`/v1/responses` over HTTP, by hand and through the official client."""

import json

import pytest

from responses_client import PATH, both, refused, respond, stream


def text_of(response):
    (message,) = [item for item in response["output"] if item["type"] == "message"]
    return message["content"][0]["text"]


def test_the_shape_of_a_response(server):
    asked = {"metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k", "store": True,
             "safety_identifier": "s", "service_tier": "auto", "temperature": 0.5, "top_p": 0.9,
             "include": ["reasoning.encrypted_content"], "truncation": "disabled",
             "instructions": "Be brief.", "reasoning": {"effort": None, "summary": "auto"},
             "text": {"verbosity": "medium"}, "client_metadata": {"x": "y"}}  # fmt: skip
    found = both(server, server.say("ABC", "DE"), **asked)
    assert text_of(found) == "ABCDE"
    assert found["object"] == "response"
    assert found["id"].startswith("resp_")
    assert found["model"] == "scripted"
    assert (found["status"], found["error"], found["incomplete_details"]) == (
        "completed", None, None,
    )  # fmt: skip
    assert found["usage"]["output_tokens"] == 3
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + 3
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    for name in ("metadata", "user", "prompt_cache_key", "safety_identifier", "temperature",
                 "top_p", "instructions"):  # fmt: skip
        assert found[name] == asked[name]
    assert (found["store"], found["background"], found["service_tier"]) == (False, False, "default")
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert found["reasoning"] == {"effort": None, "summary": "auto"}
    assert (found["tools"], found["tool_choice"], found["parallel_tool_calls"]) == (
        [],
        "auto",
        True,
    )


def test_a_response_that_is_cut_off_is_incomplete(server):
    found = both(server, server.say("ABC", "DE"), max_output_tokens=1)
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["output"][0]["status"] == "incomplete"
    assert text_of(found) == "ABC"


def test_str_01_a_stop_string_ends_a_response_everywhere(server):
    found = both(server, server.say("ABC", "DE", "FG", "HI"), stop=["DEFG"])
    assert (text_of(found), found["status"]) == ("ABC", "completed")


@pytest.mark.parametrize("given", ["", []])
def test_an_empty_input_is_refused_and_a_probe_of_one_token_is_answered(server, given):
    assert refused(server, input=given)["param"] == "input"
    probe = respond(server, given, max_output_tokens=1)
    assert (probe["status"], probe["usage"]["output_tokens"]) == ("incomplete", 1)


def test_instructions_are_the_system_message_of_a_chat(server):
    found = respond(server, "hi", instructions="Rules", max_output_tokens=1)
    messages = [{"role": "system", "content": "Rules"}, {"role": "user", "content": "hi"}]
    same = server.post("/tokenize", messages=messages).json()
    assert found["usage"]["input_tokens"] == same["count"]


def test_a_form_is_kept_to(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    found = both(server, "hi", text={"format": form}, max_output_tokens=200)
    assert json.loads(text_of(found))["a"] in (1, 2)
    assert found["text"]["format"] == form
    found = both(server, "hi", structured_outputs={"choice": ["yes", "no"]})
    assert text_of(found) in ("yes", "no")


def test_logprobs_are_included_when_they_are_asked_for(server):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = both(server, server.say("A🌶"), **fields)["output"][0]["content"][0]
    raw = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
    assert raw.decode() == part["text"] == "A🌶"
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    told = [
        entry
        for event in stream(server, server.say("A🌶"), **fields)
        if event["type"] == "response.output_text.delta"
        for entry in event["logprobs"]
    ]
    assert told == part["logprobs"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"conversation": "conv_1"}, "conversation", "keeps no conversations"),
        ({"background": True}, "background", "use stream"),
        ({"prompt": {"id": "p"}}, "prompt", "keeps no prompts"),
        ({"truncation": "auto"}, "truncation", "never left out"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"text": {"colour": 1}}, "text.colour", "unknown field"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name",
         "text.format.name is missing"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
         "text.format", "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'huge'"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort", "expected"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "as it is"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not supported"),
        ({"include": ["everything"]}, "include[0]", "'everything'"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"messages": []}, "messages", "input"),
        ({"response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"n": 2}, "n", "one answer"),
        ({"temperature": 9}, "temperature", "temperature"),
        ({"colour": 1}, "colour", "unknown field"),
        ({"input": None}, "input", "missing"),
        ({"input": 3}, "input", "expected"),
        ({"input": [{"type": "nothing"}]}, "input[0].type", "one of message"),
        ({"metadata": {"a": 1}}, "metadata", "expected"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"tool_choice": "required"}, "tool_choice", "no tool"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_by_its_field(server, fields, param, says):
    error = refused(server, **fields)
    assert error["param"] == param or error["param"].startswith(param + "["), error
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_model_that_is_not_served_and_a_prompt_that_is_too_long(server):
    assert refused(server, 404, model="other")["code"] == "model_not_found"
    assert refused(server, input="x" * 100_000)["code"] == "context_length_exceeded"


def test_an_error_of_the_template_is_one_of_the_input(make_server, tmp_path):
    from serving import write_model

    folder = write_model(tmp_path / "strict")
    settings = folder / "tokenizer_config.json"
    template = "{{ raise_exception('messages must alternate') }}"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    error = refused(make_server(folder=folder))
    assert error["param"] == "input"
    assert "messages must alternate" in error["message"]


def test_tools_that_cannot_run_here_are_left_out(server):
    found = respond(server, server.say("DE"), tools=[{"type": "web_search"}], tool_choice="auto")
    assert (found["tools"], text_of(found)) == ([], "DE")


def test_responses_are_not_kept(server):
    made = respond(server, "hi", max_output_tokens=1)
    for method in ("GET", "DELETE"):
        reply = server.http.request(method, f"{PATH}/{made['id']}")
        assert reply.status_code == 404
        assert "not kept" in reply.json()["error"]["message"]


def test_an_error_is_the_last_event_of_its_stream(server):
    events = stream(server, "!fail")
    assert [e["type"] for e in events] == [
        "response.created", "response.in_progress", "response.failed",
    ]  # fmt: skip
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "told to fail" in failed["error"]["message"]
    assert refused(server, 500, input="!fail")["code"] == "engine_error"
    server.assert_alive()


def test_models_have_the_list_that_codex_looks_for(server):
    assert server.http.get("/v1/models").json()["models"] == []
