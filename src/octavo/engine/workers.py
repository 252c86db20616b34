"""The other ranks of a tensor-parallel engine, as rank 0 sees them: started, sent plans, watched,
ended.

A thread reads their reports and looks after their processes. The first that goes wrong ends all of
them, with its reason, and lets rank 0's operation that waits for them raise. It goes wrong when a
worker ends; when its heartbeat, which has a thread of its own, is not heard for `SILENT_SECONDS`
(stopped, swapped out, its machine lost); and when a step runs and no rank has begun an operation of
the group for `STALL_SECONDS`: then the ranks that have begun fewest are those that the others wait
for.

How workers are started is `engine.worker_launcher`, what they do `engine.worker`.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from octavo.core.plan import StepPlan
from octavo.dist.base import Group
from octavo.engine.worker_launcher import Place, WorkerLauncher, WorkerProcess
from octavo.engine.worker_messages import (
    STOP,
    Failed,
    Loaded,
    Started,
    WorkerBeat,
    WorkerLaunch,
    WorkerReport,
)
from octavo.engine.worker_plans import PlanWriter
from octavo.errors import EngineDeadError, OctavoError, PeerLostError, brief
from octavo.log import get_logger
from octavo.processes import Owner

logger = get_logger(__name__)

# Ten missed heartbeats of half a second: as long as a machine that swaps may stop a process.
SILENT_SECONDS = 10.0
# A layer takes less, of any model, on any processor that can be waited for.
STALL_SECONDS = 120.0
_TICK_SECONDS = 0.1
# What goes wrong in one rank soon does in the others: for the reason of the first, wait so long.
_REASON_SECONDS = 0.5
_STOP_SECONDS = 5.0


@dataclass(slots=True)
class Worker:
    """The worker of one rank. silent: ticks since its last report, None until it has started."""

    rank: int
    process: WorkerProcess
    silent: int | None = None
    operations: int = 0
    is_loaded: bool = False
    failed: Failed | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.process.name})"


class Problem(NamedTuple):
    """What is wrong with a worker. weight: the least is the cause of the others."""

    weight: int
    error: OctavoError


@dataclass(slots=True)
class Limits:
    """How long a worker may be silent, and all ranks without an operation, in seconds."""

    silent: float = SILENT_SECONDS
    stall: float = STALL_SECONDS


class Workers:
    """All ranks but this process's. `submit` and `running` are called by one thread at a time."""

    def __init__(self, launcher: WorkerLauncher, limits: Limits | None = None) -> None:
        """Binds the sockets. Raises ConfigError, OSError or ZMQError; starts nothing."""
        self._launcher = launcher
        self._limits = limits or Limits()
        self._owner = Owner("these workers")
        self._workers: dict[int, Worker] = {}
        self._group: Group | None = None
        self._failure: OctavoError | None = None
        self._changed = threading.Condition()
        self._running = False  # a step, on rank 0
        self._steps = 0  # that have begun there; a captured one begins no operations
        self._closing = threading.Event()
        self._undo = contextlib.ExitStack()
        self._lock = threading.Lock()  # of `close`
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._undo.callback(context.destroy, 0)
        self._plans = context.socket(zmq.XPUB)
        self._reports = context.socket(zmq.PULL)
        for socket in (self._plans, self._reports):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        # Readable once a worker has failed.
        self.failure_fd, self._failure_end = os.pipe()
        for end in (self.failure_fd, self._failure_end):
            self._undo.callback(os.close, end)
        self._plans.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of each subscriber
        self._writer: PlanWriter | None = None
        self._thread = threading.Thread(target=self._watch, name="octavo-workers", daemon=True)
        self._undo.callback(launcher.close)
        try:
            self.addresses = launcher.bind(self._plans, self._reports)
        except BaseException:
            self.close()
            raise

    def start(self, launches: Mapping[int, tuple[WorkerLaunch, Place]]) -> None:
        """Start the workers; launches: by rank."""
        for rank, (launch, place) in launches.items():
            self._workers[rank] = Worker(rank, self._launcher.start(launch, place))
        self._thread.start()

    def meet(self, form: Callable[[], Group]) -> Group:
        """The group that `form` gives, which waits for the workers. Raises their failure."""
        made: queue.SimpleQueue[Group | Exception] = queue.SimpleQueue()

        def run() -> None:
            try:
                made.put(form())
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                made.put(error)
            with self._changed:
                self._changed.notify_all()

        # A worker may end before it comes; the thread then waits alone, and ends with the process.
        threading.Thread(target=run, name="octavo-meeting", daemon=True).start()
        self._await(lambda: not made.empty())
        found = made.get()
        if isinstance(found, Exception):
            raise found
        self._group = found
        if self._failure is not None:  # meanwhile
            found.abort()
        return found

    def wait_until_loaded(self, with_draws: bool) -> None:
        """with_draws: whether the workers draw tokens. Raises the failure of one that cannot load
        its part."""
        self._await(lambda: all(worker.is_loaded for worker in self._workers.values()))
        left = len(self._workers)
        while left:  # once each has subscribed, nothing that is sent is lost
            if self._plans.poll(int(1000 * _TICK_SECONDS)):
                self._plans.recv()
                left -= 1
            self.check()
        self._writer = PlanWriter(with_draws)

    def send(self, plan: StepPlan) -> None:
        """Let all workers execute `plan`, once they are loaded."""
        assert self._writer is not None
        self._plans.send(self._writer.write(plan))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Rank 0 computes, or waits for what is computed: the ranks should get ahead."""
        self._running, self._steps = True, self._steps + 1
        try:
            yield
        finally:
            self._running = False

    def check(self) -> None:
        """Raise the failure of a worker."""
        if self._failure is not None:
            raise self._failure

    def cause_of(self, error: Exception) -> Exception:
        """What is behind an error of rank 0: the failure of a worker, if that came first."""
        if isinstance(error, PeerLostError):
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, 4 * _REASON_SECONDS)
        return error if self._failure is None else self._failure

    def close(self, kill: bool = False) -> None:
        """Stop the workers; kill: at once, since they may wait for rank 0 within a step.

        May be repeated, by any thread. In a fork, does nothing: they belong to the process that
        started them.
        """
        if not self._owner.is_here():
            return
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        with self._undo:  # the launcher is the first to be closed, of what is undone
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join()
            self._stop(kill or self._failure is not None)
            if self._group is not None:
                self._group.close()
            self._plans.close()
            self._reports.close()

    def _stop(self, kill: bool) -> None:
        loaded = [w for w in self._workers.values() if w.is_loaded and not kill]
        if loaded:
            self._plans.send(STOP)
        deadline = time.monotonic() + _STOP_SECONDS
        while any(not w.process.how_it_ended() for w in loaded) and time.monotonic() < deadline:
            time.sleep(0.005)
        for worker in self._workers.values():
            worker.process.kill()

    def _await(self, is_there: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._failure is not None)
        self.check()

    # The thread.

    def _watch(self) -> None:
        try:
            self._watch_until_closed()
        except Exception as error:
            logger.exception("the ranks can no longer be watched")
            self._fail(EngineDeadError(f"its ranks can no longer be watched: {brief(error)}"))

    def _watch_until_closed(self) -> None:
        decoder: msgspec.msgpack.Decoder[WorkerReport] = msgspec.msgpack.Decoder(WorkerReport)
        stalled = _Stall()
        while not self._closing.is_set() and self._failure is None:
            with contextlib.suppress(zmq.ZMQError):  # closed meanwhile
                self._read(decoder, _TICK_SECONDS)
            if self._closing.is_set():
                return
            if (problem := self._problem(stalled)) is None:
                continue
            until = time.monotonic() + _REASON_SECONDS
            while problem.weight and time.monotonic() < until and not self._closing.is_set():
                self._read(decoder, _TICK_SECONDS)
                problem = min(problem, self._problem(stalled) or problem, key=lambda p: p.weight)
            self._fail(problem.error)

    def _read(self, decoder: "msgspec.msgpack.Decoder[WorkerReport]", seconds: float) -> None:
        """Take the reports that have come, for one tick."""
        for worker in self._workers.values():
            if worker.silent is not None:
                worker.silent += 1  # ticks, not time: a pause of this process must not count
        until = time.monotonic() + seconds
        while self._reports.poll(max(0, int(1000 * (until - time.monotonic())))):
            self._take(decoder.decode(self._reports.recv()))

    def _take(self, report: WorkerReport) -> None:
        if (worker := self._workers.get(report.rank)) is None:
            return
        worker.silent = 0
        if isinstance(report, WorkerBeat):
            worker.operations = report.operations
        elif isinstance(report, Failed):
            worker.failed = report
        elif isinstance(report, Loaded):
            with self._changed:
                worker.is_loaded = True
                self._changed.notify_all()
        else:
            assert isinstance(report, Started)

    def _problem(self, stall: "_Stall") -> Problem | None:
        """The cause of what is wrong, as far as it has been seen."""
        problems = [p for worker in self._workers.values() if (p := self._problem_of(worker))]
        if not problems and self._running and self._group is not None:
            counts = {0: self._group.operations}
            counts |= {w.rank: w.operations for w in self._workers.values()}
            if stall.lasts(self._steps, counts) > self._limits.stall / _TICK_SECONDS:
                problems.append(self._stalled(counts))
        else:
            stall.end()
        return min(problems, key=lambda problem: problem.weight, default=None)

    def _problem_of(self, worker: Worker) -> Problem | None:
        name = worker.name
        if worker.failed is not None:
            error = worker.failed.fault.error()
            reason = error.reason if isinstance(error, EngineDeadError) else str(error)
            # Of the type that it has: a mistake of the operator's is one here, too.
            prefixed = type(error)(f"rank {worker.rank}: {reason}")
            return Problem(4 if worker.failed.follows else 0, prefixed)
        if (ended := worker.process.how_it_ended()) is not None:
            return Problem(1 if "killed" in ended else 2, EngineDeadError(f"{name} {ended}"))
        if (worker.silent or 0) * _TICK_SECONDS > self._limits.silent:
            return Problem(3, EngineDeadError(
                f"{name} has been silent for more than {self._limits.silent:g} s"
            ))  # fmt: skip
        return None

    def _stalled(self, counts: dict[int, int]) -> Problem:
        least = min(counts.values())
        late = [rank for rank, count in counts.items() if count == least]
        if len(late) == len(counts):
            who = "all ranks hang"
        else:
            names = (self._workers[rank].name if rank else "rank 0" for rank in late)
            who = f"{' and '.join(names)} {'hangs' if len(late) == 1 else 'hang'}"
        return Problem(3, EngineDeadError(
            f"{who}: no rank has begun an operation for more than {self._limits.stall:g} s of a "
            "step"
        ))  # fmt: skip

    def _fail(self, error: OctavoError) -> None:
        """End all workers, and what rank 0 waits for."""
        for worker in self._workers.values():
            worker.process.kill()
        with self._changed:
            self._failure = error
            self._changed.notify_all()
        if self._group is not None:
            self._group.abort()
        os.write(self._failure_end, b"!")


@dataclass(slots=True)
class _Stall:
    """How long the ranks have begun nothing."""

    seen: tuple[int, dict[int, int]] = (0, {})
    ticks: int = 0

    def lasts(self, steps: int, counts: dict[int, int]) -> int:
        """In ticks; steps: that rank 0 has begun; counts: of the operations of each rank."""
        if (steps, counts) != self.seen:
            self.seen, self.ticks = (steps, counts), 0
        else:
            self.ticks += 1
        return self.ticks

    def end(self) -> None:
        self.ticks = 0
