"""The light client: what it makes of answers, refusals, and connections that break."""

import asyncio

import pytest
from benchmarks.server import Reply, ask, run_client

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    b'data: {"usage":null}\n\ndata: {"usage":{"completion_tokens":7}}\n\ndata: [DONE]\n\n'
)
FULL = b'HTTP/1.1 503 X\r\nRetry-After: 1\r\n\r\n{"error": {"message": "retry-after: no"}}'


def answered(raw: bytes) -> tuple[Reply, bytes]:
    """(the reply, what the server got) where the server answers `raw` and hangs up."""
    got = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.extend(await reader.readuntil(b"}"))
        writer.write(raw)
        writer.close()

    async def main() -> Reply:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            return await ask(server.sockets[0].getsockname()[1], {"prompt": "x"})

    return run_client(main()), bytes(got)


@pytest.mark.parametrize(
    ("raw", "status", "tokens", "retry"),
    [(STREAM, 200, 7, False), (FULL, 503, 0, True), (b"", 0, 0, False)],
)
def test_what_came_back(raw: bytes, status: int, tokens: int, retry: bool) -> None:
    reply, asked = answered(raw)
    assert (reply.status, reply.output_tokens, reply.retry_after) == (status, tokens, retry)
    assert reply.raw == raw
    assert reply.begun <= (reply.first or reply.end) <= reply.end
    assert asked.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert asked.endswith(b'\r\n\r\n{"prompt": "x"}')


def test_a_server_that_is_not_there_is_status_0() -> None:
    reply = asyncio.run(ask(1, {}))
    assert (reply.status, reply.raw) == (0, b"")
