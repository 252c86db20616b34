"""What was answered, by path and status: the series of Prometheus's instrumentation of FastAPI.

vLLM has them from there, and boards query them. As there, paths that probes and scrapers ask for
are left out, and statuses are grouped (`2xx`). A client that left before its answer counts as
`4xx`. What is refused before it is a request, such as malformed HTTP, is not counted.
"""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.middleware import content_length

_LEFT_OUT = frozenset(("/health", "/load", "/metrics", "/ping", "/version"))
_PAGE = "/dashboard"  # and its stream, which lasts as long as somebody looks
_CLIENT_LEFT = 499  # nginx's number; only its group is shown
_METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
_SECONDS = (0.1, 0.5, 1)
_FINE_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30,
    60,
)  # fmt: skip


class HTTPMetrics:
    """Wraps an application. `paths` are its routes; one with a parameter ends in it."""

    def __init__(
        self, app: ASGIApp, registry: CollectorRegistry, paths: Sequence[str], root_path: str = ""
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._exact = {path for path in paths if "{" not in path}
        self._prefixes = {
            path.partition("{")[0]: path.replace(":path", "") for path in paths if "{" in path
        }
        self._requests = Counter(
            "http_requests", "Requests by method, path and status.",
            ["method", "handler", "status"], registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "http_request_duration_seconds", "Request to the end of its answer.",
            ["method", "handler"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._fine = Histogram(
            "http_request_duration_highr_seconds", "The same in fine steps, over all paths.",
            buckets=_FINE_SECONDS, registry=registry,
        )  # fmt: skip
        self._received = Summary(
            "http_request_size_bytes", "Content-Length of requests.", ["handler"],
            registry=registry,
        )  # fmt: skip
        self._sent = Summary(
            "http_response_size_bytes", "Content-Length of answers; 0 for streams.", ["handler"],
            registry=registry,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(self._root_path)
        if scope["type"] != "http" or path in _LEFT_OUT or path.startswith(_PAGE):
            await self._app(scope, receive, send)
            return
        status, sent, counted, started = _CLIENT_LEFT, 0, False, time.monotonic()

        def count() -> None:
            nonlocal counted
            if not counted:
                counted = True
                self._count(scope, path, status, sent, time.monotonic() - started)

        async def noted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, sent = message["status"], content_length(message["headers"])
            elif not message.get("more_body", False):
                count()  # before the client reads the end
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            count()

    def _count(self, scope: Scope, path: str, status: int, sent: int, seconds: float) -> None:
        # Neither a path nor a method that a client made up makes a new series.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        handler = self._handler(path)
        self._requests.labels(method, handler, f"{status // 100}xx").inc()
        self._seconds.labels(method, handler).observe(seconds)
        self._fine.observe(seconds)
        self._received.labels(handler).observe(content_length(scope["headers"]))
        self._sent.labels(handler).observe(sent)

    def _handler(self, path: str) -> str:
        """The route of a path; `none` where there is none."""
        if path in self._exact:
            return path
        return next((h for prefix, h in self._prefixes.items() if path.startswith(prefix)), "none")
