"""Middleware for every request: the API key, and limits on the body's size and time.

Plain ASGI, because a wrapper that copies streams would hide the client's disconnect.
"""

import asyncio
import hmac
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.error_shapes import answer_of
from octavo.server.errors import HTTPError, unavailable
from octavo.server.limits import LIMITS
from octavo.server.options import ServerConfig

# Answered without a key: they say only whether the engine is healthy.
OPEN_PATHS = frozenset(("/health", "/ping"))

BODY_SECONDS = LIMITS.body_seconds
_MB = 1 << 20


def open_paths(options: ServerConfig) -> frozenset[str]:
    """The paths of the API that are answered without a key."""
    return OPEN_PATHS | {"/metrics"} if options.metrics_without_key else OPEN_PATHS


async def refuse(fault: HTTPError, scope: Scope, send: Send) -> None:
    """Answer with `fault`. The HTTP server drops the rest of the body."""
    status, own, body = answer_of(fault, scope)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **own}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class KeyGuard:
    """Asks for `Authorization: Bearer KEY` or `x-api-key: KEY`, if there are keys, on all paths but
    the open ones.

    OpenAI's clients send the first, Anthropic's the second, or both where they have two. Keys are
    compared in constant time. Paths are compared exactly, so that no variant of an open path is
    open by accident. pages: what answers without a key in place of the error, by path.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        root_path: str = "",
        open_paths: Iterable[str] = OPEN_PATHS,
        pages: Mapping[str, ASGIApp] = MappingProxyType({}),
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open = {root_path + path for path in open_paths}
        self._pages = {root_path + path: page for path, page in pages.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        if page := self._pages.get(scope["path"]):
            await page(scope, receive, send)
            return
        fault = HTTPError(
            401,
            "a valid API key is needed: send the header 'Authorization: Bearer KEY' or "
            "'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refuse(fault, scope, send)

    def _allowed(self, scope: Scope) -> bool:
        return scope["path"] in self._open or self._matches(scope["headers"])

    def _matches(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        headers = list(headers)
        found = [self._is_key(value) for value in _values(headers, b"x-api-key")]
        for value in _values(headers, b"authorization"):
            scheme, _, key = value.partition(b" ")
            # Checked in any case, so that timing does not tell a wrong scheme from a wrong key.
            found.append(self._is_key(key) and scheme.lower() == b"bearer")
        return any(found)

    def _is_key(self, key: bytes) -> bool:
        # All are compared, so that timing does not tell one key from another.
        same = [hmac.compare_digest(key, known) for known in self._keys]
        return any(same)


def _values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """Of a header that is given once; none where it is given twice."""
    found = [value for key, value in headers if key == name]
    return found if len(found) == 1 else []


class BodyLimit:
    """Refuses bodies above `max_mb` MiB before they are read, and those that never end.

    All bodies of the requests in progress together have a limit, too: memory is a resource that
    clients share.
    """

    def __init__(self, app: ASGIApp, max_mb: float) -> None:
        self._app = app
        self._limit = int(max_mb * _MB)
        self._limit_of_all = max(LIMITS.bodies_bytes, self._limit)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if content_length(scope["headers"]) > self._limit:
            await refuse(self._too_large(), scope, send)
            return
        seen = [0]
        try:
            await self._app(scope, self._counted(receive, seen), send)
        finally:
            self._held -= seen[0]

    def _counted(self, receive: Receive, seen: list[int]) -> Receive:
        """`receive`, counting the bytes of the body in `seen[0]`."""
        loop = asyncio.get_running_loop()
        complete, end = False, loop.time() + BODY_SECONDS

        async def counted() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), end - loop.time())
            except asyncio.TimeoutError:
                raise HTTPError(
                    408, f"the body did not arrive within {BODY_SECONDS:g} s", code="timeout"
                ) from None
            size = len(message.get("body", b""))
            complete = not message.get("more_body", False)
            seen[0] += size
            self._held += size
            if seen[0] > self._limit:
                raise self._too_large()
            if self._held > self._limit_of_all:
                raise unavailable("the bodies of the requests in progress are too large", "busy")
            return message

        return counted

    def _too_large(self) -> HTTPError:
        return HTTPError(
            413,
            f"the body is larger than the limit of {self._limit} bytes (--max-body-mb)",
            code="body_too_large",
        )


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """The Content-Length, or 0 if there is none."""
    for name, value in headers:
        if name.lower() == b"content-length" and value.isdigit():
            return int(value)
    return 0
