"""HTTP/1.1 requests for load generation: asyncio streams and h11, connections kept open.

No redirects, proxies or retries, which would hide what a server does; one exception: a connection
that the server closed while it was idle is replaced by a new one.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from octavo.errors import ConfigError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[..., Awaitable[Streams]]
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where requests go: `https://host:port/path` in parts."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str, option: str = "base-url") -> "Address":
        """Raises ConfigError, which names the option that the URL was given with."""
        error = ConfigError(f"{option} must be such as http://127.0.0.1:8000, not {url!r}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise error from None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise error
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class _Connection:
    """One connection: one request at a time."""

    def __init__(self, streams: Streams) -> None:
        self.reader, self.writer = streams
        self.h11 = h11.Connection(h11.CLIENT)
        self.used = False

    async def event(self) -> h11.Event | type[h11.PAUSED]:
        while (event := self.h11.next_event()) is h11.NEED_DATA:
            self.h11.receive_data(await self.reader.read(_READ_BYTES))
        assert not isinstance(event, type) or event is h11.PAUSED
        return event

    def reusable(self) -> bool:
        """Whether the answer is read to its end and both sides keep the connection."""
        if self.h11.our_state is not h11.DONE or self.h11.their_state is not h11.DONE:
            return False
        self.h11.start_next_cycle()
        self.used = True
        return True

    def close(self) -> None:
        self.writer.close()


class Reply:
    """The head of an answer, and its body as it comes."""

    def __init__(self, connection: _Connection, status: int) -> None:
        self.status = status
        self._connection = connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises h11.RemoteProtocolError where it is cut off."""
        while isinstance(event := await self._connection.event(), h11.Data):
            yield bytes(event.data)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


class Endpoint:
    """A server, and the open connections to it that are free."""

    def __init__(
        self,
        address: Address,
        headers: Mapping[str, str],
        connect: Connect = asyncio.open_connection,
    ) -> None:
        self.address = address
        self._headers = [("Host", address.host_header), ("User-Agent", "octavo-bench")]
        self._headers += list(headers.items())
        self._connect = connect
        self._tls = ssl.create_default_context() if address.tls else None
        self._free: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Reply]:
        """Send one request; the body of the reply is read inside the block.

        Raises OSError or h11.RemoteProtocolError where there is no answer.
        """
        fields = [*self._headers, *(headers or {}).items()]
        if body:
            fields += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        head = h11.Request(method=method, target=self.address.path + path, headers=fields)
        connection, reply = await self._answered(head, body)
        try:
            yield reply
            if connection.reusable():
                self._free.append(connection)
                return
        except BaseException:
            connection.close()
            raise
        connection.close()

    async def _answered(self, head: h11.Request, body: bytes) -> tuple[_Connection, Reply]:
        while True:
            connection = self._free.pop() if self._free else await self._open()
            try:
                return connection, await _exchange(connection, head, body)
            except (OSError, h11.RemoteProtocolError):
                connection.close()
                if not connection.used:
                    raise
            except BaseException:
                connection.close()
                raise

    async def _open(self) -> _Connection:
        address = self.address
        return _Connection(await self._connect(address.host, address.port, ssl=self._tls))

    def close(self) -> None:
        while self._free:
            self._free.pop().close()


async def _exchange(connection: _Connection, head: h11.Request, body: bytes) -> Reply:
    data = connection.h11.send(head) or b""
    if body:
        data += connection.h11.send(h11.Data(data=body)) or b""
    connection.writer.write(data + (connection.h11.send(h11.EndOfMessage()) or b""))
    await connection.writer.drain()
    while isinstance(event := await connection.event(), h11.InformationalResponse):
        pass
    assert isinstance(event, h11.Response)
    return Reply(connection, event.status_code)
