"""`octavo serve` as a child process, and a client that costs little beside it.

The client shares the machine's cores with the server, so it only stores what it receives, in
pieces of many tokens: one connection per request, closed by the server when the answer is complete.
"""

import asyncio
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.004
_PIECE_BYTES = 1 << 14  # of a stream, some 60 tokens


class ServeProcess:
    """A server on a free port; its log goes to `log` (None: to our own standard error)."""

    def __init__(self, model: str, *flags: str, log: IO[Any] | int | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        program = str(Path(sys.executable).parent / "octavo")
        command = [program, "serve", model, "--port", str(self.port), *flags]
        self._begun = time.monotonic()
        self.process = subprocess.Popen(command, stderr=log)

    def wait_ready(self) -> float:
        """Seconds from the start to the first /health with 200. Raises RuntimeError."""
        while self.health() != 200:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self.process.returncode}")
            time.sleep(0.02)
        return time.monotonic() - self._begun

    def health(self) -> int | None:
        """The status of /health; None while nothing answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def engine_pid(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def close(self) -> None:
        """Drain and end it. Doing it again does no harm."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


class Reply(asyncio.Protocol):
    """One request and all that comes back. Times are monotonic seconds.

    in_pieces: what follows the first bytes is taken in large pieces, and what is left at the end
    when it comes. The connection must be closed by the server.
    """

    def __init__(self, request: bytes, in_pieces: bool = False) -> None:
        self._request = request
        self._in_pieces = in_pieces
        self.raw = bytearray()
        self.begun = time.monotonic()
        self.first: float | None = None
        self.end = 0.0
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first is None:
            self.first = time.monotonic()
            if self._in_pieces:
                sock = self._transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _PIECE_BYTES)
        self.raw += data

    def connection_lost(self, error: Exception | None) -> None:
        self.end = time.monotonic()
        if not self.complete.done():
            self.complete.set_result(None)

    @property
    def status(self) -> int:
        """0 where no answer came."""
        found = re.match(rb"HTTP/1\.1 (\d+)", self.raw)
        return int(found[1]) if found else 0

    @property
    def retry_after(self) -> bool:
        return b"\r\nretry-after:" in bytes(self.raw.partition(b"\r\n\r\n")[0]).lower()

    @property
    def output_tokens(self) -> int:
        """From the last usage that the answer holds; 0 without one."""
        found = re.findall(rb'"completion_tokens":(\d+)', self.raw)
        return int(found[-1]) if found else 0


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Reply:
    """Post `body` on a connection of its own and wait for the end of the answer.

    A connection that cannot be had, or breaks, is an answer with status 0 or without its end.
    """
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(text)}"
    request = f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + text
    reply = Reply(request, in_pieces=True)
    try:
        await asyncio.get_running_loop().create_connection(lambda: reply, "127.0.0.1", port)
    except OSError:
        return reply
    await reply.complete
    return reply


class _Patient(selectors.DefaultSelector):
    """Looks for news every few milliseconds, and takes all there is.

    Woken by each event of 64 streams, our client would take the cores from the engine 64 times a
    step; clients on machines of their own do not.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            time.sleep(_LOOK_SECONDS if timeout is None else min(timeout, _LOOK_SECONDS))
        return super().select(0)


def run_client(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a loop that looks at its connections every few milliseconds."""
    loop = asyncio.SelectorEventLoop(_Patient())
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class Stops:
    """Counts how often this process was stopped and let go on (SIGCONT), as by a shell's jobs.

    What was timed across a stop says nothing of the server. To be made in the main thread.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0  # monotonic seconds
        signal.signal(signal.SIGCONT, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.count += 1
        self.last = time.monotonic()


def cpu_seconds(pid: int) -> float:
    """Processor seconds of one process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
