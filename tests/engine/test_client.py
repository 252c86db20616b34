"""The asyncio client over a real engine process."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
import zmq

from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine import launcher, link
from octavo.engine.client import Batch, EngineClient, merge
from octavo.errors import ConfigError, EngineDeadError, EngineError, QueueFullError, RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH, write_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SLOW = list(b"!slow")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(autouse=True)
def engine_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


@contextlib.asynccontextmanager
async def started(folder, **options):
    config = EngineConfig(model=str(folder), swap_space=0, **options)
    client = EngineClient(config, "fake_engine:create")
    await client.start(lambda: load_tokenizer(folder))
    try:
        yield client
    finally:
        await client.close()


def run(folder, body, **options):
    async def main():
        async with started(folder, **options) as client:
            await asyncio.wait_for(body(client), 20)

    asyncio.run(main())


async def texts(batch):
    found = {}
    async for position, output in batch:
        for choice in output.outputs:
            key = (position, choice.index)
            found[key] = found.get(key, "") + choice.text
    return found


def request(client, ids, params=PARAMS, **fields):
    return Submission(client.new_id(), tuple(ids), params, **fields)


def delta(text, ids, finished=None, index=0, **fields):
    choice = CompletionOutput(index, text, ids, finish_reason=finished)
    return RequestOutput("r", None, [1], [choice], finished is not None, **fields)


def test_two_deltas_become_one():
    merged = merge(delta("a", [1], num_cached_tokens=3), delta("b", [2, 3], "stop"))
    assert merged.outputs[0].text == "ab"
    assert merged.outputs[0].token_ids == [1, 2, 3]
    assert merged.outputs[0].finish_reason == "stop"
    assert merged.finished
    assert merged.num_cached_tokens == 3
    both = merge(delta("a", [1], prompt_logprobs=[None]), delta("b", [2], index=1))
    assert [c.text for c in both.outputs] == ["a", "b"]
    assert both.prompt_logprobs == [None]


def test_what_is_not_read_waits_in_one_place():
    class Nobody:
        def abort(self, ids):
            self.ids = ids

    async def main():
        nobody = Nobody()
        batch = Batch(nobody, ["r"])
        for _ in range(1000):
            batch.put(delta("a", [1]))
        assert len(batch._pending) == 1
        position, output = await anext(batch)
        assert (position, output.outputs[0].text) == (0, "a" * 1000)
        batch.fail(EngineDeadError("gone"))
        with pytest.raises(EngineDeadError):
            await anext(batch)
        batch.close()
        assert nobody.ids == ["r"]

    asyncio.run(main())


def test_a_batch_is_answered_in_any_order(folder):
    async def body(client):
        said = request(client, b"say [[65,66]]", PARAMS.with_(ignore_eos=False))
        batch = await client.submit([said, request(client, [99])])
        assert await texts(batch) == {(0, 0): "AB", (1, 0): "abcdefgh"}
        assert client.in_flight == 0
        assert client.unhealthy_reason is None

    run(folder, body)


def test_closing_a_batch_aborts_what_runs(folder):
    async def body(client):
        got = []
        client.observer.update = lambda engine, report: got.append(report)
        batch = await client.submit([request(client, SLOW, PARAMS.with_(max_tokens=400))])
        await anext(batch)
        batch.close()
        assert client.in_flight == 0
        while not (got and got[-1].stats.finished.get("abort") and not got[-1].stats.running):
            await asyncio.sleep(0.01)
        assert got[-1].stats.kv_blocks_usage == 0
        assert got[-1].stats.generation_tokens < 100

    run(folder, body)


def test_after_many_aborts_nothing_is_kept(folder):
    async def body(client):
        for _ in range(300):
            (await client.submit([request(client, [99])])).close()
        assert await texts(await client.submit([request(client, [99])]))
        assert client.in_flight == 0
        assert len(client._outputs) == 0

    run(folder, body)


def test_a_full_queue_takes_all_of_a_batch_or_nothing(folder):
    async def body(client):
        first = await client.submit([request(client, SLOW) for _ in range(3)])
        with pytest.raises(QueueFullError, match="limit of 4"):
            await client.submit([request(client, SLOW) for _ in range(2)])
        assert client.in_flight == 3
        last = await client.submit([request(client, SLOW)])
        assert len(await texts(first)) == 3
        assert len(await texts(last)) == 1

    run(folder, body, max_num_seqs=1, max_waiting=3)


def test_what_the_engine_refuses_is_reported(folder):
    async def body(client):
        same = request(client, SLOW)
        await client.submit([same])
        client._requests.clear()  # what the engine still has, and would refuse a second time
        client._outputs.abort(same.request_id)
        with pytest.raises(RequestError, match="in flight") as caught:
            await client.submit([request(client, [99]), same])
        assert caught.value.param == "request_id"
        assert client.in_flight == 0
        failed = await client.submit([request(client, b"!fail"), request(client, SLOW)])
        with pytest.raises(EngineError, match="told to fail"):
            await texts(failed)
        failed.close()
        assert client.in_flight == 0

    run(folder, body)


def test_a_stop_string_ends_a_choice_in_the_engine_too(folder):
    async def body(client):
        params = PARAMS.with_(max_tokens=400, stop=["def"], n=2)
        got = []
        client.observer.update = lambda engine, report: got.append(report)
        assert await texts(await client.submit([request(client, SLOW, params)])) == {
            (0, 0): "abc",
            (0, 1): "abc",
        }
        while not (got and got[-1].stats.running == 0):
            await asyncio.sleep(0.01)
        assert got[-1].stats.generation_tokens < 40

    run(folder, body)


@pytest.mark.parametrize("order", ["!kill", "!raise"])
def test_srv_06_death_reaches_every_batch_and_every_later_call(folder, order):
    async def body(client):
        slow = await client.submit([request(client, SLOW, PARAMS.with_(max_tokens=400))])
        await anext(slow)
        deadly = await client.submit([request(client, order.encode())])
        for batch in (slow, deadly):
            with pytest.raises(EngineDeadError) as caught:
                await texts(batch)
        assert ("SIGKILL" if order == "!kill" else "MemoryError") in caught.value.reason
        await client.died.wait()
        with pytest.raises(EngineDeadError):
            await client.submit([request(client, [99])])
        assert client.in_flight == 0

    run(folder, body)


def test_srv_06_silence_fails_what_waits(folder, monkeypatch):
    monkeypatch.setattr(link, "FREEZE_SECONDS", 1.0)

    async def body(client):
        batch = await client.submit([request(client, SLOW, PARAMS.with_(max_tokens=400))])
        await anext(batch)
        os.kill(client.links[0].process.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="silent"):
            await texts(batch)
        with pytest.raises(EngineError, match="silent"):
            await client.submit([request(client, [99])])
        os.kill(client.links[0].process.pid, signal.SIGCONT)
        while client.unhealthy_reason:
            await asyncio.sleep(0.01)
        assert await texts(await client.submit([request(client, [99])])) == {(0, 0): "abcdefgh"}

    run(folder, body)


def test_a_start_that_fails_says_why(folder, tmp_path):
    broken = write_model(tmp_path / "broken")
    (broken / "broken").touch()
    with pytest.raises(ConfigError, match="told to be broken"):
        run(broken, None)
    (broken / "broken").unlink()
    (broken / "fake.json").write_text(json.dumps({}))
    with pytest.raises(EngineDeadError, match="KeyError"):
        run(broken, None)


def test_a_tokenizer_that_fails_ends_the_process(folder):
    async def main():
        client = EngineClient(EngineConfig(model=str(folder)), "fake_engine:create")

        def fails():
            raise ConfigError("no tokenizer")

        with pytest.raises(ConfigError, match="no tokenizer"):
            await client.start(fails)
        assert client.links[0].process.exit_code is not None
        assert not os.path.exists(client.links[0].launcher.folder)

    asyncio.run(main())


def test_closing_ends_the_process_and_removes_its_folder(folder):
    async def main():
        async with started(folder) as client:
            pass
        assert client.links[0].process.exit_code == 0
        assert not os.path.exists(client.links[0].launcher.folder)

    asyncio.run(main())


# Starts that fail half-way


def left_behind(folder):
    """Folders, children and descriptors that a start makes."""
    children = {path.name for path in Path("/proc/self/task").glob("*/children")}
    lists = [Path(f"/proc/self/task/{t}/children").read_text() for t in children if t.isdigit()]
    return sorted(folder.glob("octavo-*")), sorted(lists), len(os.listdir("/proc/self/fd"))


def failing(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    """The only folder that sockets may lie in."""
    place = tmp_path / "s"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(launcher, "_SHORT_FOLDERS", ())
    if len(str(place)) > 70:
        pytest.skip("pytest's own folder is too long for a socket's path")
    return place


async def fails(folder, kind):
    client = EngineClient(EngineConfig(model=str(folder), swap_space=0), "fake_engine:create")
    with pytest.raises(kind) as caught:
        await asyncio.wait_for(client.start(lambda: load_tokenizer(folder)), 20)
    await client.close()  # as the server does
    return caught.value


@pytest.mark.parametrize(
    ("place", "error", "kind", "says"),
    [
        (
            "launcher.subprocess.Popen",
            OSError(24, "Too many open files"),
            EngineDeadError,
            "open files",
        ),
        (
            "launcher.threading.Thread.start",
            RuntimeError("can't start new thread"),
            RuntimeError,
            "thread",
        ),
        ("link.zmq.Context.socket", zmq.ZMQError(24), EngineDeadError, "open files"),
        ("link.zmq.Context", zmq.ZMQError(24), EngineDeadError, "open files"),
        (
            "launcher.tempfile.mkdtemp",
            OSError(28, "No space left on device"),
            ConfigError,
            "No space left",
        ),
        ("launcher.launch_line", MemoryError("none"), MemoryError, "none"),
        ("link.asyncio.create_task", KeyError("tasks"), KeyError, "tasks"),
        ("client.OutputProcessor", ValueError("outputs"), ValueError, "outputs"),
    ],
)
def test_whatever_step_of_a_start_fails_is_said_and_undone(
    folder, sockets, monkeypatch, place, error, kind, says
):
    asyncio.run(asyncio.to_thread(int))  # what asyncio itself keeps open
    before = left_behind(sockets)

    async def main():
        with monkeypatch.context() as patch:
            if place == "launcher.threading.Thread.start":
                patch.setattr(launcher.threading, "Thread", failing(error))
            elif place == "link.asyncio.create_task":
                patch.setattr(link.EngineLink, "_watch", failing(error))
            else:
                patch.setattr(f"octavo.engine.{place}", failing(error))
            return await fails(folder, kind)

    assert says in str(asyncio.run(main()))
    assert left_behind(sockets) == before


def test_a_start_that_is_cancelled_ends_the_process_at_once(tmp_path, monkeypatch):
    """It reads no Stop while it loads: it is killed, not waited for."""
    monkeypatch.setattr(link, "_EXIT_SECONDS", 60)
    slow = write_model(tmp_path / "slow", load_seconds=60)

    async def main():
        client = EngineClient(EngineConfig(model=str(slow), swap_space=0), "fake_engine:create")
        starting = asyncio.create_task(client.start(lambda: load_tokenizer(slow)))
        while not hasattr(client, "_outputs"):
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, 20)
        assert client.links[0].process.exit_code == -signal.SIGKILL

    asyncio.run(main())


def test_what_closing_raises_does_not_hide_why_a_start_failed(folder, sockets, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)

    async def main():
        client = EngineClient(EngineConfig(model=str(folder), swap_space=0), "fake_engine:create")
        monkeypatch.setattr(client, "close", failing(AttributeError("no attribute")))
        monkeypatch.setattr(launcher.subprocess, "Popen", failing(OSError("first")))
        with pytest.raises(EngineDeadError, match="first"):
            await client.start(lambda: load_tokenizer(folder))
        monkeypatch.undo()
        await client.close()

    asyncio.run(main())
    assert "closing after a failed start" in caplog.text
    assert not list(sockets.iterdir())


def test_a_process_that_ends_at_once_is_said(folder, sockets, monkeypatch):
    monkeypatch.setattr(launcher, "module_command", lambda name, **_: ["false"])
    error = asyncio.run(fails(folder, EngineDeadError))
    assert "exit code 1" in str(error)
    assert not list(sockets.iterdir())


def test_a_long_tmpdir_is_left_for_a_shorter_folder(folder, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 113)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    run(folder, lambda client: asyncio.sleep(0))
    assert not list(long.iterdir())
    monkeypatch.setattr(launcher, "_SHORT_FOLDERS", ("/nowhere",))
    error = str(asyncio.run(fails(folder, ConfigError)))
    assert "set TMPDIR to a folder" in error
    assert "at most 84 bytes" in error
    assert str(long) in error
    assert "/nowhere" in error


def test_the_longest_path_that_is_taken_works(folder, tmp_path, monkeypatch):
    place = tmp_path / "x"
    missing = 84 - len(str(tmp_path)) - 1
    if missing < 1:
        pytest.skip("pytest's own folder is too long for a socket's path")
    place = tmp_path / ("x" * missing)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(launcher, "_SHORT_FOLDERS", ())
    run(folder, lambda client: asyncio.sleep(0))


def test_a_fork_is_told_and_cannot_end_the_engine(folder):
    async def body(client):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                client.check_queue(1)
            except EngineError as error:
                os.write(writer, str(error).encode())
            client.abort(["r0"])
            with contextlib.suppress(StopIteration):
                client.close().send(None)  # at once, without the loop
            os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)
        said = os.read(reader, 1000).decode()
        os.close(reader)
        os.close(writer)
        assert f"made in process {os.getpid()} and is used in its fork, process {child}" in said
        assert len(await texts(await client.submit([request(client, [97])]))) == 1

    run(folder, body)


def test_the_engine_starts_among_files_named_like_modules(folder, tmp_path, monkeypatch):
    for name in ("calendar", "json", "msgspec", "signal", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran a file of the user')\n")
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo" / "__init__.py").write_text("raise SystemExit('ran a folder of it')\n")
    monkeypatch.chdir(tmp_path)
    run(folder, lambda client: asyncio.sleep(0))
