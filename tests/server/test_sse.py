"""Streams and the clients that leave them, read slowly, or not at all."""

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time

import httpx
import msgspec
import pytest

from octavo.errors import EngineError
from octavo.server.sse import Answer, EventStream, Streams, Wire, event, named_event, to_json
from serving import wait_until


def test_str_12_line_separators_are_escaped():
    for mark in ("\u0085", "\u2028", "\u2029"):
        raw = to_json({"text": f"a{mark}ď🌶"})
        assert mark.encode() not in raw
        assert json.loads(raw) == {"text": f"a{mark}ď🌶"}
        assert len(event({"text": f"a{mark}\r\n"}).decode().splitlines()) == 2


class Peer:
    """The server's side of one connection, as ASGI shows it."""

    def __init__(self, leaves_after: int | None = None, stalls: bool = False) -> None:
        self.sent: list[dict] = []
        self._leaves_after = leaves_after
        self._stalls = stalls
        self._gone = asyncio.Event()

    async def receive(self) -> dict:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        self.sent.append(message)
        if self._leaves_after is not None and len(self.sent) > self._leaves_after:
            self._gone.set()
        if self._stalls and len(self.sent) > 1:
            await asyncio.sleep(60)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


async def run_stream(peer, values, stall=10.0):
    ends = []
    await EventStream(values, [], ends.append, Streams(stall))({}, peer.receive, peer.send)
    assert len(ends) == 1
    return ends[0]


def test_a_stream_ends_with_done():
    async def values():
        yield {"a": 1}

    async def run():
        peer = Peer()
        assert await run_stream(peer, values()) is None
        assert peer.body == b'data: {"a":1}\n\ndata: [DONE]\n\n'
        assert peer.sent[-1]["more_body"] is False

    asyncio.run(run())


def test_a_failure_is_one_event_and_then_done():
    async def values():
        yield {"a": 1}
        raise EngineError("broken")

    async def run():
        peer = Peer()
        assert isinstance(await run_stream(peer, values()), EngineError)
        middle = peer.body.split(b"\n\n")[1]
        assert json.loads(middle[6:])["error"]["message"] == "broken"
        assert peer.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_an_api_may_name_its_events_and_end_streams_and_errors_its_own_way():
    class Piece(msgspec.Struct, tag="piece", tag_field="type"):
        text: str

    async def values():
        yield Piece("a\n")
        raise EngineError("broken")

    async def run(response, peer):
        await response({}, peer.receive, peer.send)
        return peer.body

    wire = Wire(named_event, lambda fault: {"type": "error", "text": fault.message}, b"")
    stream = EventStream(values(), [], lambda error: None, Streams(10), wire)
    assert asyncio.run(run(stream, Peer())) == (
        b'event: piece\ndata: {"type":"piece","text":"a\\n"}\n\n'
        b'event: error\ndata: {"type":"error","text":"broken"}\n\n'
    )

    async def whole():
        raise EngineError("broken")

    async def answer():
        return await run(Answer(whole(), [], lambda error: None, wire), Peer())

    assert asyncio.run(answer()) == b'{"type":"error","text":"broken"}'


@pytest.mark.parametrize("peer", ["leaves", "stalls"])
def test_a_client_that_leaves_or_stalls_ends_the_work(peer):
    ended = []

    async def values():
        try:
            while True:
                yield {}
                await asyncio.sleep(0.001)
        finally:
            ended.append(True)

    async def run():
        who = Peer(leaves_after=5) if peer == "leaves" else Peer(stalls=True)
        await asyncio.wait_for(run_stream(who, values(), stall=0.05), 5)
        assert ended

    asyncio.run(run())


def test_an_answer_is_not_made_for_a_client_that_left():
    async def make():
        await asyncio.sleep(60)

    async def run():
        ends = []
        peer = Peer()
        peer._gone.set()
        await Answer(make(), [], ends.append)({}, peer.receive, peer.send)
        assert peer.sent == []
        assert ends == [None]

    asyncio.run(run())


# --- over real sockets


@contextlib.contextmanager
def raw_stream(server, prompt="x", receive_buffer=None, **fields):
    """A socket on which a stream has begun."""
    raw = socket.socket()
    if receive_buffer:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.settimeout(10)
    with raw:
        raw.connect(("127.0.0.1", server.port))
        body = {"prompt": prompt, "stream": True, "max_tokens": 490, "ignore_eos": True, **fields}
        text = json.dumps(body)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        raw.sendall((head + "Content-Type: application/json\r\n\r\n" + text).encode())
        yield raw


def read_chunks(raw, count):
    seen = b""
    while seen.count(b"data: ") < count:
        seen += raw.recv(4096)


def hang_up(raw, how):
    if how == "rst":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
    elif how == "half":
        raw.shutdown(socket.SHUT_WR)
    else:
        raw.close()


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
def test_srv_01_a_closed_connection_ends_its_generation(server, how):
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    made = server.metric("vllm:generation_tokens_total")
    for _ in range(5):
        with raw_stream(server, "!slow") as raw:
            read_chunks(raw, 3)
            hang_up(raw, how)
            wait_until(lambda: server.service.client.in_flight == 0, 2)
    server.assert_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 5
    assert server.metric("vllm:generation_tokens_total") - made < 5 * 60
    server.assert_alive()


def test_srv_01_a_plain_request_is_given_up_too(server):
    with contextlib.suppress(httpx.ReadTimeout):
        server.http.post(
            "/v1/completions", json={"prompt": "!slow", "max_tokens": 400}, timeout=0.2
        )
    wait_until(lambda: server.service.client.in_flight == 0, 2)
    server.assert_idle()


def test_srv_01_many_streams_are_closed_and_none_stays(server):
    def one(how):
        with raw_stream(server) as raw:
            read_chunks(raw, 2)
            hang_up(raw, how)

    for i in range(0, 48, 8):
        threads = [
            threading.Thread(target=one, args=(("fin", "rst", "half")[(i + j) % 3],))
            for j in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    server.assert_idle()
    server.assert_alive()


def test_srv_01_streams_that_end_by_themselves_are_not_aborted(server, monkeypatch):
    sent = []
    link = server.service.client.links[0]
    real = link.send
    monkeypatch.setattr(link, "send", lambda c: (sent.append(c), real(c)))
    server.stream(server.say("AB"))
    server.complete(server.say("AB"))
    assert [type(c).__name__ for c in sent] == ["Add", "Add"]


def test_srv_05_a_client_that_reads_nothing_is_dropped(make_server):
    server = make_server({"stall_timeout": 1.0}, max_model_len=20_000, num_gpu_blocks_override=6000)
    many = {"max_tokens": 19_000, "logprobs": 5, "receive_buffer": 4096}
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(raw_stream(server, **many))
        wait_until(lambda: server.service.client.in_flight == 4)
        begun = time.monotonic()
        assert server.complete(server.say("AB"))["choices"][0]["text"] == "AB"
        assert time.monotonic() - begun < 5
        wait_until(lambda: server.service.client.in_flight == 0, 15)
    server.assert_idle()


def test_a_slow_reader_gets_every_token_in_fewer_chunks(server):
    with raw_stream(server, receive_buffer=4096, logprobs=5) as raw:
        time.sleep(0.5)
        seen = b""
        while b"[DONE]" not in seen:
            seen += raw.recv(2048)
    events = [json.loads(line[6:]) for line in seen.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == (
        "abcdefghijklmnopqrstuvwxyz" * 19
    )[:490]  # fmt: skip
