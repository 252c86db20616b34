"""One engine process as the web process sees it: its sockets, start, reports, silence, death.

A link passes reports on to its owner and knows no request. What a report means to a request, and
what becomes of the requests of an engine that has died, is `engine.client`.

A process that has sent nothing for `FREEZE_SECONDS` (stopped, or swapped out) is silent until it
sends again. On another machine it is dead then: that machine, or the way to it, is lost. Times in
messages are converted between its machine's clock and ours.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from typing import Any, Protocol

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.clock import RemoteClock
from octavo.engine.launcher import EngineProcess, Launcher
from octavo.engine.messages import (
    Accepted,
    Add,
    Beat,
    Command,
    Dead,
    Launch,
    Look,
    PrefixCacheReset,
    Ready,
    Refused,
    Report,
    ResetPrefixCache,
    Stats,
    Step,
    Stop,
)
from octavo.engine.watch import View
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.log import get_logger

logger = get_logger(__name__)

FREEZE_SECONDS = 5.0
_TICK_SECONDS = 0.5
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.01
_START_DESCRIPTORS = 16  # of sockets, wake-up pipes and the process; the loop's own are open
_LAST_MESSAGE_SECONDS = 0.2
_RECONNECT_MS = 10

RequestReport = Accepted | Refused | Step | Stats | View


class LinkOwner(Protocol):
    """Who is told what comes over a link."""

    def received(self, link: "EngineLink", report: RequestReport) -> None:
        """A report about requests, statistics, or a view: that goes to `link.saw`."""
        ...

    def link_died(self, link: "EngineLink", error: OctavoError) -> None:
        """The engine is dead, once; `link.reason` says why. `error` is of the kind it sent."""
        ...

    def link_silent(self, link: "EngineLink", reason: str) -> None:
        """Nothing has come for too long; repeated until something comes."""
        ...


class EngineLink:
    """Starts an engine process by `launcher` and communicates with it, on one event loop.

    index: its number among the `config.data_parallel_size` engines of one client.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: str,
        launcher: Launcher,
        owner: LinkOwner,
        index: int = 0,
    ) -> None:
        self.config = config
        self.index = index
        self.name = f"engine {index}" if config.data_parallel_size > 1 else "the engine"
        self.reason: str | None = None  # why the engine is dead
        self._ended: str | None = None  # how its process did; its last words may be on the way
        self.process: EngineProcess | None = None
        self.capabilities: EngineCapabilities | None = None  # once it is loaded
        self.launcher = launcher
        self._executor = executor
        self._owner = owner
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._clock = RemoteClock() if launcher.remote else None
        self._silent_ticks = 0
        self._resets: deque[asyncio.Future[bool]] = deque()  # in the order of their answers
        self._looks: deque[asyncio.Future[View]] = deque()  # the same
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Report)
        self._tasks: list[asyncio.Task[None]] = []
        self._undo = contextlib.ExitStack()  # of what `open` has made so far

    async def open(self) -> None:
        """Sockets, process, tasks; each step leaves its undo, so that any may fail."""
        check_descriptors()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._undo.callback(context.destroy, 0)
        self._undo.callback(self.launcher.close)
        self._inbox = context.socket(zmq.PUSH)
        self._undo.callback(self._inbox.close)
        self._outbox = context.socket(zmq.PULL)
        self._undo.callback(self._outbox.close)
        for end in (self._inbox, self._outbox):
            end.set_hwm(0)
            end.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        addresses = await self.launcher.connect(self._inbox, self._outbox)
        launch = Launch(
            self.config,
            *addresses,
            self._executor,
            engine=self.index,
            engines=self.config.data_parallel_size,
        )
        self.process = await self.launcher.start(launch, self._exited)
        self._listen()
        self._tasks = [asyncio.create_task(self._watch())]

    async def loaded(self) -> EngineCapabilities:
        """Wait until the model is loaded. Raises what the engine could not start with."""
        self.capabilities = (await self._ready).capabilities
        return self.capabilities

    def send(self, command: Command) -> None:
        if self._clock is not None and isinstance(command, Add):
            command = Add(_at_engine(command.submission, self._clock))
        try:
            self._inbox.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:  # only between machines: nobody is connected any more
            error = EngineDeadError("its connection has ended")
            asyncio.get_running_loop().call_soon(self.fail, error)

    def reset_prefix_cache(self) -> "asyncio.Future[bool]":
        """Drop the cached prefixes. The answer: False if running requests still hold some."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self.send(ResetPrefixCache())
        return done

    def look(self, followed: tuple[str, ...] = ()) -> "asyncio.Future[View]":
        """What the engine shows of itself, and the blocks of requests."""
        done: asyncio.Future[View] = asyncio.get_running_loop().create_future()
        if self.reason is not None:
            done.set_exception(EngineDeadError(self.reason))
        else:
            self._looks.append(done)
            self.send(Look(followed))
        return done

    def saw(self, view: View) -> None:
        """The answer to the first `look` that has none."""
        if not (done := self._looks.popleft()).done():
            done.set_result(view)

    @property
    def is_silent(self) -> bool:
        """Whether nothing has come for too long from an engine that may be alive."""
        alive = self.reason is None and self._ended is None
        return alive and self._silent_ticks * _TICK_SECONDS > FREEZE_SECONDS

    @property
    def unhealthy_reason(self) -> str | None:
        """Why the engine answers nothing at the moment; None when it is healthy."""
        if self.reason is not None or self._ended is not None:
            return self.reason or self._ended
        if not self._ready.done():
            return "the model is being loaded"
        return _silent() if self.is_silent else None

    async def close(self, why: OctavoError | None = None) -> None:
        """Stop the process and wait for its end; kill it if it does not exit in time.

        why: it is dead from then on; by default as it was asked to.
        """
        why = why or EngineDeadError("shutdown requested")
        with self._undo:
            if self.process is not None:
                await self._stop(self.process, why)
            self.fail(why)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if not self._ready.cancel() and not self._ready.cancelled():
                self._ready.exception()  # read, or asyncio logs that it never was

    async def _stop(self, process: EngineProcess, why: OctavoError) -> None:
        try:
            if self.capabilities is None:
                await process.kill()  # it reads its inbox only once the model is loaded
            if self.reason is None:
                self.send(Stop())
                self.fail(why)
            if not await _ends_within(process, _EXIT_SECONDS):
                logger.warning("%s did not stop in %g s; killing it", self.name, _EXIT_SECONDS)
        finally:
            await process.kill()

    def _listen(self) -> None:
        """Read what comes as it comes. (`zmq.asyncio` takes several times as long for a message,
        and one comes for every step.)"""
        loop, descriptor = asyncio.get_running_loop(), self._outbox.fileno()
        loop.add_reader(descriptor, self._receive)
        self._undo.callback(loop.remove_reader, descriptor)
        loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Read one message. ZeroMQ's descriptor tells of the first one only: read until there is
        none, each in a turn of the loop of its own, since others wait for theirs."""
        if self._outbox.closed:
            return
        try:
            frame = self._outbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        asyncio.get_running_loop().call_soon(self._receive)
        self._silent_ticks = 0
        self._handle(self._decoder.decode(frame))

    def _handle(self, report: Report) -> None:
        if isinstance(report, Beat):
            if self._clock is not None:
                self._clock.observe(report.clock, time.monotonic())
            return
        if isinstance(report, PrefixCacheReset):
            if not (done := self._resets.popleft()).done():
                done.set_result(report.dropped)
        elif isinstance(report, Ready):
            self._ready.set_result(report)
        elif isinstance(report, Dead):
            self.fail(report.fault.error())
        else:
            if self._clock is not None and isinstance(report, Step):
                report = Step([_at_ours(update, self._clock) for update in report.updates])
            self._owner.received(self, report)

    async def _watch(self) -> None:
        """Count ticks without a message; ticks, not time: our own pauses must not count."""
        await asyncio.shield(self._ready)
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._silent_ticks += 1
            if not self.is_silent:
                continue
            if self.launcher.remote:
                self.fail(EngineDeadError(f"{_silent()}; its machine or the network is lost"))
            else:
                self._owner.link_silent(self, _silent())

    def _exited(self, how: str) -> None:
        # Its own Dead message, if it sent one, is on the way and says more. Nothing is sent to it
        # any more: a request that was never there must not be taken for the cause of its end.
        self._ended = how
        loop = asyncio.get_running_loop()
        loop.call_later(_LAST_MESSAGE_SECONDS, self.fail, EngineDeadError(how))

    def fail(self, error: OctavoError) -> None:
        """It is dead from now on, if it was not before."""
        if self.reason is not None:
            return
        self.reason = error.reason if isinstance(error, EngineDeadError) else str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        waiting: list[asyncio.Future[Any]] = [*self._resets, *self._looks]
        for done in waiting:
            if not done.done():
                done.set_exception(EngineDeadError(self.reason))
        self._owner.link_died(self, error)


def _silent() -> str:
    return f"the engine process has been silent for more than {FREEZE_SECONDS:g} s"


async def _ends_within(process: EngineProcess, seconds: float) -> bool:
    """Whether it ends in time. Not by `to_thread`: there are none while the interpreter exits."""
    deadline = time.monotonic() + seconds
    while process.exit_code is None and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
    return process.exit_code is not None


def _at_engine(submission: Submission, clock: RemoteClock) -> Submission:
    """With times of the engine's clock."""
    arrival, deadline = submission.arrival_time, submission.deadline
    return msgspec.structs.replace(
        submission,
        arrival_time=None if arrival is None else clock.theirs(arrival),
        deadline=None if deadline is None else clock.theirs(deadline),
    )


def _at_ours(update: Update, clock: RemoteClock) -> Update:
    """With times of our clock."""
    if update.scheduled_time is None:
        return update
    return msgspec.structs.replace(update, scheduled_time=clock.ours(update.scheduled_time))


def check_descriptors() -> None:
    """Raise ConfigError unless the descriptors of a start are free; libzmq would end this process.

    See src/epoll.cpp there: errno_assert.
    """
    with contextlib.ExitStack() as stack:
        try:
            for _ in range(_START_DESCRIPTORS):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"the engine cannot be started: {error.strerror}; it needs {_START_DESCRIPTORS} "
                "more file descriptors than are open now, and each client needs one: raise the "
                "limit (ulimit -n)"
            ) from error
