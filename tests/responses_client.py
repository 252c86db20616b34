"""Asking `/v1/responses` in tests, whole and streamed, with what a stream must be like."""

from serving import parse_named_events

PATH = "/v1/responses"
IDS = ("id", "created_at", "completed_at")


def respond(server, given, /, **fields):
    reply = server.post(PATH, input=given, **{"max_output_tokens": 64, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(server, status=400, **fields):
    reply = server.post(PATH, **{"input": "hi", **fields})
    assert reply.status_code == status, reply.text
    return reply.json()["error"]


def read_events(raw):
    """Of a stream, which are numbered from 0."""
    found = parse_named_events(raw)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(server, given, /, **fields):
    reply = server.post(PATH, input=given, stream=True, **{"max_output_tokens": 64, **fields})
    assert reply.status_code == 200, reply.text
    return read_events(reply.content)


def without_ids(response):
    kept = {name: value for name, value in response.items() if name not in IDS}
    kept["output"] = [
        {k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]
    ]
    kept["usage"] = kept["usage"] and {**kept["usage"], "input_tokens_details": None}
    return kept


def both(server, given, /, **fields):
    """The response, asserted to be the same whole and at the end of a stream."""
    whole = respond(server, given, **fields)
    events = stream(server, given, **fields)
    first, last = events[0]["response"], events[-1]["response"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (first["output"], first["status"], first["usage"]) == ([], "in_progress", None)
    assert events[-1]["type"] == f"response.{last['status']}"
    assert first["id"] == last["id"]
    assert without_ids(last) == without_ids(whole)
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert done == last["output"]
    return whole
