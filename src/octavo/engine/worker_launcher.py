"""Where the other ranks of a tensor-parallel engine run: starts them there.

`LocalWorkers` starts children of this process. What is sent to workers, how they are watched, and
what the end of one means, is `engine.workers`.
"""

import contextlib
import shutil
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple, Protocol

import zmq

from octavo import devices, topology
from octavo.config import EngineConfig
from octavo.dist.rendezvous import Rendezvous
from octavo.engine.launcher import child_environment, send_launch, socket_folder, start_child
from octavo.engine.messages import launch_line
from octavo.engine.worker_messages import WorkerLaunch
from octavo.errors import ConfigError, counted
from octavo.log import threads_from_environment
from octavo.topology import Processors

AnySocket = zmq.Socket[bytes]


class Place(NamedTuple):
    """Where a rank runs, and what it has there.

    meeting: where it meets the others. here: how many ranks are on its machine. device: its
    device, as in `EngineConfig`. threads: its compute threads; None for what the machine has.
    processors: those that it is bound to; none for any.
    """

    meeting: Rendezvous
    here: int
    device: str
    threads: int | None = None
    processors: Processors = ()


class WorkerProcess(Protocol):
    """A worker that was started."""

    @property
    def name(self) -> str:
        """In messages, such as "process 4711"."""
        ...

    def how_it_ended(self) -> str | None:
        """None while it runs; else such as "was killed by SIGKILL" or "ended with exit code 1"."""
        ...

    def kill(self) -> None:
        """End it at once and wait for its end. Does nothing if it has ended."""
        ...


class WorkerLauncher(Protocol):
    """The places of the ranks of one engine.

    In order: `bind`; `place` of each rank, that of rank 0 too, which is in this process; `start` of
    each other rank; `close`. Any may be last. Used by one thread at a time.
    """

    def bind(self, plans: AnySocket, reports: AnySocket) -> tuple[str, str]:
        """Bind rank 0's sockets. Returns the addresses that workers connect to.

        Raises ConfigError, OSError or ZMQError.
        """
        ...

    def place(self, rank: int) -> Place: ...

    def start(self, launch: WorkerLaunch, place: Place) -> WorkerProcess:
        """Start the worker of a rank above 0. Raises OSError, or an OctavoError that says more."""
        ...

    def close(self) -> None:
        """Undo what was made. The workers have ended, the sockets are closed. May be repeated."""
        ...


class LocalWorkers:
    """Children of this process: on a CPU each with its share of the cores, else with its GPU."""

    def __init__(self, config: EngineConfig) -> None:
        """config: with the device that "auto" stands for."""
        self._config, self._size = config, config.tensor_parallel_size
        if config.device == "cuda":
            _check_gpus(self._size)
        self._undo = contextlib.ExitStack()
        self._meeting = Rendezvous()
        self._shares = topology.shares(self._size) if config.device == "cpu" else ()

    def bind(self, plans: AnySocket, reports: AnySocket) -> tuple[str, str]:
        folder = socket_folder()
        self._undo.callback(shutil.rmtree, folder, ignore_errors=True)
        addresses = (f"ipc://{folder}/plans", f"ipc://{folder}/report")
        plans.bind(addresses[0])
        reports.bind(addresses[1])
        self._meeting = Rendezvous(file=str(Path(folder) / "store"))
        return addresses

    def place(self, rank: int) -> Place:
        if self._config.device != "cpu":
            kind = devices.kind(self._config.device)
            return Place(self._meeting, self._size, f"{kind}:{rank}", self._config.threads)
        processors = self._shares[rank] if self._shares else ()
        return Place(self._meeting, self._size, "cpu", self._threads(processors), processors)

    def start(self, launch: WorkerLaunch, place: Place) -> WorkerProcess:
        process = start_child(
            "octavo.engine.worker", place.processors, child_environment(), self._undo
        )
        started = LocalWorker(process)
        try:
            send_launch(process, launch_line(launch))
        except BaseException:
            started.kill()
            raise
        return started

    def close(self) -> None:
        self._undo.close()

    def _threads(self, processors: Processors) -> int | None:
        """Of a rank on a CPU: its part of the threads that one rank alone would have."""
        given = self._config.threads or threads_from_environment()
        if given is None or not str(given).isdecimal():  # OpenMP takes a list, too
            return topology.count_cores(processors) or None
        return max(1, int(given) // self._size)


def _check_gpus(size: int) -> None:
    import torch  # imported late: the launch of a CPU's workers needs none

    if (count := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this machine has {counted(count, 'GPU')} (that "
            "CUDA_VISIBLE_DEVICES allows); set tensor_parallel_size to at most that, or "
            "distributed_executor_backend='ray' for GPUs of several machines"
        )


class LocalWorker:
    """A child of this process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def name(self) -> str:
        return f"process {self._process.pid}"

    def how_it_ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if code < 0:
            known = {one.value: one.name for one in signal.Signals}
            return f"was killed by {known.get(-code, f'signal {-code}')}"
        return f"ended with exit code {code}"

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
