"""A loop whose clock jumps from timer to timer, and a server in it that answers by a script."""

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Step = tuple[float, bytes]  # seconds to wait, then what is sent


class _Selector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def run(work: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run `work(clock)` to its end; no time passes but the clock's."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop.time))
    finally:
        loop.close()


class ScriptedServer:
    """Answers the i-th request by the i-th script; keeps what it was asked, and when."""

    def __init__(self, *scripts: Sequence[Step], close: bool = False) -> None:
        self.scripts = list(scripts)
        self.bodies: list[dict] = []
        self.heads: list[bytes] = []
        self.times: list[float] = []
        self.connections = 0
        self._close = close
        self._tasks: list[asyncio.Task] = []

    async def connect(self, host: str, port: int, ssl: object = None) -> tuple:
        self.connections += 1
        return (reader := asyncio.StreamReader()), _Writer(self, reader)

    def take(self, request: bytes, reader: asyncio.StreamReader) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        self.heads.append(head)
        self.bodies.append(json.loads(body) if body else {})
        self.times.append(asyncio.get_running_loop().time())
        script = self.scripts[len(self.times) - 1]
        self._tasks.append(asyncio.ensure_future(self._answer(script, reader)))

    async def _answer(self, script: Sequence[Step], reader: asyncio.StreamReader) -> None:
        for seconds, data in script:
            await asyncio.sleep(seconds)
            reader.feed_data(data)
        if self._close:
            reader.feed_eof()


class _Writer:
    def __init__(self, server: ScriptedServer, reader: asyncio.StreamReader) -> None:
        self._server = server
        self._reader = reader

    def write(self, data: bytes) -> None:
        self._server.take(data, self._reader)

    async def drain(self) -> None: ...

    def close(self) -> None: ...


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def token(text: str = "x", finish: str | None = None) -> bytes:
    choice = {"text": text, "finish_reason": finish}
    return chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def answer(first: float, *gaps: float) -> list[Step]:
    """A token after `first` seconds and one after each gap."""
    steps = [(0.0, HEAD), (first, token()), *((gap, token()) for gap in gaps)]
    return [*steps, (0.0, token("", "length")), (0.0, END)]


def page(status: int, body: bytes) -> list[Step]:
    return [(0.0, f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)]
