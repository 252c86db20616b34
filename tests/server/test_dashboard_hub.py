"""Who is sent what: one question at a time, the newest for slow readers, and what it may cost."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.client import Observer
from octavo.engine.messages import Stats
from octavo.engine.stats import EngineStats, Observations
from octavo.engine.watch import BlockMap, Followed, Queue, Snapshot, View
from octavo.errors import EngineDeadError
from octavo.server import dashboard_hub
from octavo.server.dashboard_feed import End, Update
from octavo.server.dashboard_hub import SHARE, Hub, Names, Reader, Tap, settings_of
from octavo.server.dashboard_routes import DashboardStream
from octavo.server.errors import HTTPError

QUEUE = Queue(0, 0, 0, 0, 0, 0, 0, None, "", "", {})


def view(now: float, seconds: float = 0.0, *followed: str) -> View:
    pool = BlockMap(1, 1, b"\0\0", b"\0", b"\0")
    snapshot = Snapshot(now, seconds, QUEUE, (), 0, (), pool, None, 0, 0)
    return View(snapshot, [Followed(name, ()) for name in followed])


class Link:
    """An engine that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.pending: list[asyncio.Future[View]] = []
        self.answers = True
        self.seconds = 0.0

    def look(self, followed: tuple[str, ...]) -> "asyncio.Future[View]":
        self.asked.append(followed)
        done: asyncio.Future[View] = asyncio.get_running_loop().create_future()
        self.pending.append(done)
        if self.answers:
            self.answer()
        return done

    def answer(self) -> None:
        done = self.pending.pop(0)
        if not done.done():
            done.set_result(view(float(len(self.asked)), self.seconds, *self.asked[-1]))


class Client:
    def __init__(self, engines: int) -> None:
        self.links = [Link() for _ in range(engines)]
        self.down: dict[int, str] = {}
        self.capabilities = EngineCapabilities(RunnerLimits(9, 4, 1, 32, 10))

    def engine_of(self, request_id: str) -> int | None:
        return 1 if request_id == "r7" else None


def make(engines: int = 1, **fields: Any) -> tuple[Hub, Any]:
    client: Any = Client(engines)
    config = EngineConfig(model="m", data_parallel_size=engines, **fields)
    return Hub(config, lambda: client, lambda: None, dict), client


async def next_of(reader: Reader) -> Any:
    event = await asyncio.wait_for(anext(aiter(reader.events())), 5)
    name, data = event.decode().split("\n")[:2]
    kind = {"event: snapshot": Update, "event: end": End}[name]
    return msgspec.json.decode(data.removeprefix("data: "), type=kind)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_hub, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(dashboard_hub, "PATIENCE_SECONDS", 0.03)
    monkeypatch.setattr(dashboard_hub, "SHARE", 0.5)


def test_a_reader_gets_the_newest_alone_and_what_follows_the_last_is_dropped() -> None:
    async def run() -> list[bytes]:
        reader = Reader(0, None)
        for number in range(100):
            reader.put(b"%d" % number)
        events = reader.events()
        first = await anext(events)
        reader.put(b"more")
        reader.put(b"end", last=True)
        reader.put(b"after")
        return [first, *[event async for event in events]]

    assert asyncio.run(run()) == [b"99", b"end"]


@pytest.mark.usefixtures("quick")
def test_one_question_at_a_time_for_all_readers_and_none_for_nobody() -> None:
    async def run() -> None:
        hub, client = make(2)
        (first, other) = client.links
        first.answers = False
        readers = [hub.join(0, "a"), hub.join(0, "b"), hub.join(0, None)]
        await asyncio.sleep(0.1)
        assert (len(first.asked), other.asked) == (1, [])  # it has not answered
        late = await next_of(readers[0])
        assert (bytes(late.snapshot), late.engines[0].problem) == (b"null", None)
        first.answer()
        first.answers = True
        found = [await next_of(reader) for reader in readers]
        assert found[2].followed is None
        while found[1].followed is None:
            found[1] = await next_of(readers[1])
        assert (found[1].follow, found[1].followed.id) == ("b", "b")
        for reader in readers:
            hub.leave(reader)
        count = len(first.asked)
        await asyncio.sleep(0.05)
        assert len(first.asked) == count
        hub.leave(readers[0])  # again
        assert not hub._watches

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_a_dead_engine_is_named_and_asked_again_when_it_is_back() -> None:
    async def run() -> None:
        hub, client = make(2)
        reader = hub.join(1, None)
        assert bytes((await next_of(reader)).snapshot) != b"null"
        client.down = {1: "it died"}
        while bytes((found := await next_of(reader)).snapshot) != b"null":
            pass
        assert [row.problem for row in found.engines] == [None, "it died"]
        asked = len(client.links[1].asked)
        await next_of(reader)
        assert len(client.links[1].asked) == asked
        client.down = {}
        client.links[1].answers = False
        await asyncio.sleep(0.1)
        client.links[1].pending[-1].set_exception(EngineDeadError("again"))
        client.links[1].pending.clear()
        client.links[1].answers = True
        while bytes((await next_of(reader)).snapshot) == b"null":
            pass
        hub.leave(reader)

    asyncio.run(run())


def test_what_takes_long_is_asked_less_often() -> None:
    async def run() -> None:
        hub, client = make()
        client.links[0].seconds = 0.01
        reader = hub.join(0, None)
        update = await next_of(reader)
        assert 0.01 / SHARE <= update.interval <= dashboard_hub.MOST_SECONDS
        client.links[0].seconds = 60.0
        hub.leave(reader)
        reader = hub.join(0, None)
        assert (await next_of(reader)).interval == dashboard_hub.MOST_SECONDS
        hub.leave(reader)

    asyncio.run(run())


def test_a_full_house_and_a_closed_one() -> None:
    async def run() -> None:
        hub, _ = make()
        readers = [hub.join(0, None) for _ in range(dashboard_hub.MOST_READERS)]
        with pytest.raises(HTTPError, match="16 dashboards are open"):
            hub.join(0, None)
        hub.leave(readers.pop())
        readers.append(hub.join(0, None))
        hub.close("the end", 0.01)
        assert await next_of(readers[0]) == End("the end", True)
        with pytest.raises(HTTPError, match="the end"):
            hub.join(0, None)
        await asyncio.wait_for(hub.cut.wait(), 5)

    asyncio.run(run())


@pytest.mark.usefixtures("quick")
def test_a_stream_that_is_not_taken_is_skipped_and_cut_when_the_server_ends() -> None:
    async def run() -> None:
        hub, client = make()
        stream = DashboardStream(hub, hub.join(0, None), 60.0)
        sent: list[dict[str, Any]] = []
        may_go_on = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 1:
                await may_go_on.wait()
                may_go_on.clear()

        async def receive() -> dict[str, str]:
            await asyncio.sleep(3600)
            return {}

        serving = asyncio.create_task(stream({"type": "http"}, receive, send))
        while len(client.links[0].asked) < 8:
            await asyncio.sleep(0.01)
        assert len(sent) == 2  # the start and one event; the rest was replaced
        may_go_on.set()
        while len(sent) < 3:
            await asyncio.sleep(0.01)
        first, second = (
            msgspec.json.decode(message["body"].split(b"data: ")[1]) for message in sent[1:3]
        )
        assert second["number"] >= first["number"] + 5
        hub.close("the end", 0.02)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(serving, 5)
        assert not hub._watches

    asyncio.run(run())


def test_a_fault_of_our_own_ends_the_stream_and_is_in_the_log(caplog):
    async def run() -> None:
        hub, client = make()
        client.capabilities = None
        reader = hub.join(0, None)
        end = await next_of(reader)
        assert (end.retry, "its log says why" in end.reason) == (True, True)
        hub.leave(reader)
        assert not hub._watches

    asyncio.run(run())
    assert "AttributeError" in caplog.text


def test_names_are_found_both_ways_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_hub, "_MOST_NAMES", 3)
    names = Names()
    for number in range(5):
        names.add(f"r{number}", f"cmpl-{number}", str(number))
    assert names.engine_id("cmpl-4") == names.engine_id("4") == names.engine_id("r4") == "r4"
    assert names.engine_id("cmpl-0") == "cmpl-0"
    rows: Any = SimpleNamespace(requests=[SimpleNamespace(id=f"r{n}") for n in (0, 3, 9)])
    assert names.of(rows) == {"r3": "cmpl-3"}
    names.add("r9", "cmpl-4", "4")  # a client uses its id again
    assert names.engine_id("4") == "r9"
    names.add("r10", "cmpl-r4", "r4")  # a client takes the engine's id of another's request
    assert names.engine_id("r4") == "r4"
    assert names.engine_id("cmpl-r4") == "r10"


def test_a_followed_request_says_which_engine_computes_it() -> None:
    async def run() -> None:
        hub, _ = make(2)
        hub.names.add("r7", "cmpl-mine", "mine")
        reader = hub.join(0, "mine")
        found = await next_of(reader)
        assert (found.follow, found.follow_engine) == ("mine", 1)
        hub.leave(reader)

    asyncio.run(run())


def test_samples_are_kept_only_while_somebody_watches_and_all_else_is_passed_on() -> None:
    class Told(Observer):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name in ("update", "routed", "loaded", "lost", "resumed"):
                return lambda *_: self.calls.append(name)
            return super().__getattribute__(name)

    async def run() -> None:
        hub, client = make()
        told = Told()
        tap = Tap(told, hub)
        report = Stats(EngineStats(), Observations(ttft=[0.5]))
        tap.update(0, report)
        reader = hub.join(0, None)
        assert hub._watches[0].latencies.read(1e9).ttft.count == 0
        tap.update(0, report)
        update = await next_of(reader)
        assert update.latencies.ttft.p99 == 0.5
        hub.leave(reader)
        tap.routed(0, "load")
        tap.loaded(0, client.capabilities)
        tap.lost(0)
        tap.resumed(0)
        assert told.calls == ["update", "update", "routed", "loaded", "lost", "resumed"]
        assert hub.deaths == {0: 1}

    asyncio.run(run())


def test_settings_name_no_module_of_the_user() -> None:
    limits = RunnerLimits(9, 4, 1, 32, 10, num_host_blocks=5)
    found = settings_of(EngineConfig(model="m", scheduler="slo,p99_itl_ms=50,shed=true"), limits)
    assert (found.scheduler, found.targets) == ("slo", {"p99_itl_ms": 50.0})
    assert (found.blocks, found.host_blocks) == (8, 4)
    assert settings_of(EngineConfig(model="m", scheduler="my.module:Mine"), limits).scheduler == (
        "custom"
    )
