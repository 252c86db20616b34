"""What a draining server answers, over real sockets."""

import http.client
import json
import socket
import threading

import httpx
import pytest

from serving import wait_until

SLOW = {"prompt": "!slow", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def draining(make_server):
    """A server that drains, with one stream in progress; (server, the stream's texts)."""
    server = make_server({"drain_timeout": 20, "api_key": ("k",)})
    key = {"Authorization": "Bearer k"}
    kept = http.client.HTTPConnection("127.0.0.1", server.port)
    kept.request("GET", "/v1/models", headers=key)
    assert kept.getresponse().read()
    lines, begun = [], threading.Event()

    def stream():
        body = {**SLOW, "stream": True}
        url = server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, headers=key, timeout=30) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(20)
    server.loop.call_soon_threadsafe(server.runner.drain)
    wait_until(lambda: server.service.draining)
    yield server, kept, lines
    thread.join(20)
    assert not thread.is_alive()
    # The stream went on to its end.
    events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    assert len("".join(event["choices"][0]["text"] for event in events)) == SLOW["max_tokens"]
    assert "data: [DONE]" in lines
    assert server.end() == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port))


def test_srv_08_while_it_drains_the_listener_answers(draining):
    server, kept, lines = draining
    key = {"Authorization": "Bearer k"}
    for method, path, body in (
        ("GET", "/health", None), ("POST", "/v1/completions", SLOW), ("GET", "/v1/models", None),
        ("POST", "/v1/completions", {"prompt": "x" * 500_000}),
    ):  # fmt: skip
        reply = httpx.request(method, server.url + path, json=body, headers=key)
        assert reply.status_code == 503, (path, reply.text)
        assert reply.json()["error"]["message"] == "the server is shutting down"
        assert reply.json()["error"]["code"] == "unavailable"
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["connection"] == "close"
    # A connection that was kept alive gets the same answer, and is closed after it.
    kept.request("POST", "/v1/completions", json.dumps(SLOW), {"Content-Type": "application/json"})
    reply = kept.getresponse()
    assert (reply.status, reply.headers["connection"]) == (503, "close")
    # The drain can be watched, with the key.
    assert httpx.get(server.url + "/metrics").status_code == 401
    reply = httpx.get(server.url + "/metrics", headers=key)
    assert (reply.status_code, reply.headers["connection"]) == (200, "close")
    assert "data: [DONE]" not in lines


def test_a_drain_without_requests_ends_at_once(make_server):
    server = make_server({"drain_timeout": 60})
    server.loop.call_soon_threadsafe(server.runner.drain)
    assert server.end() == 0
