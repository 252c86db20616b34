"""What was answered, as the boards of FastAPI's instrumentation have it."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from octavo.server.http_metrics import HTTPMetrics

PATHS = ("/metrics", "/v1/completions", "/v1/models", "/v1/models/{name:path}")


@pytest.fixture
def ask():
    """`ask(path, status, ...)` serves one request; `ask.count(**labels)` reads the counter."""
    registry = CollectorRegistry()

    def one(path, status=200, method="GET", fails=False):
        async def app(scope, receive, send):
            if fails:
                raise ZeroDivisionError
            if status is not None:
                headers = [(b"content-length", b"3")]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": b"abc"})

        async def send(message):
            sent.append((message, count(method="GET")))

        sent = []
        metrics._app = app
        scope = {"type": "http", "path": path, "method": method, "headers": []}
        asyncio.run(metrics(scope, None, send))
        return sent

    def count(**labels):
        found = 0.0
        for line in generate_latest(registry).decode().splitlines():
            wanted = ["http_requests_total{", *(f'{k}="{v}"' for k, v in labels.items())]
            if all(part in line for part in wanted):
                found += float(line.rpartition(" ")[2])
        return found

    metrics = HTTPMetrics(None, registry, PATHS, "/llm")
    one.count = count
    return one


def test_requests_are_counted_by_route_and_group_of_status(ask):
    ask("/llm/v1/completions", 200, "POST")
    ask("/v1/completions", 503, "POST")
    ask("/v1/models/some/name", 404)
    ask("/made/up", 404)
    ask("/v1/models", None)  # the client left
    with pytest.raises(ZeroDivisionError):
        ask("/v1/completions", method="POST", fails=True)
    ask("/v1/models", 405, method="BREW")
    for path in ("/metrics", "/health", "/ping"):
        ask(path)
    assert ask.count(handler="/v1/completions", method="POST", status="2xx") == 1
    assert ask.count(handler="/v1/completions", method="POST", status="5xx") == 2
    assert ask.count(handler="/v1/models/{name}", status="4xx") == 1
    assert ask.count(handler="none", status="4xx") == 1
    assert ask.count(handler="/v1/models", method="GET", status="4xx") == 1
    assert ask.count(handler="/v1/models", method="other") == 1
    assert ask.count() == 7


def test_a_request_is_counted_before_its_client_reads_the_end(ask):
    start, end = ask("/v1/models")
    assert (start[1], end[1]) == (0, 1)
