"""Engine processes on the machines of a Ray cluster: Ray places and watches them, nothing else.

For each engine an actor (`engine.ray_actor`) reserves the engine's processors or GPUs on one
machine, starts the engine process there and holds it. Commands and reports go over the engine's
own sockets (`engine.tcp`), so a token costs what it costs without Ray. The end of the actor, or
of its machine, is the end of the link; what then becomes of its requests is `engine.client`.

An engine that is started again waits for room without end, so that a machine that joins later is
used; one of the first start must find room within `PLACE_SECONDS`.
"""

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo import devices
from octavo.config import EngineConfig
from octavo.engine.launcher import (
    Addresses,
    AnySocket,
    EngineProcess,
    Exited,
    Launcher,
    how_it_ended,
)
from octavo.engine.messages import Launch, build, launch_line
from octavo.engine.ray_actor import EngineHolder
from octavo.engine.ray_cluster import (
    Machine,
    RayCluster,
    Resources,
    first_line,
    import_ray,
    no_room,
    take_signals_back,
)
from octavo.engine.tcp import ServerEnds
from octavo.errors import ConfigError, EngineDeadError
from octavo.log import get_logger, settings_for_child

logger = get_logger(__name__)

PLACE_SECONDS = 60.0
_SAY_SECONDS = 60.0  # between two lines of the log while an engine waits for room
_RETRY_SECONDS = 1.0
_KILL_SECONDS = 3.0
_CALLS = 8  # of the actor at once: `follow` waits while `kill` is called
_LOST = -9  # exit code of a process that nobody can ask any more


def ray_launchers(config: EngineConfig) -> Callable[[int], Launcher]:
    """Of each engine, by its number: on the cluster. Raises ConfigError where Ray is missing."""
    import_ray()
    cluster = RayCluster()
    started: set[int] = set()

    def launcher(engine: int) -> Launcher:
        again = engine in started
        started.add(engine)
        return RayLauncher(config, engine, cluster, None if again else PLACE_SECONDS)

    return launcher


def wanted_resources(config: EngineConfig, machines: Sequence[Machine]) -> dict[str, float]:
    """What one engine asks of its machine, by Ray's names.

    On GPUs, one for each rank. On CPUs, as many as it has threads; if that is not set, the
    smallest machine's share when the engines are spread over all machines.
    """
    ranks, kind = config.tensor_parallel_size, devices.kind(config.device)
    has_gpus = any(machine.total.get("GPU") for machine in machines)
    if kind == "cuda" or (kind == "auto" and has_gpus):
        return {"CPU": float(ranks), "GPU": float(ranks)}
    if config.threads:
        return {"CPU": float(config.threads)}
    sizes = [machine.total["CPU"] for machine in machines if machine.total.get("CPU")]
    if not sizes:
        return {"CPU": float(ranks)}
    return {"CPU": float(max(ranks, min(sizes) // engines_on_one(config, machines)))}


def engines_on_one(config: EngineConfig, machines: Sequence[Machine]) -> int:
    """How many engines a machine has where they are spread over all of them: its memory is theirs
    in equal parts."""
    count = sum(1 for machine in machines if machine.total.get("CPU"))
    return math.ceil(config.data_parallel_size / max(1, count))


def is_divided(config: EngineConfig, wanted: Resources, machines: Sequence[Machine]) -> bool:
    """Whether no machine can hold all ranks of an engine, even if nothing else runs there."""
    return config.tensor_parallel_size > 1 and not any(
        all(machine.total.get(name, 0.0) >= count for name, count in wanted.items())
        for machine in machines
    )


def of_one_rank(config: EngineConfig, wanted: Resources) -> dict[str, float]:
    """What one rank asks for, of what all of them do."""
    return {name: count // config.tensor_parallel_size for name, count in wanted.items()}


def config_there(
    config: EngineConfig, wanted: Resources, engines: int, divided: bool
) -> EngineConfig:
    """The configuration of an engine on its machine, one of `engines` there: nothing is Ray's
    business any more, unless its ranks are `divided` between machines."""
    threads = config.threads if "GPU" in wanted else int(wanted["CPU"])
    return config.with_(
        threads=threads,
        data_parallel_size=engines,
        distributed_executor_backend="ray" if divided else "mp",
        data_parallel_address=None,
        data_parallel_rpc_port=0,
    )


def new_holder(ray: Any, wanted: Resources, strategy: str) -> Any:
    """An actor that reserves this, as soon as there is room."""
    options = {
        "num_cpus": wanted.get("CPU", 0.0),
        "num_gpus": wanted.get("GPU", 0.0),
        "scheduling_strategy": strategy,
        "max_concurrency": _CALLS,
    }
    return ray.remote(EngineHolder).options(**options).remote()


class RayLauncher:
    """A machine that Ray chooses. seconds: how long to wait for room; None for any time."""

    remote = True

    def __init__(
        self, config: EngineConfig, engine: int, cluster: RayCluster, seconds: float | None
    ) -> None:
        self._config, self._engine, self._cluster = config, engine, cluster
        self._seconds = seconds
        self._ends = ServerEnds()

    async def connect(self, inbox: AnySocket, outbox: AnySocket) -> Addresses:
        here = await asyncio.to_thread(self._cluster.join)
        take_signals_back()
        host, port = self._config.data_parallel_address or here, self._config.data_parallel_rpc_port
        first = port + 2 * self._engine if port else 0
        return Addresses(*self._ends.bind(inbox, outbox, host, first))

    async def start(self, launch: Launch, exited: Exited) -> EngineProcess:
        ray = import_ray()
        while True:
            try:
                return await self._start_once(ray, launch, exited)
            except ray.exceptions.RayError as error:
                # Ray takes some 15 s to see that a machine is lost, and places actors there still.
                if self._seconds is None and isinstance(error, ray.exceptions.RayActorError):
                    logger.warning("engine %d is placed anew: %s", self._engine, first_line(error))
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                raise EngineDeadError(f"its actor failed: {first_line(error)}") from error

    async def _start_once(self, ray: Any, launch: Launch, exited: Exited) -> EngineProcess:
        machines = await asyncio.to_thread(self._cluster.machines)
        wanted = wanted_resources(self._config, machines)
        divided = is_divided(self._config, wanted, machines)
        share = of_one_rank(self._config, wanted) if divided else wanted
        # Ray takes the next machine with room for each engine.
        holder = new_holder(ray, share, "SPREAD")
        try:
            machine, _, public, complaint = await self._hello(holder, share)
            if complaint:
                raise ConfigError(complaint)
            self._ends.admit(public)
            engines = engines_on_one(self._config, machines)
            there = config_there(launch.config, wanted, engines, divided)
            told = launch_line(msgspec.structs.replace(launch, config=there))
            call = holder.start.remote("engine", told, self._ends.public, settings_for_child())
            pid = await _reply(call)
        except BaseException:
            with contextlib.suppress(Exception):
                ray.kill(holder)
            raise
        logger.info("engine %d runs on %s (process %d)", self._engine, machine, pid)
        return RayProcess(holder, machine, pid, exited)

    async def _hello(self, holder: Any, wanted: Resources) -> tuple[str, str, str, str]:
        """The actor's first answer, once it has room. Raises ConfigError if that takes too long."""
        call = asyncio.ensure_future(_reply(holder.hello.remote(build())))
        waited = 0.0
        try:
            while True:
                step = _SAY_SECONDS if self._seconds is None else self._seconds
                done, _ = await asyncio.wait([call], timeout=step)
                if done:
                    found: tuple[str, str, str, str] = call.result()
                    return found
                waited += step
                error = no_room(wanted, await asyncio.to_thread(self._cluster.machines), waited)
                if self._seconds is not None:
                    raise error
                logger.warning("engine %d waits: %s", self._engine, error)
        finally:
            call.cancel()

    def close(self) -> None:
        self._ends.close()


class RayProcess:
    """An engine process that an actor holds."""

    def __init__(self, holder: Any, machine: str, pid: int, exited: Exited) -> None:
        self._holder, self._machine, self._exited = holder, machine, exited
        self.pid = pid  # on its machine
        self.exit_code: int | None = None
        self._task = asyncio.create_task(self._follow())

    async def kill(self) -> None:
        ray = import_ray()
        if self.exit_code is None:
            with contextlib.suppress(Exception):  # the machine may be lost
                await asyncio.wait_for(_reply(self._holder.kill.remote()), _KILL_SECONDS)
                await asyncio.wait_for(asyncio.shield(self._task), _KILL_SECONDS)
        self.exit_code = _LOST if self.exit_code is None else self.exit_code
        self._task.cancel()
        with contextlib.suppress(Exception):
            ray.kill(self._holder)

    async def _follow(self) -> None:
        """Pass its log on until it ends."""
        last = ""
        try:
            while True:
                lines, code = await _reply(self._holder.follow.remote())
                for line in lines:
                    print(line, file=sys.stderr, flush=True)
                last = lines[-1] if lines else last
                if code is not None:
                    break
        except import_ray().exceptions.RayError as error:
            self.exit_code = _LOST
            self._exited(f"its machine {self._machine} is lost: {first_line(error)}")
        else:
            self.exit_code = code
            said = f": {last}" if code > 0 and last else ""
            self._exited(f"{how_it_ended(code)} on {self._machine}{said}")


async def _reply(reference: Any) -> Any:
    """What a call of an actor returns."""
    return await asyncio.wrap_future(reference.future())
