"""This process's connection to a Ray cluster: join it, what its machines have, find room.

The cluster is that of RAY_ADDRESS, else one that was started on this machine with `ray start`,
else one of this machine alone that is started here and ends with this process. A program that is
connected already stays as it is. Starting engines there is `engine.ray_launcher`.
"""

import atexit
import logging
import queue
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError, counted
from octavo.log import get_logger, ray_address_from_environment

logger = get_logger(__name__)

CONNECT_SECONDS = 5.0
_LEAVE_SECONDS = 10.0
JOIN_SECONDS = 120.0  # a cluster of this machine alone takes 7 to 25 s to start

Resources = Mapping[str, float]


@dataclass(frozen=True)
class Machine:
    """An alive node of the cluster. total, free: its CPUs and GPUs, by Ray's names."""

    address: str
    total: Resources
    free: Resources


class RayCluster:
    """Joined once, by whichever thread comes first; left when this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def join(self) -> str:
        """Connect, unless that is done. Blocks for some seconds. Returns this machine's address.

        Raises ConfigError.
        """
        ray = import_ray()
        with self._lock:
            if not ray.is_initialized():
                self._start(ray)
        return str(ray.util.get_node_ip_address())

    def _start(self, ray: Any) -> None:
        check_address(ray_address_from_environment())
        # In a thread that does not end: Linux ends the processes of a cluster that is started
        # here with the thread that started them. Nor in the main one, where Ray would take SIGTERM.
        found: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        leave = threading.Event()
        thread = threading.Thread(target=_connect, args=(ray, found, leave), daemon=True)
        thread.start()
        atexit.register(_leave, thread, leave)
        try:
            error = found.get(timeout=JOIN_SECONDS)
        except queue.Empty:
            error = TimeoutError(f"it did not answer within {JOIN_SECONDS:g} s")
        if isinstance(error, Exception):
            raise ConfigError(
                f"the Ray cluster cannot be joined: {first_line(error)}; start one with "
                "`ray start --head`, or set RAY_ADDRESS to HOST:PORT of one; if it uses tokens, "
                "set RAY_AUTH_MODE=token and have the same ~/.ray/auth_token on all machines"
            ) from error
        logger.info("joined the Ray cluster of %s", counted(len(self.machines()), "machine"))

    def machines(self) -> list[Machine]:
        """The machines that are alive now, that with the lowest address first."""
        ray = import_ray()
        free = _free_by_node()
        return sorted(
            (
                Machine(
                    node["NodeManagerAddress"],
                    _of_interest(node["Resources"]),
                    _of_interest(free.get(node["NodeID"], {})),
                )
                for node in ray.nodes()
                if node["Alive"]
            ),
            key=lambda machine: machine.address,
        )


def take_signals_back() -> None:
    """Undo what Ray did to SIGTERM when it was joined: its handler prints a trace, and aborts the
    process after 3 s, in the middle of a drain. In the main thread; elsewhere this does nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it


def _leave(thread: threading.Thread, leave: threading.Event) -> None:
    """Before the interpreter is taken apart, of which Ray's own threads know nothing."""
    leave.set()
    thread.join(_LEAVE_SECONDS)


def _connect(
    ray: Any, found: "queue.SimpleQueue[BaseException | None]", leave: threading.Event
) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)  # what it does is told in our own words
    try:
        # Ray's own set-up of logging would replace this program's handlers.
        ray.init(
            include_dashboard=False, log_to_driver=False, configure_logging=False,
            namespace="octavo",
        )  # fmt: skip
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the thread that waits raises it
        found.put(error if isinstance(error, Exception) else RuntimeError("Ray gave up"))
        return
    found.put(None)
    leave.wait()
    ray.shutdown()


def check_address(address: str | None) -> None:
    """Raise ConfigError for a RAY_ADDRESS where nobody listens; Ray itself would try for minutes.

    Addresses that are not HOST:PORT are left to Ray, but for its client's.
    """
    if address is None or address in ("auto", "local"):
        return
    if "://" in address:
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}: give HOST:PORT of the cluster's head, on a machine of "
            "the cluster; engines cannot be reached through a Ray client"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"RAY_ADDRESS is {address!r}, which is not HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"RAY_ADDRESS is {address!r}, and nobody answers there within {CONNECT_SECONDS:g} s: "
            f"{error}; start the cluster's head with `ray start --head`, and look at the firewall"
        ) from error


def import_ray() -> Any:
    """The ray package. Raises ConfigError where it is not installed."""
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ConfigError(
            "distributed_executor_backend='ray' needs the package ray, which cannot be imported "
            f"({error}): pip install 'octavo[ray]'"
        ) from error
    return ray


def first_line(error: BaseException) -> str:
    """What an error of Ray's says, without its long tail."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__


def no_room(wanted: Resources, machines: Sequence[Machine], seconds: float) -> ConfigError:
    """The error of an engine for which no machine had room in time."""
    free = "; ".join(
        f"{machine.address}: " + (_free(machine) or "nothing of that kind") for machine in machines
    )
    return ConfigError(
        f"the Ray cluster has no machine with {_said(wanted)} free within {seconds:g} s, which "
        f"one engine asks for; free are {free}: add a machine, end what runs there, or set "
        "fewer threads, tensor_parallel_size or data_parallel_size"
    )


def _free(machine: Machine) -> str:
    return ", ".join(
        f"{machine.free.get(name, 0):g} of {total:g} {name}"
        for name, total in machine.total.items()
    )


def _said(wanted: Resources) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in wanted.items() if count)


def _of_interest(resources: Resources) -> dict[str, float]:
    return {name: resources[name] for name in ("CPU", "GPU") if name in resources}


def _free_by_node() -> Mapping[str, Resources]:
    """By node id; empty where this release of Ray does not tell (it is not its public face)."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    found: Mapping[str, Resources] = available_resources_per_node()
    return found
