"""The engine's own process: inbox, loop, outbox, death notice.

Its sockets are files where the web process is on this machine, else TCP with keys (`engine.tcp`).

Between two steps it reads every command that has arrived, and never waits while there is work:
sending hands a message to ZeroMQ's own thread, so a step never waits for a socket. Idle, it sleeps
on the inbox. It exits on `Stop`, or when its standard input closes, which happens when the web
process ends for any reason. Signals are handled by the web process.

Exit code 0: it was stopped. 1: it failed, and its last message said why.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import IO, Any

import msgspec
import zmq
from setproctitle import setproctitle

from octavo import progress
from octavo.config import EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor, FailsIdle
from octavo.engine.launcher import remove_socket_folder
from octavo.engine.messages import (
    Abort,
    Accepted,
    Add,
    Beat,
    Command,
    Dead,
    Fault,
    FinishChoice,
    Launch,
    LaunchHead,
    Look,
    PrefixCacheReset,
    Ready,
    Refused,
    Report,
    ResetPrefixCache,
    Stats,
    Step,
    check_build,
)
from octavo.engine.tcp import EngineEnds
from octavo.engine.trace import create_engine
from octavo.engine.watcher import Watcher
from octavo.errors import OctavoError, RequestError
from octavo.log import configure, get_logger, mark_lines

logger = get_logger("octavo.engine.process")  # __name__ is __main__ here

BEAT_SECONDS = 0.5
STATS_SECONDS = 0.25
FADE_SECONDS = 1.0  # between snapshots of an idle engine whose window still holds steps
_LINGER_MS = 2000
_COMPILE_MS = 5  # between two looks at a grammar that is being compiled, when there is no work


class Outbox:
    """Sends reports. One thread at a time uses one outbox."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, report: Report) -> None:
        """Never blocks: the backlog is bounded by the lengths of the requests."""
        with contextlib.suppress(zmq.Again):  # the connection has ended, and the loop will see it
            self._socket.send(self._encoder.encode(report), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class Loop:
    """Commands in, steps, reports out, until `Stop` arrives or the parent process ends.

    monitors: sockets that become readable when the connection to the web process has ended.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: "zmq.Socket[bytes]",
        outbox: Outbox,
        parent: IO[bytes],
        monitors: "Sequence[zmq.Socket[bytes]]" = (),
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._parent = parent.fileno()
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._parent, zmq.POLLIN)
        self._monitors = frozenset(monitors)
        for monitor in monitors:
            self._poller.register(monitor, zmq.POLLIN)
        executor = engine.executor
        self._failure = executor.failure_fd if isinstance(executor, FailsIdle) else None
        if self._failure is not None:
            self._poller.register(self._failure, zmq.POLLIN)
        self._held: dict[str, Submission] = {}  # until their grammars are compiled
        self._stats_due = 0.0
        self._watcher: Watcher | None = None  # once somebody looks
        self._stop = False

    def run(self) -> None:
        """Raises EngineDeadError when a step fails, or the executor between two steps."""
        while not self._stop:
            self._read(wait=not self._engine.has_work())
            if self._engine.has_work():
                if updates := self._engine.step():
                    self._outbox.send(Step(updates))
                self._report()

    def _read(self, wait: bool) -> None:
        """Execute all commands that have arrived; `wait` for one if there is no work."""
        ready = dict(self._poller.poll(0))
        if wait and not ready:
            ready = dict(self._poller.poll(_COMPILE_MS)) if self._held else self._idle()
        if self._failure in ready:
            self._engine.check_executor()
        if self._inbox in ready or self._held:
            self._read_inbox()
        if self._parent in ready and not self._stop:
            logger.warning("the web process has ended; the engine stops")
            self._stop = True
        if self._monitors and not self._stop and not self._monitors.isdisjoint(ready):
            logger.warning("the connection to the web process has ended; the engine stops")
            self._stop = True

    def _idle(self) -> dict[Any, int]:
        """Sleep until something arrives. Snapshots go on until the rates have fallen to 0."""
        ready: dict[Any, int] = {}
        while not ready:
            self._stats_due = 0.0
            self._report()
            fading = self._engine.recorder.fading
            ready = dict(self._poller.poll(int(1000 * FADE_SECONDS) if fading else None))
        return ready

    def _read_inbox(self) -> None:
        accepted: list[str] = []
        while not self._stop:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._act(self._decoder.decode(frame), accepted)
        for submission in list(self._held.values()):
            if self._engine.may_add(submission):
                del self._held[submission.request_id]
                self._add(submission, accepted)
        if accepted:
            self._outbox.send(Accepted(accepted))

    def _act(self, command: Command, accepted: list[str]) -> None:
        if isinstance(command, Add):
            submission = command.submission
            if self._engine.may_add(submission):
                self._add(submission, accepted)
            else:
                self._held[submission.request_id] = submission
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                if self._held.pop(request_id, None) is None:
                    self._engine.abort(request_id)
        elif isinstance(command, FinishChoice):
            self._engine.finish_choice(command.request_id, command.index)
        elif isinstance(command, ResetPrefixCache):
            self._outbox.send(PrefixCacheReset(self._engine.reset_prefix_cache()))
        elif isinstance(command, Look):
            self._watcher = self._watcher or Watcher(self._engine)
            self._outbox.send(self._watcher.view(command.followed))
        else:
            self._stop = True

    def _add(self, submission: Submission, accepted: list[str]) -> None:
        try:
            self._engine.add_request(submission)
        except RequestError as error:
            self._outbox.send(Refused(submission.request_id, Fault.of(error)))
        else:
            accepted.append(submission.request_id)

    def _report(self) -> None:
        now = self._engine.clock()
        if now >= self._stats_due:
            self._stats_due = now + STATS_SECONDS
            recorder = self._engine.recorder
            stats = recorder.snapshot(self._engine.scheduler, now, detailed=False)
            self._outbox.send(Stats(stats, recorder.drain()))


class LocalEnds:
    """Sockets of which the other ends are on this machine; `EngineEnds` are those of another."""

    monitors: "Sequence[zmq.Socket[bytes]]" = ()

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._context = context

    def inbox(self, address: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.PULL)
        made.set_hwm(0)
        made.bind(address)
        return made

    def outbox(self, address: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.PUSH)
        made.set_hwm(0)
        made.connect(address)
        return made

    def close(self) -> None:
        """There is nothing else to close."""


def _beat(outbox: Outbox, done: threading.Event) -> None:
    """Send a heartbeat from a thread of its own, also while a step takes long."""
    while True:
        outbox.send(Beat(time.monotonic()))
        if done.wait(BEAT_SECONDS):
            return


def _end_with(parent: int, loaded: threading.Event, address: str) -> None:
    """End this process when `parent` closes while the model is loaded, which nothing interrupts."""
    while not loaded.is_set():
        if _has_closed(parent, BEAT_SECONDS) and not loaded.is_set():
            logger.warning("the web process has ended; the engine stops loading")
            remove_socket_folder(address)
            os._exit(1)


def _has_closed(parent: int, seconds: float = 0.0) -> bool:
    """Whether the web process has ended, or ends within this time."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    return bool(poll.poll(int(1000 * seconds)))


def _load(launch: Launch) -> Engine:
    policy = create_policy(launch.config.scheduler)  # a mistake in it shows before the load
    module, _, name = launch.executor.partition(":")
    # On a terminal the bar moves; elsewhere, and of several engines, its lines are the log's.
    alone = launch.engines == 1
    with progress.shown(launch.config.load_progress, logger.info, redraw=alone):
        executor: Executor = getattr(import_module(module), name)(launch.config)
    # The web process bounds the queue; it answers 503 before anything is sent here.
    config: EngineConfig = launch.config.with_(max_waiting=sys.maxsize)
    return create_engine(config, executor, policy, engine=launch.engine, engines=launch.engines)


def serve(line: bytes, parent: IO[bytes]) -> int:
    """Connect, load, report, loop, as the Launch in `line` says. Returns the exit code."""
    head = msgspec.json.decode(line, type=LaunchHead)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with contextlib.ExitStack() as undo:
        undo.callback(context.term)
        ends = EngineEnds(context, head.keys) if head.keys else LocalEnds(context)
        undo.callback(ends.close)
        outboxes: list[Outbox] = []
        try:
            for _ in range(2):
                outboxes.append(Outbox(ends.outbox(head.outbox)))
                undo.callback(outboxes[-1].close)
            check_build(head.build, socket.gethostname())
            launch = msgspec.json.decode(line, type=Launch)
            _name_process(launch)
            inbox = ends.inbox(launch.inbox)
            undo.callback(inbox.close, 0)
            _run(launch, parent, inbox, outboxes, ends.monitors)
            return 0
        except OctavoError as error:
            _say_death(outboxes, error)
        except BaseException as error:
            logger.exception("the engine process fails")
            _say_death(outboxes, error)
        return 1


def _name_process(launch: Launch) -> None:
    """In the list of processes and, of several engines with one log, in its lines."""
    name = "engine"
    if launch.engines > 1:
        name += f" {launch.engine}"
        mark_lines(name)
    setproctitle(f"octavo {name}: {launch.config.model}")


def _say_death(outboxes: Sequence[Outbox], error: BaseException) -> None:
    if outboxes:
        outboxes[0].send(Dead(Fault.of(error)))
    else:
        logger.error("%s", error)  # there is no other way to say it


def _run(
    launch: Launch,
    parent: IO[bytes],
    inbox: "zmq.Socket[bytes]",
    outboxes: Sequence[Outbox],
    monitors: "Sequence[zmq.Socket[bytes]]",
) -> None:
    """Load and loop; heartbeats are sent from the end of the load on."""
    outbox, beats = outboxes
    loaded, done = threading.Event(), threading.Event()
    watched = (parent.fileno(), loaded, launch.inbox)
    watch = threading.Thread(target=_end_with, args=watched, daemon=True)
    beat = threading.Thread(target=_beat, args=(beats, done), daemon=True)
    watch.start()
    try:
        engine = _load(launch)
        loaded.set()
        outbox.send(Ready(engine.capabilities))
        beat.start()
        Loop(engine, inbox, outbox, parent, monitors).run()
        engine.close()
    finally:
        loaded.set()
        done.set()
        if beat.is_alive():
            beat.join()
        if _has_closed(parent.fileno()):  # nobody else removes them
            remove_socket_folder(launch.inbox)


def main() -> int:
    """The process's entry: reads its Launch from standard input, which it then watches."""
    # A terminal's Ctrl-C and a supervisor's SIGTERM reach the whole process group; the web process
    # drains first and then sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        logger.warning("the web process has ended before it said what to load")
        return 1
    return serve(line, sys.stdin.buffer)


if __name__ == "__main__":
    sys.exit(main())
