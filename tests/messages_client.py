"""A strict reader of Anthropic's Messages API, for tests over HTTP."""

from octavo.server.messages_events import complete_part
from serving import parse_named_events

MODEL = "scripted"


def send(server, text="hi", *, path="/v1/messages", **fields):
    body = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": text}]}
    return server.post(path, **{k: v for k, v in {**body, **fields}.items() if v is not None})


def answer(server, text="hi", **fields):
    reply = send(server, text, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(server, text="hi", **fields):
    reply = send(server, text, stream=True, **fields)
    assert reply.headers["content-type"].startswith("text/event-stream")
    return parse_named_events(reply.content)


def folded(events):
    """The message that a client makes of a stream's events."""
    first, last = events[0], events[-2]
    assert [e["type"] for e in (first, last, events[-1])] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    message = {**first["message"], **last["delta"], "usage": last["usage"]}
    assert message.pop("content") == []
    assert first["message"]["stop_reason"] is None
    content, inputs = [], {}
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            index, delta = event["index"], event["delta"]
            field = delta["type"].removesuffix("_delta")
            if field == "input_json":
                inputs[index] = inputs.get(index, "") + delta["partial_json"]
            else:
                content[index][field] += delta[field]
    for index, text in inputs.items():
        content[index]["input"] = complete_part(text)
    return {**message, "content": content}


def both(server, text, **fields):
    """The answer without what differs between two requests, asserted to be equal streamed."""
    whole, streamed = answer(server, text, **fields), folded(stream(server, text, **fields))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        usage = message.pop("usage")
        assert usage["cache_creation_input_tokens"] == 0
        ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(ids)) == len(ids)
        assert all(name.startswith("toolu_") for name in ids)
        message["tokens"] = usage["output_tokens"]
        message["prompt"] = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert whole == streamed
    return whole


def refused(server, status=400, **fields):
    reply = send(server, **fields)
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body["request_id"] == reply.headers["request-id"]
    assert set(body) == {"type", "error", "request_id"}
    return body["error"]


def tokens_of(message):
    return message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
