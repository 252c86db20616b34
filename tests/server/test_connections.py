"""Below the application: sizes, times, malformed requests, and too many connections."""

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from octavo.errors import ConfigError
from octavo.server.connections import Connection, Connections, State
from octavo.server.limits import HTTPLimits
from octavo.server.options import ServerConfig
from octavo.server.sse import DONE, EventStream, Streams
from serving import Process, wait_until

LIMITS = HTTPLimits(head_bytes=200)


class Transport:
    """What a connection writes, without a socket."""

    def __init__(self):
        self.writes, self.closed, self.ended = [], False, False

    @property
    def written(self):
        return b"".join(self.writes)

    def write(self, data):
        assert not self.ended
        self.writes.append(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True

    abort = close

    def write_eof(self):
        self.ended = True

    def get_write_buffer_size(self):
        return 0

    def get_extra_info(self, name, default=None):
        return default

    def pause_reading(self):
        pass

    resume_reading = pause_reading


async def app(scope, receive, send):
    """Answers with the body's size; `/early` before the body is read."""
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    text = f"{scope['path']} {size};".encode()
    length = (b"content-length", str(len(text)).encode())
    status = 401 if scope["path"] == "/early" else 200
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": text})


def answer(pieces, limits=LIMITS, app=app, kind=Transport):
    """What a connection answers to these pieces: (statuses, all bytes, connection)."""

    async def run():
        config = Config(app, http="h11", ws="none", lifespan="off", log_config=None)
        connection = Connection(
            config, ServerState(), {}, asyncio.get_running_loop(), table=Connections(limits, 10)
        )
        transport = kind()
        transport.protocol = connection
        connection.connection_made(transport)
        for piece in pieces:
            if not transport.closed:
                connection.data_received(piece)
            for _ in range(8):
                await asyncio.sleep(0)
        return connection, transport

    connection, transport = asyncio.run(run())
    statuses = [int(code) for code in re.findall(rb"HTTP/1.1 (\d+) ", transport.written)]
    return statuses, transport.written, connection


def error_code(written):
    return json.loads(written[written.index(b'{"error"') :])["error"]["code"]


def cuts(raw):
    """The same bytes: whole, byte by byte, and cut at one place, every one."""
    yield [raw]
    yield [raw[i : i + 1] for i in range(len(raw))]
    for at in range(1, len(raw)):
        yield [raw[:at], raw[at:]]


HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
EARLY = HEAD.replace(b"/x", b"/early")
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FIVE = HEAD + b"Content-Length: 5\r\n\r\n12345"


def padded(size):
    """A head of `size` bytes."""
    return HEAD + b"A: " + b"a" * (size - len(HEAD) - 7) + b"\r\n\r\n"


GOOD = {
    "body": (FIVE, b"/x 5;"),
    "chunks": (CHUNKED + b"2\r\n12\r\n3;a=b\r\n345\r\n0\r\n\r\n", b"/x 5;"),
    "no body": (b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", b"/x 0;"),
    "empty lines before": (b"\r\n\n\r\n" + FIVE, b"/x 5;"),
    "bare line feeds": (b"GET /x HTTP/1.1\nHost: x\n\n", b"/x 0;"),
    "a head at the limit": (padded(200), b"/x 0;"),
    "an upgrade that is not served": (
        b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", b"/x 0;"),
    "old": (b"GET /x HTTP/1.0\r\n\r\n", b"/x 0;"),
}  # fmt: skip
BAD = {
    "a head above the limit": (padded(201), 431, "head_too_large"),
    "a head without an end": (padded(300)[:-4], 431, "head_too_large"),
    "a path above the limit": (b"GET /" + b"a" * 300, 431, "head_too_large"),
    "no http": (b"hello\r\n\r\n", 400, "malformed_request"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "malformed_request"),
    "a carriage return": (b"\rGET / HTTP/1.1\r\nHost: x\r\n\r\n", 400, "malformed_request"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    "two hosts": (HEAD + b"Host: y\r\n\r\n", 400, "malformed_request"),
    "a bad header": (HEAD + b"a b: c\r\n\r\n", 400, "malformed_request"),
    "a space before a colon": (HEAD + b"Content-Length : 5\r\n\r\n", 400, "malformed_request"),
    "a negative length": (HEAD + b"Content-Length: -5\r\n\r\n", 400, "malformed_request"),
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400,
                    "malformed_request"),
    "a length and chunks": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400,
                            "malformed_request"),
    "another coding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 501,
                       "unsupported_transfer_encoding"),
    "another version": (b"PRI * HTTP/2.0\r\n\r\n", 505, "unsupported_http_version"),
    "a bad chunk": (CHUNKED + b"zz\r\n", 400, "malformed_request"),
    "a chunk without its end": (CHUNKED + b"2\r\n12xx", 400, "malformed_request"),
    "a long chunk extension": (CHUNKED + b"2;" + b"a" * 250 + b"\r\n12\r\n0\r\n\r\n", 400,
                               "malformed_request"),
    "long trailers": (CHUNKED + b"0\r\nA: " + b"a" * 250 + b"\r\n\r\n", 400, "malformed_request"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_request_is_the_same_however_it_is_cut(name):
    raw, wanted = GOOD[name]
    for pieces in cuts(raw):
        statuses, written, _ = answer(pieces)
        assert (statuses, written.endswith(wanted)) == ([200], True), pieces


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_request_gets_the_error_shape_however_it_is_cut(name):
    raw, status, code = BAD[name]
    for pieces in cuts(raw):
        statuses, written, connection = answer(pieces)
        assert (statuses, error_code(written)) == ([status], code), pieces
        assert b"connection: close" in written
        assert connection.state is State.LINGERING


@pytest.mark.parametrize("body", [b"5\r\n12345\r\n0\r\n\r\n", b"zz\r\n", b"2;" + b"a" * 250])
def test_a_refused_head_gets_its_answer_whatever_its_body_is(body):
    for pieces in cuts(EARLY + b"Transfer-Encoding: chunked\r\n\r\n" + body):
        statuses, written, _ = answer(pieces)
        assert statuses == [401], pieces
        assert written.endswith(b"/early 0;")


def test_pipelined_requests_are_answered_in_order_however_they_are_cut():
    raw = FIVE + b"\r\n" + CHUNKED.replace(b"/x", b"/y") + b"1\r\n1\r\n0\r\n\r\n" + FIVE
    for pieces in cuts(raw):
        statuses, written, connection = answer(pieces)
        assert statuses == [200] * 3, pieces
        assert re.findall(rb"/\w \d;", written) == [b"/x 5;", b"/y 1;", b"/x 5;"]
        assert connection.state is State.KEPT


def test_what_follows_a_good_request_is_refused_after_its_answer():
    for pieces in cuts(FIVE + b"nonsense\r\n\r\n"):
        statuses, written, _ = answer(pieces)
        assert statuses == [200, 400], pieces
        assert error_code(written) == "malformed_request"


def test_the_state_of_a_connection_follows_what_it_waits_for():
    whole = len(FIVE)
    for pieces, state in [
        ([], State.SILENT), ([FIVE[:1]], State.HEAD), ([FIVE[: whole - 1]], State.BUSY),
        ([FIVE], State.KEPT), ([FIVE, FIVE[:9]], State.HEAD), ([EARLY], State.HEAD),
        ([EARLY + b"Content-Length: 9\r\n\r\n1"], State.LINGERING),
        ([EARLY + b"Content-Length: 2\r\n\r\n1", b"2"], State.KEPT),
    ]:  # fmt: skip
        assert answer(pieces)[2].state is state, pieces


class Fake:
    """A connection in the table."""

    def __init__(self, table, state, now=0.0):
        self.state, self.transport, self.late = State.BUSY, Transport(), False
        table.move(self, state, now)

    def end_late(self):
        self.late = True


async def stream(scope, receive, send):
    """Answers with pieces: two at once, then one, then one that comes with the end."""

    async def values():
        yield "a"
        yield "b" * 20
        await asyncio.sleep(0)
        yield "c"

    await EventStream(values(), [], lambda error: None, Streams(10))(scope, receive, send)


EVENTS = b'data: "a"\n\n', b'data: "%b"\n\n' % (b"b" * 20), b'data: "c"\n\n', DONE


def test_a_stream_has_one_chunk_an_event_and_one_write_a_turn():
    _, _, connection = answer([b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"], app=stream)
    chunks = [b"%x\r\n%b\r\n" % (len(text), text) for text in EVENTS]
    writes = [data for data in connection.transport.writes if data]
    assert writes[1:] == [chunks[0] + chunks[1], chunks[2] + chunks[3], b"0\r\n\r\n"]
    assert b"transfer-encoding: chunked" in writes[0].lower()
    assert connection.state is State.KEPT


def test_a_stream_to_an_old_client_has_no_chunks():
    _, written, connection = answer([b"GET /x HTTP/1.0\r\n\r\n"], app=stream)
    assert written.partition(b"\r\n\r\n")[2] == b"".join(EVENTS)
    assert connection.transport.closed


class Full(Transport):
    """One whose client takes the head of an answer, and one write more."""

    def write(self, data):
        super().write(data)
        if len(self.writes) == 2:
            self.protocol.pause_writing()


def test_a_stream_waits_for_a_client_that_does_not_read():
    made = []

    async def paused(scope, receive, send):
        async def values():
            for i in range(9):
                made.append(i)
                yield i
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        await EventStream(values(), [], lambda error: None, Streams(10))(scope, receive, send)

    _, written, _ = answer([b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"] * 2, app=paused, kind=Full)
    assert made == [0, 1]
    assert written.endswith(b"\r\n\r\n9\r\ndata: 0\n\n\r\n")


def test_connections_that_ask_for_nothing_are_closed_first():
    table = Connections(LIMITS, 5)
    states = [State.HEAD, State.KEPT, State.SILENT, State.SILENT, State.BUSY, State.LINGERING]
    fakes = [Fake(table, state) for state in states]
    order = []
    while table.make_room():
        order += [i for i, f in enumerate(fakes) if f.transport.closed and i not in order]
    assert order == [5, 2, 3, 1, 0]


def test_answers_that_clients_leave_are_counted():
    """What the system holds for a client counts, and what waits here."""

    class Wired(Transport):
        def __init__(self, sock, waiting=0):
            super().__init__()
            self.sock, self.waiting = sock, waiting

        def get_extra_info(self, name, default=None):
            return self.sock if name == "socket" else default

        def get_write_buffer_size(self):
            return self.waiting

    async def run():
        config = Config(app, http="h11", ws="none", lifespan="off", log_config=None)
        table = Connections(LIMITS, 10)
        ours, theirs = zip(*(socket.socketpair() for _ in range(3)), strict=True)
        made = []
        for sock, waiting in zip(ours, (0, 1 << 20, 0), strict=True):
            made.append(Connection(config, ServerState(), {}, asyncio.get_running_loop(),
                                   table=table))  # fmt: skip
            made[-1].connection_made(Wired(sock, waiting))
        assert table.unread() == 1
        ours[0].sendall(b"x" * (1 << 15))
        assert table.unread() == 2
        assert theirs[0].recv(1 << 16, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
        assert table.unread() == 1
        for sock in (*ours, *theirs):
            sock.close()
        assert table.unread() == 0  # of sockets that are closed
        made[0].connection_lost(TimeoutError())
        made[1].connection_lost(None)
        made[2].connection_lost(ConnectionResetError())
        assert (table.timed_out, table.open) == (1, set())

    asyncio.run(run())


def test_a_batch_leaves_new_connections_the_time_to_send():
    assert [Connections(LIMITS, n).batch for n in (8, 80, 8000)] == [1, 10, 256]
    assert LIMITS.connections(64, 20) == 20
    assert LIMITS.connections(32, 30) == 8


SHORT = HTTPLimits(head_seconds=0.5, linger_seconds=0.5, sweep_seconds=0.05)


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(raw):
    return b"".join(iter(functools.partial(raw.recv, 65536), b""))


def test_times_of_silent_and_slow_clients(make_server):
    server = make_server({"keep_alive_timeout": 1.5}, limits=SHORT)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        silent, slow, kept, refused = (stack.enter_context(connect(server)) for _ in range(4))
        slow.sendall(b"GET /health HT")
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        refused.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n1")
        late = read_all(slow)
        assert late.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert error_code(late) == "timeout"
        with contextlib.suppress(ConnectionResetError):
            assert b" 404 " in read_all(refused)
        assert 0.4 < time.monotonic() - began < 1.4
        assert b" 200 " in read_all(kept)
        assert read_all(silent) == b""
        assert 1.4 < time.monotonic() - began < 5
    server.assert_alive()


def test_idle_connections_stay_open_longer_than_those_of_proxies(server):
    assert ServerConfig().keep_alive_timeout == HTTPLimits().keep_alive_seconds >= 75
    with connect(server) as raw:
        for pause in (5.5, 0):  # uvicorn's own limit is 5 s
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in raw.recv(65536)
            time.sleep(pause)
    with pytest.raises(ConfigError, match="keep_alive_timeout must be above 0, not 0"):
        ServerConfig(keep_alive_timeout=0)


def test_a_pipelining_client_that_leaves_ends_its_request(server):
    body = b'{"prompt": "!slow", "max_tokens": 400, "ignore_eos": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with connect(server) as raw:
        raw.sendall(request)
        wait_until(lambda: server.service.client.in_flight == 1)
        raw.sendall(request)  # while the first one is waited for
        time.sleep(0.1)
    began = time.monotonic()
    server.assert_idle()
    assert time.monotonic() - began < 2


def test_a_body_has_its_time_in_all_however_it_is_cut(server, monkeypatch):
    monkeypatch.setattr("octavo.server.middleware.BODY_SECONDS", 0.5)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with connect(server) as raw:
        raw.sendall((head + "Content-Length: 1000\r\n\r\n").encode())
        raw.setblocking(False)
        began, answer = time.monotonic(), b""
        while not answer.endswith(b"}}") and time.monotonic() - began < 5:
            raw.send(b" ")
            time.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                answer += raw.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_code(answer) == "timeout"


def test_a_refused_client_that_still_sends_gets_to_read_the_answer(server):
    with connect(server) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        time.sleep(0.1)
        for _ in range(20):
            raw.sendall(b"x" * 65536)
        assert error_code(read_all(raw)) == "malformed_request"


def descriptors_server(folder, most):
    process = Process.__new__(Process)
    code = (
        "import resource, runpy, sys; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most})); "
        "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0].rpartition('/')[0]); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    popen = subprocess.Popen

    def limited(command, **options):
        return popen([sys.executable, "-c", code, *command[1:]], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", limited)
        process.__init__(folder)
    return process


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_silent_clients_take_no_descriptors_from_others(folder, engine_path):
    with descriptors_server(folder, 64) as server:
        server.wait_ready()
        silent = [connect(server) for _ in range(120)]
        before = cpu_seconds(server.process.pid)
        for _ in range(20):
            assert server.status() == 200
            time.sleep(0.1)
        assert cpu_seconds(server.process.pid) - before < 1
        for raw in silent:
            raw.close()
        server.process.terminate()
        code, log = server.end()
    assert code == 0
    assert "Traceback" not in log
    lines = [line for line in log.splitlines() if "descriptors" in line]
    assert 1 <= len(lines) <= 6
    assert "closed" in lines[0]


def test_a_lack_of_descriptors_is_one_line_and_a_pause(server, caplog, monkeypatch):
    """Where others take the descriptors: `accept` fails although there are few connections."""
    listener = server.runner._listener
    fail = {"left": True}
    tries = itertools.count()
    original = socket.socket.accept

    def accept(self):
        if self is listener:
            next(tries)
            if fail["left"]:
                raise OSError(24, "Too many open files")
        return original(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with connect(server) as raw:
        time.sleep(1.6)
        lines = [r for r in caplog.records if "cannot accept connections" in r.getMessage()]
        assert 1 <= len(lines) <= 2
        assert all(record.exc_info is None for record in lines)
        assert next(tries) <= 4
        fail["left"] = False
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in raw.recv(65536)
    wait_until(lambda: server.http.get("/health").status_code == 200)
