"""Who watches which engine, and what they are sent.

While somebody reads, each watched engine is asked for a view (`engine.watcher`), again and again;
there is one question at a time, whose answer all readers of that engine get. When the last reader
has left nobody asks, and the engine does nothing for the dashboard. A reader that takes long gets
the newest update, and none of those before it.

Not here: what an update looks like (`server.dashboard_feed`), and HTTP (`server.dashboard_routes`).
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from importlib import import_module

import msgspec

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.client import EngineClient, Observer
from octavo.engine.messages import Stats
from octavo.engine.routing import Reason
from octavo.engine.stats import EngineStats
from octavo.engine.watch import MOST_FOLLOWED, Followed, Snapshot, View
from octavo.errors import OctavoError
from octavo.log import get_logger
from octavo.server.dashboard_feed import (
    VERSION,
    End,
    EngineRow,
    Group,
    Rates,
    Settings,
    Update,
)
from octavo.server.dashboard_latencies import LatencyWindow
from octavo.server.errors import unavailable
from octavo.server.sse import to_json
from octavo.version import __version__

logger = get_logger(__name__)

MOST_READERS = MOST_FOLLOWED  # each may follow a request
INTERVAL_SECONDS = 0.25  # between updates, at least
MOST_SECONDS = 5.0  # the same, at most: readers hear that the server lives
SHARE = 0.005  # of the time that updates may take, engine and server together
PATIENCE_SECONDS = 1.0  # for a view; then readers hear that there is none
_MOST_NAMES = 4096
_NULL = msgspec.Raw(b"null")


def snapshot_event(update: Update) -> bytes:
    return b"event: snapshot\ndata: %b\n\n" % to_json(update)


def end_event(reason: str, retry: bool) -> bytes:
    return b"event: end\ndata: %b\n\n" % to_json(End(reason, retry))


class Names:
    """The ids that clients know of the latest requests, and the engines' ids of them."""

    def __init__(self) -> None:
        self._public: dict[str, str] = {}  # by the engine's id
        self._own: dict[str, str] = {}  # the other way round

    def add(self, request_id: str, *public: str) -> None:
        """public: how clients may call the engine's request; the first is shown."""
        self._public[request_id] = public[0]
        for name in public:
            self._own.pop(name, None)  # so that the order is that of the latest use
            self._own[name] = request_id
        for names, most in ((self._public, _MOST_NAMES), (self._own, 2 * _MOST_NAMES)):
            while len(names) > most:
                del names[next(iter(names))]

    def of(self, snapshot: Snapshot) -> dict[str, str]:
        """Of the requests in a snapshot."""
        rows = snapshot.requests
        return {row.id: self._public[row.id] for row in rows if row.id in self._public}

    def engine_id(self, name: str) -> str:
        """What the engine calls a request; the name itself if it is none of a client's.

        The engine's own ids go first: a client may name its request as it likes.
        """
        return name if name in self._public else self._own.get(name, name)


class Reader:
    """One stream: the newest update that it has not taken."""

    def __init__(self, engine: int, follow: str | None) -> None:
        self.engine = engine
        self.follow = follow
        self._unread: bytes | None = None
        self._last = False
        self._event = asyncio.Event()

    def put(self, event: bytes, last: bool = False) -> None:
        """Replace what was not taken yet. last: nothing follows."""
        if not self._last:
            self._unread, self._last = event, last
            self._event.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The newest event each time, until the last one."""
        while True:
            await self._event.wait()
            self._event.clear()
            event, self._unread, last = self._unread, None, self._last
            if event is not None:
                yield event
            if last:
                return


class Hub:
    """The readers of one server.

    client: gives the engines' client, None before there is one. problem: why nothing can be
    answered now. statistics: gives the engines' last ones.
    """

    def __init__(
        self,
        config: EngineConfig,
        client: Callable[[], EngineClient | None],
        problem: Callable[[], str | None],
        statistics: Callable[[], Mapping[int, EngineStats]],
    ) -> None:
        self.config = config
        self.names = Names()
        self.client = client
        self.problem = problem
        self.statistics = statistics
        self.deaths = dict.fromkeys(range(config.data_parallel_size), 0)
        self._watches: dict[int, Watch] = {}
        self._closed: str | None = None
        self.cut = asyncio.Event()  # streams that are still open now end at once

    def join(self, engine: int, follow: str | None) -> Reader:
        """A new reader. Raises HTTPError 503 when there are too many, or the server drains."""
        if self._closed is not None:
            raise unavailable(self._closed, "unavailable")
        if sum(len(watch.readers) for watch in self._watches.values()) >= MOST_READERS:
            text = f"{MOST_READERS} dashboards are open, which is the limit; close one"
            raise unavailable(text, "too_many_dashboards")
        reader = Reader(engine, follow)
        watch = self._watches.get(engine)
        if watch is None:
            watch = self._watches[engine] = Watch(self, engine)
        watch.readers[reader] = None
        watch.wake()
        return reader

    def leave(self, reader: Reader) -> None:
        """It reads no more. The last reader of an engine ends its watch."""
        watch = self._watches.get(reader.engine)
        if watch is None:
            return
        watch.readers.pop(reader, None)
        if not watch.readers:
            del self._watches[reader.engine]
            watch.stop()

    def close(self, reason: str, seconds: float) -> None:
        """The server ends: say so to all readers, and cut off after a while those that do not
        take it."""
        if self._closed is None:
            self._closed = reason
            for watch in self._watches.values():
                watch.stop()
                for reader in watch.readers:
                    reader.put(end_event(reason, retry=True), last=True)
            asyncio.get_running_loop().call_later(seconds, self.cut.set)

    def note(self, engine: int, report: Stats) -> None:
        """Samples of latencies came; dropped unless somebody watches."""
        if watch := self._watches.get(engine):
            watch.latencies.add(report.fresh, time.monotonic())


class Watch:
    """What the readers of one engine are sent."""

    def __init__(self, hub: Hub, engine: int) -> None:
        self.readers: dict[Reader, None] = {}
        self.latencies = LatencyWindow(time.monotonic())
        self._hub = hub
        self._engine = engine
        self._number = 0
        self._asked: asyncio.Future[View] | None = None
        self._view: View | None = None  # the last one
        self._joined = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)

    def wake(self) -> None:
        """Somebody joined: do not wait for the next time."""
        self._joined.set()

    def stop(self) -> None:
        self._task.cancel()
        if self._asked is not None:
            self._asked.cancel()  # an answer that nobody waits for

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Nobody waits in vain where updates cannot be made any more."""
        if not task.cancelled() and (error := task.exception()):
            logger.error("the dashboard's stream fails", exc_info=error)
            for reader in self.readers:
                text = "the server failed to make an update; its log says why"
                reader.put(end_event(text, retry=True), last=True)

    async def _run(self) -> None:
        # Percentiles need it. Its first import takes long: as a part of the first update, it would
        # put off the second one.
        await asyncio.to_thread(import_module, "numpy")
        while True:
            self._joined.clear()
            view = await self._look()
            started = time.perf_counter()
            spent = self._send(view, started)
            interval = self._interval(view, spent)
            try:
                await asyncio.wait_for(self._joined.wait(), interval)
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(INTERVAL_SECONDS / 10)  # those who join together get one view

    def _interval(self, view: View | None, spent: float) -> float:
        """Seconds to wait after an update that took this server `spent`."""
        if view is None:
            return PATIENCE_SECONDS
        wanted = (view.snapshot.seconds + spent) / SHARE
        return min(max(INTERVAL_SECONDS, wanted), MOST_SECONDS)

    async def _look(self) -> View | None:
        """The engine's view; None if it does not answer in time."""
        client = self._hub.client()
        if client is None or self._engine in client.down:
            self._view = None
            return None
        if self._asked is None:
            ids = [reader.follow for reader in self.readers if reader.follow is not None]
            followed = tuple(dict.fromkeys(self._hub.names.engine_id(name) for name in ids))
            self._asked = client.links[self._engine].look(followed)
        await asyncio.wait({self._asked}, timeout=PATIENCE_SECONDS)
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        try:
            self._view = asked.result()
        except OctavoError:  # it has died: the engines' rows say so
            self._view = None
        return self._view

    def _send(self, view: View | None, started: float) -> float:
        """Tell all readers; returns the seconds that it took."""
        self._number += 1
        shown = self._view  # while an engine takes long for a step, its last view
        raw, names, followed = _NULL, {}, {}
        if shown is not None:
            raw = msgspec.Raw(msgspec.json.encode(shown.snapshot))
            names = self._hub.names.of(shown.snapshot)
            followed = {one.id: one for one in shown.followed}
        base = self._update(raw, names)
        interval = self._interval(view, time.perf_counter() - started)
        events: dict[str | None, bytes] = {}
        for reader in self.readers:
            if reader.follow not in events:
                update = self._for(base, reader.follow, followed, round(interval, 3))
                events[reader.follow] = snapshot_event(update)
            reader.put(events[reader.follow])
        return time.perf_counter() - started

    def _for(
        self, base: Update, follow: str | None, followed: dict[str, Followed], interval: float
    ) -> Update:
        client = self._hub.client()
        found, computed_by = None, None
        if follow is not None and client is not None:
            name = self._hub.names.engine_id(follow)
            found, computed_by = followed.get(name), client.engine_of(name)
        return msgspec.structs.replace(
            base, interval=interval, follow=follow, followed=found, follow_engine=computed_by
        )

    def _update(self, snapshot: msgspec.Raw, names: dict[str, str]) -> Update:
        hub = self._hub
        client, problem = hub.client(), hub.problem()
        down = client.down if client is not None else {}
        statistics = hub.statistics()
        engines = [
            _engine_row(
                number,
                down.get(number, problem if client is None else None),
                statistics.get(number),
                hub.deaths[number],
            )
            for number in range(hub.config.data_parallel_size)
        ]
        stats = statistics.get(self._engine)
        return Update(
            VERSION,
            time.time(),
            self._number,
            0.0,
            self._engine,
            tuple(engines),
            None if client is None else settings_of(hub.config, client.capabilities.limits),
            None if stats is None else rates_of(stats),
            self.latencies.read(time.monotonic()),
            snapshot,
            names,
            None,
            None,
        )


class Tap(Observer):
    """Passes on what the engines do to `first`, and what concerns the dashboard to its hub."""

    def __init__(self, first: Observer, hub: Hub) -> None:
        self._first = first
        self._hub = hub

    def update(self, engine: int, report: Stats) -> None:
        self._first.update(engine, report)
        self._hub.note(engine, report)

    def routed(self, engine: int, reason: Reason) -> None:
        self._first.routed(engine, reason)

    def loaded(self, engine: int, capabilities: EngineCapabilities) -> None:
        self._first.loaded(engine, capabilities)

    def lost(self, engine: int) -> None:
        self._first.lost(engine)
        self._hub.deaths[engine] += 1

    def resumed(self, engine: int) -> None:
        self._first.resumed(engine)


def settings_of(config: EngineConfig, limits: RunnerLimits) -> Settings:
    # Of a policy's own only the name: its module is the user's.
    scheduler, *options = (part.strip() for part in config.scheduler.split(","))
    return Settings(
        limits.model,
        __version__,
        limits.device,
        scheduler if ":" not in scheduler else "custom",
        _numbers(options),
        config.preemption_mode,
        config.enable_prefix_caching,
        limits.block_size,
        limits.num_blocks - 1,
        max(limits.num_host_blocks - 1, 0),
        limits.kv_cache_dtype,
        tuple(Group(spec.kind, spec.window) for spec in limits.kv_groups),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        limits.max_model_len,
        config.tensor_parallel_size,
    )


def _numbers(options: list[str]) -> dict[str, float]:
    """Those of a policy's options `name=value` that are numbers."""
    found: dict[str, float] = {}
    for name, _, value in (option.partition("=") for option in options):
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found


def rates_of(stats: EngineStats) -> Rates:
    return Rates(
        stats.prompt_throughput,
        stats.throughput,
        stats.gpu_utilization,
        stats.kv_usage,
        stats.kv_blocks_usage,
        stats.fragmentation,
        stats.cache_hit_rate,
        stats.steps,
        stats.generation_tokens,
        stats.preemptions,
        stats.displaced,
        stats.swapped_out_blocks,
        stats.swapped_in_blocks,
        stats.finished,
    )


def _engine_row(
    engine: int, problem: str | None, stats: EngineStats | None, deaths: int
) -> EngineRow:
    if stats is None:
        return EngineRow(engine, problem, 0, 0, 0.0, deaths)
    return EngineRow(engine, problem, stats.running, stats.waiting, stats.kv_blocks_usage, deaths)
