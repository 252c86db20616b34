"""A rank above 0 of a tensor-parallel engine, in its own process: executes the plans it is sent.

It answers nothing but that it is alive, and an error. It exits when it is told to, and when its
standard input closes, which happens when the engine's process ends for any reason: at once then,
also from within an operation that waits for another rank.

Exit code 0: it was stopped. 1: it failed, and its last message said why.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import IO, Protocol

import msgspec
import zmq
from setproctitle import setproctitle

from octavo.core.plan import StepPlan, StepResult
from octavo.dist.base import SINGLE, Group
from octavo.dist.create import create_group
from octavo.engine.messages import Fault
from octavo.engine.tcp import EngineEnds
from octavo.engine.worker_messages import (
    STOP,
    Failed,
    Loaded,
    Started,
    WorkerBeat,
    WorkerLaunch,
    WorkerReport,
)
from octavo.engine.worker_plans import PlanReader
from octavo.errors import OctavoError, PeerLostError
from octavo.log import configure, get_logger
from octavo.runner.ranks import Ranks

logger = get_logger("octavo.engine.worker")  # __name__ is __main__ here

BEAT_SECONDS = 0.5
_LINGER_MS = 2000


class Runner(Protocol):
    """What executes plans: `runner.model_runner.ModelRunner`."""

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]: ...

    def close(self) -> None: ...


class Reports:
    """Sends reports, from any thread."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._lock = threading.Lock()

    def send(self, report: WorkerReport) -> None:
        with self._lock, contextlib.suppress(zmq.Again):  # its connection has ended
            self._socket.send(msgspec.msgpack.encode(report), zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            self._socket.close()


class Worker:
    """One rank, from its launch to its end.

    Raises EngineDeadError if rank 0, on another machine, cannot be reached.
    """

    def __init__(self, launch: WorkerLaunch) -> None:
        self._launch = launch
        self._group: Group = SINGLE
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ends = EngineEnds(self._context, launch.keys) if launch.keys else None
        self._reports = Reports(self._connected(zmq.PUSH, launch.reports))
        self._plans = self._connected(zmq.SUB, launch.plans)
        self._done = threading.Event()
        self._parent = os.getppid()

    def run(self) -> int:
        """Load, then execute plans until it is stopped. Returns the exit code."""
        rank = self._launch.rank
        plans = self._plans
        plans.subscribe(b"")
        beat = threading.Thread(target=self._beat, name="octavo-beat", daemon=True)
        try:
            self._reports.send(Started(rank))
            beat.start()
            runner = self._load()
            self._reports.send(Loaded(rank))
            follow(plans, runner)
            runner.close()
            return 0
        except BaseException as error:
            lost = isinstance(error, PeerLostError)
            if not isinstance(error, OctavoError):
                logger.exception("this rank fails")
            self._reports.send(Failed(rank, Fault.of(error), follows=lost))
            return 1
        finally:
            self._done.set()
            beat.join()
            self._group.close()
            plans.close(linger=0)
            self._reports.close()
            if self._ends is not None:
                self._ends.close()
            self._context.term()

    def _connected(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        if self._ends is not None:
            return self._ends.connect(kind, address)
        made = self._context.socket(kind)
        made.set_hwm(0)
        made.connect(address)
        return made

    def _load(self) -> Runner:
        launch = self._launch
        ranks = Ranks(launch.rank, launch.size, launch.here, launch.engine, self._connect)
        module, _, name = launch.runner.partition(":")
        runner: Runner = getattr(import_module(module), name)(launch.config, ranks)
        return runner

    def _connect(self, device: str) -> Group:
        launch = self._launch
        self._group = create_group(launch.meeting, launch.rank, launch.size, device)
        return self._group

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            if os.getppid() != self._parent:  # a fork of it may hold our standard input open
                os._exit(1)
            self._reports.send(WorkerBeat(self._launch.rank, self._group.operations))
            if self._ends is not None and any(end.poll(0) for end in self._ends.monitors):
                logger.warning("the connection to rank 0 has ended; this rank stops")
                os._exit(1)  # also from within an operation that waits for another rank


def follow(plans: "zmq.Socket[bytes]", runner: Runner) -> None:
    """Execute the plans that arrive, in order, until the last one."""
    reader = PlanReader()
    result: Callable[[], StepResult] | None = None
    while True:
        # What a plan leaves to be done is done before the next one, unless that is there already:
        # then the device begins it meanwhile.
        if result is not None and not plans.poll(0):
            result()
            result = None
        frame = plans.recv()
        if frame == STOP:
            return
        result = runner.submit(reader.read(frame))


def _end_with(parent: IO[bytes]) -> None:
    """End this process when its parent has ended."""
    with contextlib.suppress(OSError):
        while os.read(parent.fileno(), 4096):
            pass
    os._exit(1)


def main() -> int:
    """The process's entry: reads its launch from standard input, which it then watches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerLaunch)
    configure(prefix=f"rank {launch.rank}: ")
    setproctitle(f"octavo rank {launch.rank}: {launch.config.model}")
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    try:
        worker = Worker(launch)
    except OctavoError as error:
        logger.error("%s", error)  # there is no other way to say it
        return 1
    return worker.run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # at once: to take the interpreter apart would take longer than all of the above
