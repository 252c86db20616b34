"""The dashboard over HTTP: its page, its stream, the key, bad parameters, a drain."""

import contextlib
import os
import signal
import threading
import time

import httpx
import msgspec
import pytest

from octavo.engine.watch import Snapshot
from octavo.server import dashboard_hub, dashboard_routes
from octavo.server.dashboard_feed import End, Update
from octavo.server.dashboard_routes import page_files
from serving import wait_until

KEY = {"Authorization": "Bearer k"}


def updates(server, query="", **headers):
    """The events of a stream, decoded strictly, until it ends."""
    url = f"{server.url}/dashboard/events{query}"
    with httpx.stream("GET", url, headers=headers, timeout=10) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = reply.iter_lines()
        for name in lines:
            kind = {"event: snapshot": Update, "event: end": End}[name]
            yield msgspec.json.decode(next(lines).removeprefix("data: "), type=kind, strict=True)
            assert next(lines) == ""


def snapshot_of(update):
    return msgspec.json.decode(update.snapshot, type=Snapshot | None)


def watched(server):
    return [len(watch.readers) for watch in server.service.dashboard._watches.values()]


@contextlib.contextmanager
def at_work(server, prompt="!slow", **body):
    """A request that takes a second, in a thread."""
    thread = threading.Thread(target=server.complete, args=(prompt,), kwargs=body)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_reader_sees_a_request_by_the_name_that_its_client_knows(server):
    with contextlib.closing(updates(server, "?request=mine")) as stream:
        first = next(stream)
        assert (first.engine, first.follow, first.followed) == (0, "mine", None)
        assert first.settings.block_size == 16
        with at_work(server, "!slow secret", request_id="mine", max_tokens=40):
            found = next(one for one in stream if one.followed and one.names)
        assert found.follow_engine == 0
        (row,) = [row for row in snapshot_of(found).requests if row.state == "running"]
        assert row.id == found.followed.id
        assert found.names[row.id] == "cmpl-mine"
        assert found.followed.tables[0].computed == row.computed
        ended = next(
            one for one in stream
            if any(r.id == row.id and r.reason == "length" for r in snapshot_of(one).requests)
        )  # fmt: skip
        assert ended.followed.tables == ()
        assert ended.follow_engine is None
    server.assert_alive()


def test_neither_texts_nor_token_ids_are_sent(server):
    text = "sesame opens" * 4
    with contextlib.closing(updates(server)) as stream, at_work(server, f"!slow {text}"):
        for _ in range(3):
            sent = msgspec.json.encode(next(stream)).decode()
            assert "sesame" not in sent
            assert str(list(text.encode()))[1:-1].replace(" ", "") not in sent


def test_the_engine_is_asked_only_while_somebody_reads(server, monkeypatch):
    asked = []
    link = server.service.client.links[0]
    look = link.look
    monkeypatch.setattr(link, "look", lambda ids: asked.append(ids) or look(ids))
    server.assert_alive()
    time.sleep(0.1)
    assert asked == []
    streams = [updates(server, query) for query in ("?request=a", "?request=b", "")]
    for stream in streams:
        next(stream)
    wait_until(lambda: watched(server) == [3])
    wait_until(lambda: asked[-1] == ("a", "b"))  # one question for all
    for stream in streams:
        stream.close()
    wait_until(lambda: watched(server) == [])
    count = len(asked)
    time.sleep(2 * dashboard_hub.INTERVAL_SECONDS)
    assert len(asked) == count


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ("?engine=1", "engine", "engine must be 0, not '1'"),
        ("?engine=-1", "engine", "must be 0"), ("?engine=", "engine", "must be 0"),
        ("?engine=0&engine=0", "engine", "more than once"),
        ("?request=", "request", "id of a request"), ("?request=a%20b", "request", "'a b'"),
        ("?request=" + "x" * 161, "request", "1 to 160"),
        ("?key=k", "key", "takes engine and request"),
    ],
)  # fmt: skip
def test_parameters_that_are_none_are_named(server, query, field, words):
    reply = server.http.get(f"/dashboard/events{query}")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (field, "invalid_value")
    assert words in error["message"]
    assert watched(server) == []


def test_with_a_key_the_stream_and_the_page_need_it(make_server):
    server = make_server({"api_key": ("k",)})
    reply = server.http.get("/dashboard/events")
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    assert server.http.get("/dashboard/events?engine=x").status_code == 401
    with contextlib.closing(updates(server, **KEY)) as stream:
        assert next(stream).engine == 0
    # A browser gets the page with the 401: it asks for the key. Its files hold no data.
    for path, (content, kind) in page_files().items():
        bare, given = server.http.get(path), server.http.get(path, headers=KEY)
        assert bare.content == given.content == content
        assert bare.headers["content-type"] == kind
        assert given.status_code == 200
        assert bare.status_code == (401 if path == "/dashboard" else 200)
        for header in ("content-security-policy", "x-content-type-options", "referrer-policy"):
            assert bare.headers[header] == given.headers[header]
    for path in (
        "/dashboard/",
        "/dashboard/nothing",
        "/dashboard/../metrics",
        "/dashboard/events/",
    ):
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers=KEY).status_code in (200, 404)


def test_the_headers_let_the_page_load_nothing_from_elsewhere():
    policy = dashboard_routes._HEADERS["Content-Security-Policy"]
    sources = {part.split()[0]: part.split()[1:] for part in policy.split("; ")}
    assert sources["default-src"] == ["'none'"]
    for name, allowed in sources.items():
        assert set(allowed) <= {"'none'", "'self'", "data:"}, name


def test_the_dashboard_can_be_turned_off(make_server):
    server = make_server({"dashboard": False})
    for path in ("/dashboard", "/dashboard/events"):
        reply = server.http.get(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
        assert "--no-dashboard" in reply.json()["error"]["message"]
    assert server.http.get("/dashboard/app.js").status_code == 404
    server.assert_alive()


def test_too_many_readers_are_refused_and_harm_nobody(server, monkeypatch):
    monkeypatch.setattr(dashboard_hub, "MOST_READERS", 2)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(contextlib.closing(updates(server)))
            next(stream)
        reply = server.http.get("/dashboard/events")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_dashboards")
        assert reply.headers["retry-after"]
        server.assert_alive()
    wait_until(lambda: watched(server) == [])


def test_a_drain_ends_streams_at_once(make_server):
    server = make_server({"drain_timeout": 60.0})
    stream = updates(server)
    next(stream)
    server.loop.call_soon_threadsafe(server.runner.drain)
    *_, last = stream
    assert last == End("the server is shutting down", True)
    assert server.end() == 0


def test_an_engine_that_dies_and_returns(make_server, monkeypatch):
    monkeypatch.setattr("octavo.engine.pool.RESTART_SECONDS", 0.1)
    monkeypatch.setattr(dashboard_hub, "PATIENCE_SECONDS", 0.2)
    server = make_server({"restart_engine": True}, data_parallel_size=2)
    with contextlib.closing(updates(server, "?engine=1")) as stream:
        first = next(stream)
        assert [row.problem for row in first.engines] == [None, None]
        assert first.engine == 1
        os.kill(server.service.client.links[1].process.pid, signal.SIGKILL)
        lost = next(one for one in stream if one.engines[1].problem)
        assert (snapshot_of(lost), lost.engines[1].deaths) == (None, 1)
        assert lost.engines[0].problem is None
        back = next(one for one in stream if one.engines[1].problem is None)
        assert snapshot_of(back) is not None or snapshot_of(next(stream)) is not None
    reply = server.http.get("/dashboard/events?engine=2")
    assert reply.json()["error"]["message"] == "engine must be a number from 0 to 1, not '2'"
