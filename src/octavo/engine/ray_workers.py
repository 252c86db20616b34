"""Ranks of one engine on several machines of a Ray cluster, where no machine has room for all.

Rank 0 is in the engine's process, which an actor holds already (`engine.ray_launcher`). Each other
rank gets an actor that reserves its processors or its GPU, and starts a worker there. Plans go over
TCP with keys, sums between the ranks over gloo or NCCL. What is sent to workers, how they are
watched, and what the end of one means, is `engine.workers`.
"""

import contextlib
import signal
import sys
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.dist.rendezvous import Rendezvous, free_port
from octavo.engine.messages import build, launch_line
from octavo.engine.ray_cluster import (
    RayCluster,
    first_line,
    import_ray,
    no_room,
    take_signals_back,
)
from octavo.engine.ray_launcher import PLACE_SECONDS, new_holder, of_one_rank, wanted_resources
from octavo.engine.tcp import AnySocket, ServerEnds
from octavo.engine.worker_launcher import Place, WorkerProcess
from octavo.engine.worker_messages import WorkerLaunch
from octavo.errors import ConfigError, EngineDeadError
from octavo.log import get_logger, settings_for_child

logger = get_logger(__name__)

_KILL_SECONDS = 3.0


class RayWorkers:
    """See `engine.worker_launcher.WorkerLauncher`."""

    def __init__(self, config: EngineConfig) -> None:
        """config: with the device that "auto" stands for."""
        self._config, self._size = config, config.tensor_parallel_size
        self._cluster = RayCluster()
        self._ray = import_ray()
        self._ends = ServerEnds(on_loop=False)
        self._here = self._cluster.join()
        take_signals_back()
        self._wanted = of_one_rank(config, wanted_resources(config, self._cluster.machines()))
        self._holders: list[Any] = []
        self._hosts: list[str] = []  # of each rank; empty before they are placed
        self._machines: list[str] = []
        self._port = 0

    def bind(self, plans: AnySocket, reports: AnySocket) -> tuple[str, str]:
        first, second = self._ends.bind(plans, reports, self._here)
        return first, second

    def place(self, rank: int) -> Place:
        if not self._hosts:
            self._place_all()
        host = self._hosts[rank]
        meeting = Rendezvous(address=self._here, port=self._port, host=host)
        if self._config.device == "cpu":
            threads = int(self._wanted["CPU"])
            return Place(meeting, self._hosts.count(host), "cpu", threads)
        # Ray shows each process the GPU that it has reserved, as the first one.
        return Place(meeting, self._hosts.count(host), "cuda:0", self._config.threads)

    def _place_all(self) -> None:
        """Wait until there is room for all ranks. Raises ConfigError if that takes too long."""
        ray = self._ray
        # By default Ray fills one machine, this one first, before it takes another.
        self._holders = [new_holder(ray, self._wanted, "DEFAULT") for _ in range(1, self._size)]
        calls = [holder.hello.remote(build()) for holder in self._holders]
        try:
            found = ray.get(calls, timeout=PLACE_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise no_room(self._wanted, self._cluster.machines(), PLACE_SECONDS) from None
        except ray.exceptions.RayError as error:
            raise EngineDeadError(f"the actor of a rank failed: {first_line(error)}") from error
        for machine, address, public, complaint in found:
            if complaint:
                raise ConfigError(complaint)
            self._ends.admit(public)
            self._machines.append(machine)
            self._hosts.append(address)
        self._hosts.insert(0, self._here)
        self._port = free_port(self._here)

    def start(self, launch: WorkerLaunch, place: Place) -> WorkerProcess:
        holder, machine = self._holders[launch.rank - 1], self._machines[launch.rank - 1]
        there = launch.config.with_(distributed_executor_backend="mp")
        told = launch_line(msgspec.structs.replace(launch, config=there))
        call = holder.start.remote("worker", told, self._ends.public, settings_for_child())
        try:
            pid = self._ray.get(call, timeout=PLACE_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise EngineDeadError(
                f"rank {launch.rank} cannot be started on {machine}: {first_line(error)}"
            ) from error
        logger.info("rank %d runs on %s (process %d)", launch.rank, machine, pid)
        return RayWorker(self._ray, holder, machine, pid)

    def close(self) -> None:
        for holder in self._holders:
            with contextlib.suppress(Exception):
                self._ray.kill(holder)
        self._holders = []
        self._ends.close()


class RayWorker:
    """A worker that an actor holds."""

    def __init__(self, ray: Any, holder: Any, machine: str, pid: int) -> None:
        self._ray, self._holder, self._machine, self._pid = ray, holder, machine, pid
        self._call = holder.follow.remote()
        self._ended: str | None = None

    @property
    def name(self) -> str:
        return f"process {self._pid} on {self._machine}"

    def how_it_ended(self) -> str | None:
        """Passes its log on, too."""
        while self._ended is None and self._ray.wait([self._call], timeout=0)[0]:
            try:
                lines, code = self._ray.get(self._call)
            except self._ray.exceptions.RayError as error:
                self._ended = f"is lost: {first_line(error)}"
                break
            for line in lines:
                print(line, file=sys.stderr, flush=True)
            if code is None:
                self._call = self._holder.follow.remote()
            elif code < 0:
                self._ended = f"was killed by {signal.Signals(-code).name}"
            else:
                self._ended = f"ended with exit code {code}"
        return self._ended

    def kill(self) -> None:
        if self.how_it_ended() is None:
            with contextlib.suppress(Exception):  # the machine may be lost
                self._ray.get(self._holder.kill.remote(), timeout=_KILL_SECONDS)
            self._ended = self._ended or "was killed by SIGKILL"
