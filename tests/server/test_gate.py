"""What a draining server answers, over real sockets."""

import http.client
import json
import socket
import threading

import httpx
import pytest

from serving import wait_until

BODY = {"prompt": "!slow", "max_tokens": 20, "ignore_eos": True}
KEY = {"Authorization": "Bearer k", "Content-Type": "application/json"}


class Held:
    """A request in progress for as long as a test likes: the half of its body is missing."""

    def __init__(self, server):
        self._body = json.dumps({**BODY, "max_tokens": 3}).encode()
        self._client = http.client.HTTPConnection("127.0.0.1", server.port)
        self._client.putrequest("POST", "/v1/completions")
        for name, value in {**KEY, "Content-Length": str(len(self._body))}.items():
            self._client.putheader(name, value)
        self._client.endheaders(self._body[:10])
        wait_until(lambda: server.runner._gate._in_progress == 1)

    def answer(self):
        self._client.send(self._body[10:])
        return self._client.getresponse()

    def close(self):
        self._client.close()


@pytest.fixture
def draining(make_server):
    """A server in a drain: (server, a connection that was kept alive, lines of a stream)."""
    server = make_server({"drain_timeout": 30, "api_key": ("k",)})
    kept = http.client.HTTPConnection("127.0.0.1", server.port)
    kept.request("GET", "/v1/models", headers=KEY)
    assert kept.getresponse().read()
    held, lines, begun = Held(server), [], threading.Event()

    def stream():
        url = server.url + "/v1/completions"
        body = {**BODY, "stream": True}
        with httpx.stream("POST", url, json=body, headers=KEY, timeout=30) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                begun.set()

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(20)
    server.loop.call_soon_threadsafe(server.runner.drain)
    wait_until(lambda: server.service.draining)
    yield server, kept
    # What was in progress goes on to its end.
    thread.join(20)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len("".join(event["choices"][0]["text"] for event in events)) == BODY["max_tokens"]
    assert "data: [DONE]" in lines
    reply = held.answer()
    assert (reply.status, reply.headers["connection"]) == (200, "close")
    assert json.loads(reply.read())["usage"]["completion_tokens"] == 3
    held.close()
    kept.close()
    assert server.end() == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port))


def test_srv_08_while_it_drains_the_listener_answers(draining):
    server, kept = draining
    for method, path, body in (
        ("GET", "/health", None), ("POST", "/v1/completions", BODY), ("GET", "/v1/models", None),
        ("POST", "/v1/completions", {"prompt": "x" * 500_000}),
    ):  # fmt: skip
        reply = httpx.request(method, server.url + path, json=body, headers=KEY)
        assert reply.status_code == 503, (path, reply.text)
        assert reply.json()["error"]["message"] == "the server is shutting down"
        assert reply.json()["error"]["code"] == "unavailable"
        assert reply.headers["retry-after"] == "1"
        assert reply.headers["connection"] == "close"
    # A connection that was kept alive gets the same answer, and is closed after it.
    kept.request("POST", "/v1/completions", json.dumps(BODY), KEY)
    reply = kept.getresponse()
    assert (reply.status, reply.headers["connection"]) == (503, "close")
    # The drain can be watched, with the key.
    assert httpx.get(server.url + "/metrics").status_code == 401
    reply = httpx.get(server.url + "/metrics", headers=KEY)
    assert (reply.status_code, reply.headers["connection"]) == (200, "close")


def test_a_drain_without_requests_ends_at_once(make_server):
    server = make_server({"drain_timeout": 60})
    server.loop.call_soon_threadsafe(server.runner.drain)
    assert server.end() == 0


def test_a_second_signal_ends_also_what_still_arrives(make_server):
    server = make_server({"drain_timeout": 60})
    held = Held(server)
    for _ in range(2):
        server.loop.call_soon_threadsafe(server.runner.drain)
    assert server.end() == 0
    held.close()
