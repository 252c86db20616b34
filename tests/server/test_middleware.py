"""The key and the size of bodies, over raw sockets where a client library would be too polite."""

import asyncio
import contextlib
import json
import logging
import socket

import pytest

from octavo.server.errors import HTTPError
from octavo.server.middleware import BodyLimit, KeyGuard

KEY = "s3cret-key"


def send(server, head: str, body: bytes = b"", *, parts=(), seconds=10):
    """One request as raw bytes: (status, body) of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as raw:
        raw.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        with contextlib.suppress(OSError):  # it was refused before all was sent
            for part in parts:
                raw.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # much that was sent was not read
            while not complete(answer) and (piece := raw.recv(65536)):
                answer += piece
    headers, _, text = answer.partition(b"\r\n\r\n")
    return int(headers.split()[1]) if headers else None, text


def complete(answer: bytes) -> bool:
    headers, _, text = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in headers.lower().split(b"\r\n")
               if line.startswith(b"content-length:")]  # fmt: skip
    return bool(lengths) and len(text) >= int(lengths[0])


POST = "POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\n"


def test_srv_12_a_declared_giant_is_refused_before_it_comes(server):
    status, text = send(server, POST + f"Content-Length: {2**30}")
    assert status == 413
    assert json.loads(text)["error"]["code"] == "body_too_large"


def test_srv_12_a_chunked_giant_is_refused_when_it_is_seen(make_server):
    server = make_server({"max_body_mb": 1})
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    status, text = send(server, POST + "Transfer-Encoding: chunked", parts=[chunk] * 64)
    assert status == 413
    assert len(text) < 1000
    server.assert_alive()


def test_srv_12_many_headers_and_deep_nesting(server):
    status, _ = send(server, POST + "\n".join(f"X-{i}: y" for i in range(100_000)))
    assert status in (400, 431, None)
    deep = b"[" * 100_000
    status, text = send(server, POST + f"Content-Length: {len(deep)}", deep)
    assert status == 400
    assert b"nested" in text
    server.assert_alive()


def test_srv_12_a_valid_megabyte_is_read_and_errors_stay_small(server):
    reply = server.post("/v1/completions", prompt="x" * 2**20)
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    reply = server.post("/v1/chat/completions", messages=[{"role": 5}] * 20_000)
    assert reply.status_code == 400
    assert len(reply.content) < 1000


@pytest.mark.parametrize("media", ["text/plain", "", "application/x-www-form-urlencoded"])
def test_lim_06_other_media_types_are_refused(server, media):
    reply = server.http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": media}
    )
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


async def call(app, path, headers=(), body=()):
    """Run an ASGI app on one request; returns what it sent."""
    sent, parts = [], list(body)
    scope = {"type": "http", "path": path, "headers": list(headers), "method": "POST"}

    async def receive():
        await asyncio.sleep(0)
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def inner(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def allowed(path, *headers, keys=(KEY,), root=""):
    sent = asyncio.run(call(KeyGuard(inner, keys, root), path, headers))
    if sent[0]["status"] == 401:
        error = json.loads(sent[1]["body"])["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return False
    return True


def bearer(text):
    return (b"authorization", text.encode())


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "//v1/completions", "/V1/completions", "/v1/../v1/models", "/metrics",
     "/docs", "/openapi.json", "/tokenize", "/health/", "//health", "/HEALTH", "/x/health", ""],
)  # fmt: skip
def test_srv_11_every_path_but_health_asks_for_the_key(path):
    assert not allowed(path)
    assert allowed(path, bearer(f"Bearer {KEY}"))


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer  {KEY}",
     f"Bearer {KEY} ", KEY, f"Basic {KEY}", "Bearer ключ"],
)  # fmt: skip
def test_srv_11_other_keys_are_none(value):
    assert not allowed("/v1/models", bearer(value))


def test_srv_11_the_rest():
    good = bearer(f"Bearer {KEY}")
    assert allowed("/v1/models", bearer(f"bearer {KEY}"))
    assert not allowed("/v1/models", good, good)
    assert allowed("/health")
    assert allowed("/root/health", root="/root")
    assert not allowed("/root/health")
    assert allowed("/v1/models", keys=())
    assert allowed("/ping")
    for key in ("one", "two"):
        assert allowed("/v1/models", bearer(f"Bearer {key}"), keys=("one", "two"))
    assert not allowed("/v1/models", bearer("Bearer onetwo"), keys=("one", "two"))


def test_srv_11_a_key_may_come_as_anthropics_clients_send_it():
    own, wrong = (b"x-api-key", KEY.encode()), (b"x-api-key", b"wrong")
    good, bad = bearer(f"Bearer {KEY}"), bearer("Bearer wrong")
    assert allowed("/v1/models", own)
    assert allowed("/v1/models", own, bad)
    assert allowed("/v1/models", wrong, good)
    for headers in ((wrong,), (wrong, bad), (own, own), ((own[0], b""),)):
        assert not allowed("/v1/models", *headers)
    assert not allowed("/v1/models", (b"x-api-key", f"Bearer {KEY}".encode()))


def test_srv_11_over_http(make_server, caplog):
    caplog.set_level(logging.DEBUG)
    server = make_server({"api_key": (KEY,)})
    key = {"Authorization": f"Bearer {KEY}"}
    described = server.http.get("/openapi.json", headers=key).json()["paths"]
    paths = [*described, "/docs", "/openapi.json"]
    for path in ("/health", "/ping"):
        paths.remove(path)
    assert len(paths) >= 9
    for path in [*paths, "/nowhere"]:
        for method in ("GET", "POST", "OPTIONS", "HEAD"):
            assert server.http.request(method, path).status_code == 401, (method, path)
            query = server.http.request(method, path, params={"api_key": KEY})
            assert query.status_code == 401
    assert server.http.get("/v1/models", headers=key).is_success
    assert server.http.get("/health").status_code == 200
    ours = [r for r in caplog.records if r.name.startswith(("octavo", "uvicorn"))]
    assert not any(KEY in r.getMessage() for r in ours)


def test_a_body_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr("octavo.server.middleware.BODY_SECONDS", 0.01)

    async def reads(scope, receive, send):
        await receive()

    async def run():
        async def never():
            await asyncio.sleep(5)

        await BodyLimit(reads, 1)({"type": "http", "headers": []}, never, None)

    with pytest.raises(Exception, match="did not arrive within"):
        asyncio.run(run())


def test_what_follows_a_body_is_not_timed(monkeypatch):
    monkeypatch.setattr("octavo.server.middleware.BODY_SECONDS", 0.01)
    seen = []

    async def reads(scope, receive, send):
        seen.append(await receive())
        seen.append(await receive())

    async def run():
        messages = [{"type": "http.request", "body": b"x", "more_body": False}]

        async def receive():
            if not messages:
                await asyncio.sleep(0.05)
                return {"type": "http.disconnect"}
            return messages.pop()

        await BodyLimit(reads, 1)({"type": "http", "headers": []}, receive, None)

    asyncio.run(run())
    assert [m["type"] for m in seen] == ["http.request", "http.disconnect"]


def test_all_bodies_together_have_a_limit():
    held = asyncio.Event()

    async def reads(scope, receive, send):
        await receive()
        await held.wait()

    async def run():
        limit = BodyLimit(reads, 1)
        limit._limit_of_all = 1000

        def client():
            parts = [{"type": "http.request", "body": b"x" * 400, "more_body": False}]
            return asyncio.ensure_future(call(limit, "/", body=parts))

        first = [client(), client()]
        await asyncio.sleep(0.01)
        with pytest.raises(HTTPError, match="too large") as refused:
            await client()
        assert (refused.value.status, refused.value.code) == (503, "busy")
        held.set()
        await asyncio.gather(*first)
        await client()  # what they held is free again
        assert limit._held == 0

    asyncio.run(run())
