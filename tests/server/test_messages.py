"""Anthropic's Messages API over HTTP: whole and streamed answers, counts, errors, the cache."""

import asyncio
import contextlib

import pytest

from messages_client import answer, both, refused, send, stream, tokens_of
from octavo.server import messages

MODEL = "scripted"


def test_the_shape_of_an_answer(server):
    found = both(server, server.say("ABC", "DE"))
    assert found.pop("prompt") > 20
    assert found == {
        "type": "message", "role": "assistant", "model": MODEL, "tokens": 3,
        "content": [{"type": "text", "text": "ABCDE"}],
        "stop_reason": "end_turn", "stop_sequence": None,
    }  # fmt: skip
    assert both(server, server.say())["content"] == []


@pytest.mark.parametrize(
    ("fields", "text", "ending"),
    [
        ({"max_tokens": 2}, "ABCDE", ("max_tokens", None)),
        ({"stop_sequences": ["CD", "FG"]}, "AB", ("stop_sequence", "CD")),
        ({"stop_sequences": ["FGH"]}, "ABCDE", ("stop_sequence", "FGH")),
        ({"stop_sequences": ["no"]}, "ABCDEFGHI", ("end_turn", None)),
    ],
)
def test_why_an_answer_ends(server, fields, text, ending):
    found = both(server, server.say("ABC", "DE", "FG", "HI"), **fields)
    assert found["content"] == [{"type": "text", "text": text}]
    assert (found["stop_reason"], found["stop_sequence"]) == ending


def test_the_ids_of_a_request(server):
    for streamed in (False, True):
        reply = server.http.post(
            "/v1/messages",
            headers={"X-Request-Id": "mine"},
            json={"model": MODEL, "max_tokens": 4, "stream": streamed,
                  "messages": [{"role": "user", "content": "x"}]},
        )  # fmt: skip
        assert reply.headers["request-id"] == reply.headers["x-request-id"] == "mine"
        assert '"id":"msg_mine"' in reply.text


def test_a_final_answer_is_continued(server):
    messages = [{"role": "user", "content": server.say("DE")},
                {"role": "assistant", "content": "AB"}]  # fmt: skip
    whole = answer(server, messages=messages)
    assert whole["content"] == [{"type": "text", "text": "DE"}]
    # A turn that ends with the text, without the end of a turn and the start of another.
    opened = answer(server, messages=messages[:1])
    assert tokens_of(whole) == tokens_of(opened) + 2


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"system": "Be brief."}, {"system": [{"type": "text", "text": "a"}]},
        {"thinking": {"type": "disabled"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ď🌶<|eot|>"}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
    ],
)  # fmt: skip
def test_a_count_is_the_length_of_the_prompt(server, fields):
    counted = send(server, path="/v1/messages/count_tokens", max_tokens=None, **fields)
    assert counted.json() == {"input_tokens": tokens_of(answer(server, max_tokens=4, **fields))}


def test_errors_have_anthropics_shape(server):
    assert refused(server, max_tokens=None)["message"] == "max_tokens is missing"
    assert refused(server, 404, model="other")["type"] == "not_found_error"
    assert "exceed context limit" in refused(server, max_tokens=4000)["message"]
    long = refused(server, text="x" * 600)
    assert long["type"] == "invalid_request_error"
    assert long["message"].startswith("prompt is too long: ")
    reply = send(server, path="/v1/messages/count_tokens", text="x" * 5000, max_tokens=None)
    assert reply.json()["error"]["message"].startswith("prompt is too long: ")
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/x", 404)):
        reply = server.http.request(method, path)
        assert (reply.status_code, reply.json()["type"]) == (status, "error")
    raw = server.http.post("/v1/messages", content=b"{", headers={"content-type": "text/plain"})
    assert raw.json()["error"]["type"] == "invalid_request_error"


def test_keys_and_sizes_are_refused_in_anthropics_shape(make_server):
    server = make_server({"api_key": ("k",), "max_body_mb": 0.01})
    assert refused(server, 401)["type"] == "authentication_error"
    for headers in ({"x-api-key": "k"}, {"Authorization": "Bearer k"}):
        server.http.headers = headers
        assert answer(server, server.say("A"))["stop_reason"] == "end_turn"
    assert refused(server, 413, text="x" * 20_000)["type"] == "request_too_large"


def test_a_failure_in_a_stream_is_an_event_and_the_last(server):
    *_, last = stream(server, "!fail")
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert refused(server, 500, text="!fail")["type"] == "api_error"
    server.assert_alive()


def test_any_of_the_served_names_will_do(make_server):
    server = make_server({"served_model_name": ("claude-sonnet", "claude-haiku")})
    for name in ("claude-sonnet", "claude-haiku"):
        assert answer(server, model=name)["model"] == name
    assert refused(server, 404, model=MODEL)["type"] == "not_found_error"


def test_a_stream_that_waits_for_its_first_token_pings(monkeypatch):
    monkeypatch.setattr(messages, "PING_SECONDS", 0.001)
    ended = []

    async def run(leave):
        go = asyncio.Event()

        async def parts():
            try:
                await go.wait()
                yield "first"
                yield "second"
            finally:
                ended.append(leave)

        found = []
        async with contextlib.aclosing(messages._with_pings(parts())) as stream:
            async for part in stream:
                found.append(part)
                if found == [None, None]:
                    if leave:
                        return
                    go.set()
        assert [part for part in found if part] == ["first", "second"]

    asyncio.run(run(leave=False))
    asyncio.run(run(leave=True))
    assert ended == [False, True]


def test_a_stream_without_a_token_ends():
    async def run():
        async def parts():
            return
            yield

        return [part async for part in messages._with_pings(parts())]

    assert asyncio.run(run()) == []


def test_a_model_without_a_format_of_calls_can_be_made_to_call(server):
    tool = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
    assert "tool_choice 'any'" in refused(server, tools=[tool])["message"]
    forced = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    found = answer(server, max_tokens=100, temperature=0, **forced)
    assert [block["name"] for block in found["content"]] == ["clock"]
    counted = send(server, path="/v1/messages/count_tokens", max_tokens=None, **forced)
    assert counted.json()["input_tokens"] == tokens_of(found)
