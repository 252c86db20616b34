"""`/dashboard`: the page, its files, and the stream that it reads.

The page and its files hold no data, and are part of this package; what they show comes over the
stream, behind the key. No page of another origin can frame them, and they load nothing from
elsewhere: the headers say so.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from pathlib import PurePath

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError
from octavo.server.dashboard_hub import Hub, Reader
from octavo.server.errors import HTTPError
from octavo.server.service import Service
from octavo.server.sse import EventStream, Streams, Wire, to_json

PAGE = "/dashboard"
EVENTS = "/dashboard/events"
STALL_SECONDS = 20.0  # without a read; a page connects again
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_ID = re.compile(r"[A-Za-z0-9._:-]{1,160}")


def _frame(value: object) -> bytes:
    """An event of the hub as it is; an error in the shape of all errors."""
    return value if isinstance(value, bytes) else b"event: error\ndata: %b\n\n" % to_json(value)


_WIRE = Wire(_frame, HTTPError.body, b"")


# What the files of the page hold, and the media type of that, by their paths.
Files = dict[str, tuple[bytes, str]]


def page_files() -> Files:
    """Those of this package."""
    found: Files = {}
    folder = files("octavo.server").joinpath("dashboard")
    for file in folder.iterdir() if folder.is_dir() else ():
        if kind := _TYPES.get(PurePath(file.name).suffix):
            path = PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
            found[path] = file.read_bytes(), kind
    return found


def handler(content: bytes, media_type: str) -> Callable[[Service, Request], Awaitable[Response]]:
    """What answers with a file."""

    async def answer(service: Service, request: Request) -> Response:
        return file_response(content, media_type)

    return answer


def file_response(content: bytes, media_type: str, status: int = 200) -> Response:
    return Response(content, status, _HEADERS, media_type)


def sign_in(content: bytes, media_type: str) -> Response:
    """The page for a browser without the key: it asks for it, and for its data with it."""
    reply = file_response(content, media_type, 401)
    reply.headers["WWW-Authenticate"] = "Bearer"
    return reply


async def turned_off(service: Service, request: Request) -> Response:
    text = "this server has no dashboard: it was started with --no-dashboard"
    raise HTTPError(404, text, code="not_found")


async def events(service: Service, request: Request) -> Response:
    """The stream of one engine. Raises RequestError for what it does not take."""
    hub = service.dashboard
    if hub is None:
        return await turned_off(service, request)
    engine, follow = _asked(request.query_params, service.config.data_parallel_size)
    return DashboardStream(hub, hub.join(engine, follow), service.options.stall_timeout)


class DashboardStream(EventStream):
    """An event stream that ends with the server's, also where its client does not read."""

    def __init__(self, hub: Hub, reader: Reader, stall_seconds: float) -> None:
        headers = [(b"x-content-type-options", b"nosniff")]
        streams = Streams(min(stall_seconds, STALL_SECONDS))
        close = partial(_leave, hub, reader)
        super().__init__(reader.events(), headers, close, streams, _WIRE)
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving = asyncio.ensure_future(super().__call__(scope, receive, send))
        cut = asyncio.ensure_future(self._hub.cut.wait())
        try:
            await asyncio.wait({serving, cut}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut.cancel()
            serving.cancel()
            await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()


def _leave(hub: Hub, reader: Reader, error: Exception | None) -> None:
    hub.leave(reader)


def _asked(query: QueryParams, engines: int) -> tuple[int, str | None]:
    """(the engine's number, the request to follow or None). Raises RequestError."""
    for name in query:
        if name not in ("engine", "request"):
            text = f"{name[:100]!r} is no parameter of {EVENTS}; it takes engine and request"
            raise RequestError(text, name[:100])
        if len(query.getlist(name)) > 1:
            raise RequestError(f"{name} is given more than once", name)
    number = query.get("engine", "0")
    if not re.fullmatch(r"[0-9]{1,6}", number) or int(number) >= engines:
        known = "0" if engines == 1 else f"a number from 0 to {engines - 1}"
        raise RequestError(f"engine must be {known}, not {number[:100]!r}", "engine")
    follow = query.get("request")
    if follow is not None and not _ID.fullmatch(follow):
        text = "request must be the id of a request, 1 to 160 characters of A-Z a-z 0-9 . _ : -"
        raise RequestError(f"{text}, not {follow[:100]!r}", "request")
    return int(number), follow
