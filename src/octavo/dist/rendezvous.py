"""Where the ranks of an engine find each other: a file on one machine, a port between machines.

The engine chooses it and tells it to each rank. A file needs no port, so that engines on one
machine never collide; a port is one that the system gives, unless the caller names one.
"""

import errno
import socket
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from octavo.errors import ConfigError, EngineError, brief

MEETING_SECONDS = 300.0  # what the slowest rank may take to start


class Rendezvous(msgspec.Struct, frozen=True):
    """A place where all ranks meet once.

    file: its path, for ranks on one machine; else host and port of rank 0. host: an address of
    this rank's machine on the network between them; "" on one machine.
    """

    file: str = ""
    address: str = ""
    port: int = 0
    host: str = ""


def free_port(host: str) -> int:
    """A port of `host` that nothing listens on now."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def open_store(meeting: Rendezvous, rank: int, size: int) -> Any:
    """torch's store at `meeting`; rank 0 opens the port. Raises ConfigError if it is taken."""
    limit = timedelta(seconds=MEETING_SECONDS)
    if meeting.file:
        store: Any = dist.FileStore(meeting.file, size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        return store
    if rank == 0:
        _check_port(meeting)
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            meeting.address, meeting.port, size, is_master=rank == 0, timeout=limit,
            wait_for_workers=False,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"rank {rank} cannot reach rank 0 at {meeting.address}:{meeting.port}: {brief(error)}"
        ) from error


def _check_port(meeting: Rendezvous) -> None:
    try:
        with socket.create_server((meeting.address, meeting.port)):
            pass
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = (
            "stop what listens there, or choose another port"
            if taken
            else ("choose an address of this machine and a port from 1024")
        )
        raise ConfigError(
            f"the ranks cannot meet at {meeting.address}:{meeting.port}: "
            f"{'the port is in use' if taken else error.strerror or error}; {remedy}"
        ) from error
