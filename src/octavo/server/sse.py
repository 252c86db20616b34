"""Answers that take a while, whole or as server-sent events; cancelled when the client disconnects.

Both race the work against the client's disconnect. A closed or reset connection, also one closed
for writing only, cancels the work at once, whose clean-up aborts the request in the engine. A
client that reads nothing for `stall_timeout` seconds is treated as disconnected: its unread text
waits, merged, in one place (see `engine.client`), not in a growing queue.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.log import get_logger
from octavo.server.error_shapes import ErrorShape
from octavo.server.errors import HTTPError, fault_of

logger = get_logger(__name__)

DONE = b"data: [DONE]\n\n"
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encoder = msgspec.json.Encoder()
Headers = list[tuple[bytes, bytes]]
Close = Callable[[Exception | None], None]


def to_json(value: Any) -> bytes:
    """JSON on one line, also for readers that break lines at U+0085, U+2028 and U+2029."""
    text = _encoder.encode(value)
    if text.isascii():
        return text
    text = text.replace(b"\xc2\x85", b"\\u0085")
    return text.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % to_json(value)


def named_event(value: Any) -> bytes:
    """One server-sent event with a name: the `type` of an object, the tag of a struct."""
    kind = value["type"] if isinstance(value, dict) else value.__struct_config__.tag
    return b"event: %b\n%b" % (kind.encode(), event(value))


class Wire(msgspec.Struct, frozen=True):
    """How an API writes: a value as an event, an error as a value, and what ends a stream."""

    event: Callable[[Any], bytes] = event
    error: ErrorShape = HTTPError.body
    end: bytes = DONE


OPENAI = Wire()
CHUNKS = "octavo.chunks"  # its name among a scope's extensions


class Answer(Response):
    """An ASGI response whose body is made while the client waits: `make` gives the value.

    `close` is called once, at the end, with the error that the client received, if any.
    """

    def __init__(
        self,
        make: Coroutine[Any, Any, Any],
        headers: Headers,
        close: Close,
        wire: Wire = OPENAI,
    ) -> None:
        super().__init__()
        self._make = make
        self._extra = headers
        self._close = close
        self._wire = wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._make)
        error: Exception | None = None
        try:
            if await _disconnected_first(work, receive):
                return
            failed = work.exception()
            error = failed if isinstance(failed, Exception) else None
        finally:
            self._close(error)
        status, headers = 200, self._extra
        if error is None:
            body = to_json(work.result())
        else:
            fault = log_fault(error)
            status, body = fault.status, to_json(self._wire.error(fault))
            headers = [*headers, *((k.encode(), v.encode()) for k, v in fault.headers.items())]
        length = (b"content-length", str(len(body)).encode())
        await send(
            {"type": "http.response.start", "status": status, "headers": [*_JSON, length, *headers]}
        )
        await send({"type": "http.response.body", "body": body})


class Chunks(Protocol):
    """A shorter way than ASGI's messages for the pieces of a body, which a scope may offer.

    For use between the answer's first and last message.
    """

    def add(self, data: bytes) -> bool:
        """A piece, to be written soon. False, and it is not taken, while the client reads nothing:
        then a message waits."""
        ...

    def flush(self) -> None:
        """Write what was added: before a message is sent."""
        ...


class Streams:
    """What the streams of a server have in common.

    stall_timeout: seconds without a read after which one ends. stalled: how many have ended so.
    """

    def __init__(self, stall_timeout: float) -> None:
        self.stall_timeout = stall_timeout
        self.stalled = 0


class EventStream(Response):
    """An ASGI response that sends each value of `values` as an event, and then the API's end.

    An error of `values` is sent as one event of the error shape. `close` is as in `Answer`: its
    counters and its log line are there before the client reads the end.
    """

    def __init__(
        self,
        values: AsyncGenerator[Any, None],
        headers: Headers,
        close: Close,
        streams: Streams,
        wire: Wire = OPENAI,
    ) -> None:
        super().__init__()
        self._values = values
        self._extra = headers
        self._close = close
        self._closed = False
        self._error: Exception | None = None
        self._streams = streams
        self._wire = wire
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: Chunks | None = scope.get("extensions", {}).get(CHUNKS)
        work = asyncio.ensure_future(self._write(send, chunks))
        try:
            disconnected = await _disconnected_first(
                work, receive, self._stalled, self._streams.stall_timeout / 4
            )
        finally:
            self._end()
        if not disconnected:
            work.result()

    async def _write(self, send: Send, chunks: Chunks | None) -> None:
        loop = asyncio.get_running_loop()

        async def put(body: bytes, more: bool = True) -> None:
            if chunks is not None:
                if chunks.add(body):
                    if more:
                        return
                    body = b""
                chunks.flush()
            self._sending_since = loop.time()
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._sending_since = None

        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [*_EVENTS, *self._extra],
            }
        )
        try:
            make = self._wire.event
            async for value in self._values:
                body = make(value)
                if chunks is None or not chunks.add(body):
                    await put(body)
        except Exception as error:  # noqa: BLE001 - sent to the client, and logged
            self._error = error
            await put(self._wire.event(self._wire.error(log_fault(error))))
        finally:
            await self._values.aclose()
        self._end()
        await put(self._wire.end, more=False)

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            self._close(self._error)

    def _stalled(self) -> bool:
        since, limit = self._sending_since, self._streams.stall_timeout
        late = since is not None and asyncio.get_running_loop().time() - since > limit
        if late:
            self._streams.stalled += 1
            logger.warning("a client read nothing for %g s; its stream ends", limit)
        return late


def log_fault(error: Exception) -> HTTPError:
    """The answer for an error; unexpected exceptions go to the log with their trace."""
    fault = fault_of(error)
    if fault.code == "internal_error":
        logger.error("a request failed", exc_info=error)
    return fault


async def _disconnected_first(
    work: asyncio.Future[Any],
    receive: Receive,
    stalled: Callable[[], bool] | None = None,
    interval: float | None = None,
) -> bool:
    """Wait for `work`. True, and `work` is cancelled, if the client leaves or stalls first."""
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        while True:
            await asyncio.wait(
                {work, disconnect}, timeout=interval, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                return False
            if disconnect.done() or (stalled and stalled()):
                return True
    finally:
        disconnect.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
