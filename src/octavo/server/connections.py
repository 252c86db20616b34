"""One HTTP connection, and the set of all: what they may cost, and what malformed ones get.

uvicorn's protocol over h11, with three changes: sizes and times are those of `server.limits`,
whatever the pieces in which bytes arrive; what is refused below the application has the error
shape; and where descriptors run out, idle connections are closed first.
"""

import asyncio
import fcntl
import http
import sys
import termios
from enum import IntEnum
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.log import get_logger
from octavo.server.errors import HTTPError, unavailable
from octavo.server.limits import HTTPLimits
from octavo.server.sse import CHUNKS

logger = get_logger(__name__)

_VERSIONS = (b"1.0", b"1.1")
_BATCHES = 8  # a batch of accepted connections is this part of the most connections
# A client that reads acknowledges within a round trip, in which few events are sent.
_UNREAD_BYTES = 1 << 14
_MAX_BATCH = 256


class State(IntEnum):
    """What a connection waits for. The first states are closed first when there are too many."""

    LINGERING = 0  # answered, and still sending
    SILENT = 1  # nothing has come yet
    KEPT = 2  # answered, and open for the next request
    HEAD = 3  # a part of a head has come
    BUSY = 4  # a request is read or answered; never closed for another one


class _Buffer(ReceiveBuffer):
    """h11's buffer, with a limit on lines and heads that is the same for every cut.

    h11 itself limits only what has not arrived whole.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def maybe_extract_lines(self) -> list[bytearray] | None:
        size = len(self)
        lines = super().maybe_extract_lines()
        self._check(size if lines is None else size - len(self))
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()
        self._check(len(self) if line is None else len(line))
        return line

    def is_next_line_obviously_invalid_request_line(self) -> bool:
        # The first half of an empty line, which `skip_empty_lines` drops when it is whole.
        return self._data != b"\r" and super().is_next_line_obviously_invalid_request_line()

    def skip_empty_lines(self) -> None:
        """Drop the empty lines before a request, which RFC 9112 (2.2) asks servers to ignore."""
        while (start := self._data[:2]) and (start == b"\r\n" or start[:1] == b"\n"):
            self.maybe_extract_at_most(2 if start == b"\r\n" else 1)

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise h11.LocalProtocolError("too long", error_status_hint=431)


class _Parser(h11.Connection):
    """h11's parser. After an error, `status` and `in_head` say which answer it gets."""

    def __init__(self, limits: HTTPLimits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._limit = limits.head_bytes
        self._receive_buffer: _Buffer = _Buffer(limits.head_bytes)
        self.status = 400
        self.in_head = True

    @property
    def has_input(self) -> bool:
        return bool(self._receive_buffer)

    @property
    def has_room(self) -> bool:
        """Whether more bytes may be read of requests that follow the one in progress."""
        return self.their_state is h11.DONE and len(self._receive_buffer) <= self._limit

    def next_event(self) -> Any:
        self.in_head = self.their_state is h11.IDLE
        if self.in_head:
            self._receive_buffer.skip_empty_lines()
        try:
            event = super().next_event()
            if type(event) is h11.Request:
                _check_head(event)
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint if self.in_head else 400
            raise
        return event


def _check_head(head: h11.Request) -> None:
    if head.http_version not in _VERSIONS:
        raise h11.RemoteProtocolError("unsupported version", error_status_hint=505)
    names = {name for name, _ in head.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        # Two lengths: a proxy in front may believe the other one.
        raise h11.RemoteProtocolError("two lengths")


def _malformed(status: int, limits: HTTPLimits) -> HTTPError:
    """The answer to what is not HTTP as this server speaks it."""
    text, code = {
        431: (f"the request's head is larger than {limits.head_bytes} bytes", "head_too_large"),
        501: ("a Transfer-Encoding must be chunked", "unsupported_transfer_encoding"),
        505: ("this server speaks HTTP/1.0 and HTTP/1.1", "unsupported_http_version"),
    }.get(status, ("the request is not valid HTTP/1.1", "malformed_request"))
    return HTTPError(status, text, code=code)


class ChunkWriter:
    """The body of one answer (`sse.Chunks`), in HTTP/1.1's chunks.

    What is added in one turn of the event loop is written at its end, in one call: one for each
    connection and step of the engine.
    """

    def __init__(self, connection: "Connection", cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._flow = connection.flow
        self._cycle = cycle
        self._chunks: list[bytes] = []

    def add(self, data: bytes) -> bool:
        if self._flow.write_paused:
            return False
        if data:  # none would end the body
            if not self._chunks:
                self._connection.table.write_soon(self)
            self._chunks.append(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def flush(self) -> None:
        if self._chunks:
            data = b"".join(self._chunks)
            self._chunks.clear()
            if not (self._cycle.disconnected or self._connection.transport.is_closing()):
                self._connection.transport.write(data)


class Connections:
    """All connections by state, each state in the order of entering it."""

    def __init__(self, limits: HTTPLimits, most: int) -> None:
        self.limits = limits
        self.most = most
        self._waiting: tuple[dict[Connection, float], ...] = tuple({} for _ in range(State.BUSY))
        self._seconds = (
            limits.linger_seconds,
            limits.keep_alive_seconds,
            limits.keep_alive_seconds,
            limits.head_seconds,
        )
        self._closed_early = 0
        self.open: set[Connection] = set()
        self.timed_out = 0  # by the kernel: the client acknowledged nothing
        self._unwritten: list[ChunkWriter] = []

    def write_soon(self, writer: ChunkWriter) -> None:
        """Write what was added there when this turn of the event loop is over."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(writer)

    def _write(self) -> None:
        writers, self._unwritten = self._unwritten, []
        for writer in writers:
            writer.flush()

    def unread(self) -> int:
        """How many clients leave much of their answer untaken. May be called from any thread."""
        return sum(connection.unsent() >= _UNREAD_BYTES for connection in list(self.open))

    @property
    def batch(self) -> int:
        """How many connections are accepted before what they sent is read."""
        return max(1, min(_MAX_BATCH, self.most // _BATCHES))

    def move(self, connection: "Connection", state: State, now: float) -> None:
        if connection.state is not State.BUSY:
            self._waiting[connection.state].pop(connection, None)
        connection.state = state
        if state is not State.BUSY:
            self._waiting[state][connection] = now

    def remove(self, connection: "Connection") -> None:
        if connection.state is not State.BUSY:
            self._waiting[connection.state].pop(connection, None)

    def make_room(self) -> bool:
        """Close the connection that has asked for nothing for longest. False if all are busy."""
        for waiting in self._waiting:
            for connection in waiting:
                self.remove(connection)
                connection.transport.abort()
                self._closed_early += 1
                return True
        return False

    async def sweep(self) -> None:
        """End what takes too long; say once a sweep what was closed for lack of descriptors."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.sweep_seconds)
            now = loop.time()
            for state, waiting in enumerate(self._waiting):
                late = []
                for connection, since in waiting.items():
                    if now - since < self._seconds[state]:
                        break
                    late.append(connection)
                for connection in late:
                    connection.end_late()
            if self._closed_early:
                logger.warning(
                    "closed %d idle connections: there are descriptors for %d "
                    "(raise the limit: ulimit -n)", self._closed_early, self.most,
                )  # fmt: skip
                self._closed_early = 0


class Connection(H11Protocol):
    """One connection. `state` is kept by `Connections.move`."""

    conn: _Parser

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Parser(table.limits)
        self.state = State.BUSY
        self._application, self.app = self.app, self._answered
        self.table = table
        self._refused = False

    async def _answered(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, which finds here how it may write the body of a stream."""
        cycle = self.cycle  # of this request: the next one begins after its answer
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":  # else there are no chunks
            scope["extensions"] = {CHUNKS: ChunkWriter(self, cycle)}
        await self._application(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.table.open.add(self)
        full = len(self.connections) > self.table.most and not self.table.make_room()
        self._enter(State.SILENT)
        if full:
            text = f"all {self.table.most} connections are in use"
            self._refuse(unavailable(text, "too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        self.table.open.discard(self)
        if isinstance(exc, TimeoutError):
            self.table.timed_out += 1
        super().connection_lost(exc)

    def unsent(self) -> int:
        """Bytes that wait here, or in the system for the client's acknowledgement."""
        sock = self.transport.get_extra_info("socket")
        try:
            waiting = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError):  # closed meanwhile
            return 0
        here: int = self.transport.get_write_buffer_size()
        return here + int.from_bytes(waiting, sys.byteorder)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what h11 does not accept."""
        # Later, so that a request whose head alone is answered (401, 404, 413) gets that answer
        # also when its malformed body came in the same piece.
        self._refused = True
        self.loop.call_soon(self._answer_malformed)

    def shutdown(self) -> None:
        if self._refused:
            self.transport.close()
        else:
            super().shutdown()

    def end_late(self) -> None:
        """What the connection waits for has not come in time."""
        if self.state is State.HEAD:
            seconds = self.table.limits.head_seconds
            text = f"the request's head did not arrive within {seconds:g} s"
            self._refuse(HTTPError(408, text, code="timeout"))
        elif self.state is State.LINGERING or self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.table.remove(self)
            self.transport.close()

    def _follow(self) -> None:
        """Note what the connection waits for now."""
        if self._refused or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE:
            if self.conn.has_input:
                state = State.HEAD
            else:
                state = State.SILENT if self.cycle is None else State.KEPT
        elif self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY:
            state = State.LINGERING
        else:
            state = State.BUSY
            if self.flow.read_paused and self.conn.has_room:
                # The next request came too early; only a reader sees that the client leaves.
                self.flow.resume_reading()
        if state is not self.state:
            self._enter(state)

    def _enter(self, state: State) -> None:
        self.table.move(self, state, self.loop.time())

    def _answer_malformed(self) -> None:
        if self.transport.is_closing():
            return
        cycle = None if self.conn.in_head else self.cycle
        if cycle is None or not cycle.response_started:
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
            self._refuse(_malformed(self.conn.status, self.table.limits))
        elif cycle.response_complete:
            self._linger()
        else:
            self.transport.abort()

    def _refuse(self, fault: HTTPError) -> None:
        """Answer without the application, then read and drop what still comes."""
        self._refused = True
        body = fault.json()
        head = [
            f"HTTP/1.1 {fault.status} {http.HTTPStatus(fault.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name.lower()}: {value}" for name, value in fault.headers.items()),
            "connection: close",
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self._linger()

    def _linger(self) -> None:
        self._unset_keepalive_if_required()
        self._enter(State.LINGERING)
        if self.transport.can_write_eof():  # not over TLS
            self.transport.write_eof()
        self.flow.resume_reading()
