"""A link over TCP with keys: who gets in, who does not, and what a lost connection means."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from octavo.config import EngineConfig
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine import link as link_module
from octavo.engine import tcp
from octavo.engine.client import EngineClient
from octavo.engine.clock import RemoteClock
from octavo.engine.launcher import Addresses, LocalLauncher
from octavo.engine.link import _at_engine, _at_ours
from octavo.engine.messages import Dead, EngineKeys, Fault, Launch, Report, build
from octavo.engine.tcp import EngineEnds, ServerEnds
from octavo.errors import ConfigError, EngineDeadError
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH, wait_until, write_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
LONG = PARAMS.with_(max_tokens=400)


class TcpLauncher(LocalLauncher):
    """A child of this process, over the sockets that one on another machine has."""

    remote = True

    def __init__(self, *, admits=True):
        super().__init__()
        self.ends = ServerEnds()
        self._admits = admits

    async def connect(self, inbox, outbox):
        self._undo.callback(self.ends.close)
        return Addresses(*self.ends.bind(inbox, outbox, "127.0.0.1"))

    async def start(self, launch, exited):
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if self._admits:
            self.ends.admit(public)
        self.launch = msgspec.structs.replace(
            launch, keys=EngineKeys(self.ends.public, public, secret)
        )
        return await super().start(self.launch, exited)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(autouse=True)
def engine_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


@contextlib.asynccontextmanager
async def started(folder, launcher=TcpLauncher):
    config = EngineConfig(model=str(folder), swap_space=0)
    client = EngineClient(config, "fake_engine:create", lambda engine: launcher())
    await client.start(lambda: load_tokenizer(folder))
    try:
        yield client
    finally:
        await client.close()


def run(folder, body, launcher=TcpLauncher):
    async def main():
        async with started(folder, launcher) as client:
            await asyncio.wait_for(body(client), 20)

    asyncio.run(main())


async def answer(client, ids, params=PARAMS):
    batch = await client.submit([Submission(client.new_id(), tuple(ids), params)])
    return "".join([output.outputs[0].text async for _, output in batch])


def test_it_answers_among_strangers(folder, caplog):
    """Noise, no key, another key, the server's own public key: none gets in or disturbs."""

    async def body(client):
        link = client.links[0]
        assert_keys_are_secret(link)
        with strangers(link.launcher):
            while not link.launcher.ends._refused:
                await asyncio.sleep(0.01)
            assert await answer(client, [99]) == "abcdefgh"
        while not link._clock._samples:
            await asyncio.sleep(0.01)
        assert abs(link._clock.theirs(0.0)) < 5.0  # the same machine: but for the way
        assert await answer(client, [99]) == "abcdefgh"
        assert client.unhealthy_reason is None

    with caplog.at_level(logging.WARNING):
        run(folder, body)
    assert [r.getMessage() for r in caplog.records] == [
        "a connection to an engine's sockets was refused: its key is unknown"
    ]


def test_a_connection_that_was_idle_during_a_load_still_carries(tmp_path):
    """With ZeroMQ's own heartbeats every 2 s, the report of a load of 3 s was lost."""

    async def body(client):
        assert await answer(client, [99]) == "abcdefgh"

    run(write_model(tmp_path, load_seconds=3), body)


def assert_keys_are_secret(link):
    """They are in no text, command line or environment."""
    keys = link.launcher.launch.keys
    assert keys.secret not in repr(link.launcher.launch)
    process = Path(f"/proc/{link.process.pid}")
    for name in ("cmdline", "environ"):
        raw = (process / name).read_bytes()
        assert keys.secret.encode() not in raw
        assert keys.server.encode() not in raw


@contextlib.contextmanager
def strangers(launcher):
    address = launcher.launch.outbox
    port = int(address.rsplit(":", 1)[1])
    report = msgspec.msgpack.encode(Dead(Fault("EngineDeadError", "a stranger says so")))
    with zmq.Context() as context, socket.create_connection(("127.0.0.1", port)) as noise:
        noise.sendall(os.urandom(500))
        made = [context.socket(zmq.PUSH) for _ in range(3)]
        for i, stranger in enumerate(made):
            stranger.linger = 0
            if i:  # the first one has no key at all
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
                wrong, _ = zmq.curve_keypair()
                stranger.curve_serverkey = wrong if i == 1 else launcher.ends.public.encode()
            stranger.connect(address)
            stranger.send(report, zmq.NOBLOCK)
        yield
        for stranger in made:
            stranger.close()


def test_an_engine_with_another_key_cannot_start(folder, capfd):
    with pytest.raises(EngineDeadError, match="ended with exit code 1"):
        run(folder, None, lambda: TcpLauncher(admits=False))
    assert "refused this engine process" in capfd.readouterr().err


def test_times_are_those_of_the_engines_machine():
    clock = RemoteClock()
    clock.observe(1000.0, 100.0)  # theirs is 900 s ahead
    sent = Submission("r", (1,), PARAMS, arrival_time=90.0, deadline=120.0)
    there = _at_engine(sent, clock)
    assert (there.arrival_time, there.deadline) == (990.0, 1020.0)
    assert _at_engine(Submission("r", (1,), PARAMS), clock).deadline is None
    assert _at_ours(Update("r", 0, scheduled_time=1001.0), clock).scheduled_time == 101.0
    assert _at_ours(update := Update("r", 0), clock) is update


def test_an_engine_whose_connection_ends_exits(folder):
    async def body(client):
        link = client.links[0]
        batch = await client.submit([Submission("r", tuple(b"!slow"), LONG)])
        await anext(batch)
        link._inbox.close()  # as when the network resets it
        while link.process.exit_code is None:
            await asyncio.sleep(0.01)
        assert link.process.exit_code == 0
        with pytest.raises(EngineDeadError, match="exit code 0"):
            async for _ in batch:
                pass

    run(folder, body)


def test_a_command_to_nobody_is_the_engines_death(folder):
    async def body(client):
        link = client.links[0]
        os.kill(link.process.pid, signal.SIGKILL)
        while link.reason is None:
            with contextlib.suppress(EngineDeadError):
                await answer(client, [99])
        assert "SIGKILL" in link.reason or "connection" in link.reason

    run(folder, body)


def test_silence_of_another_machine_is_death(folder, monkeypatch):
    monkeypatch.setattr(link_module, "FREEZE_SECONDS", 1.0)
    monkeypatch.setattr(link_module, "_EXIT_SECONDS", 0.1)

    async def body(client):
        batch = await client.submit([Submission("r", tuple(b"!slow"), LONG)])
        await anext(batch)
        os.kill(client.links[0].process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"silent .*; its machine or the network is lost"):
            async for _ in batch:
                pass
        await client.died.wait()

    run(folder, body)


# The ends alone


def bound(host="127.0.0.1", port=0):
    """Bind both sockets, and leave nothing."""

    async def main():
        context = zmq.asyncio.Context()
        plain = zmq.Context.shadow(context)
        ends, inbox, outbox = ServerEnds(), plain.socket(zmq.PUSH), plain.socket(zmq.PULL)
        try:
            return ends.bind(inbox, outbox, host, port)
        finally:
            inbox.close(0)
            outbox.close(0)
            ends.close()
            context.destroy(0)

    return asyncio.run(main())


def test_ports_are_free_ones_or_those_asked_for():
    first, second = bound()
    assert first.startswith("tcp://127.0.0.1:")
    assert first != second
    assert bound("::1")[0].startswith("tcp://[::1]:")
    while True:
        port = int(bound()[0].rsplit(":", 1)[1])
        with contextlib.suppress(ConfigError):  # the next one may be taken
            found = bound(port=port)
            break
    assert found == [f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"]


def test_an_address_that_cannot_be_used_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken.*rpc_port"):
            bound(port=port)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*must be an address of this machine"):
        bound("192.0.2.1")
    with pytest.raises(ConfigError, match="'nowhere' is not an IP address"):
        bound("nowhere")


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer_is_named(monkeypatch, listens):
    monkeypatch.setattr(tcp, "CONNECT_SECONDS", 0.3)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with zmq.Context() as context, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        ends = EngineEnds(context, EngineKeys(public, public, secret))
        with pytest.raises(EngineDeadError, match=f"server at {address} cannot be reached"):
            ends.inbox(address)
        ends.close()


# The process alone


def launched(line: bytes) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.engine.process"],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    process.stdin.write(line + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("readable", [True, False])
def test_another_version_is_refused_even_if_its_launch_cannot_be_read(folder, tmp_path, readable):
    config = EngineConfig(model=str(folder))
    launch = Launch(config, f"ipc://{tmp_path}/i", f"ipc://{tmp_path}/o", "fake_engine:create")
    fields = msgspec.to_builtins(msgspec.structs.replace(launch, build="9.9.9 (messages 12345678)"))
    if not readable:
        fields["config"] = ["of", "another", "form"]
    with zmq.Context() as context, context.socket(zmq.PULL) as outbox:
        outbox.bind(launch.outbox)
        process = launched(json.dumps(fields).encode())
        assert outbox.poll(20000)
        error = msgspec.msgpack.decode(outbox.recv(), type=Report).fault.error()
        process.communicate(timeout=20)
    assert process.returncode == 1
    assert type(error) is ConfigError
    assert "9.9.9 (messages 12345678)" in str(error)
    assert build() in str(error)


def test_a_load_ends_with_the_process_that_wants_it(tmp_path):
    folder = write_model(tmp_path, load_seconds=60)
    launch = Launch(
        EngineConfig(model=str(folder)),
        f"ipc://{tmp_path}/i", f"ipc://{tmp_path}/o", "fake_engine:create",
    )  # fmt: skip
    process = launched(msgspec.json.encode(launch))
    wait_until(lambda: (tmp_path / "i").exists())
    time.sleep(0.1)
    _, said = process.communicate(timeout=20)  # closes its standard input
    assert process.returncode == 1
    assert b"stops loading" in said
