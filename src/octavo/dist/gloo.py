"""A group of ranks over gloo: TCP connections, between processes of any machines that share a
network.

On one machine, `dist.shared_memory` is some twenty times faster.
"""

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from octavo.dist.base import Group
from octavo.dist.rendezvous import Rendezvous, open_store
from octavo.dist.torch_group import TorchGroup
from octavo.errors import ConfigError, EngineError, PeerLostError, brief

# Longer than any rank may take from one operation to the next, at a start from a slow disk for
# one: the executor's watch tells which rank hangs much earlier.
_LIMIT = timedelta(hours=24)


class GlooGroup(TorchGroup):
    """See `octavo.dist.base.Group`."""

    def abort(self) -> None:
        super().abort()
        if (waiting := self._waiting) is not None:
            waiting.release_once()

    def _finish(self, work: Any) -> None:
        # gloo cannot be interrupted while it waits for a peer behind a network that is gone, so
        # this waits for a lock, which `abort` releases too.
        self._waiting = done = _Latch()
        work.get_future().add_done_callback(lambda future: done.release_once())
        if self._aborted.is_set():
            done.release_once()
        done.wait()
        if self._aborted.is_set() and not work.is_completed():
            raise PeerLostError("the group was aborted")
        work.wait()

    _waiting: "_Latch | None" = None


class _Latch:
    """Opens once. As `threading.Event`, at a third of its cost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._opening = threading.Lock()

    def release_once(self) -> None:
        if self._opening.acquire(blocking=False):
            self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


def gloo_group(meeting: Rendezvous, rank: int, size: int) -> Group:
    """The group of the processes that meet at `meeting`. Waits for all of them.

    Raises ConfigError for an address that cannot be used, EngineError if a rank does not come.
    """
    store = open_store(meeting, rank, size)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _LIMIT
    try:
        options._devices = [
            dist.ProcessGroupGloo.create_device(hostname=meeting.host or "127.0.0.1")
        ]
    except RuntimeError as error:
        raise ConfigError(
            f"gloo cannot listen on {meeting.host!r}: {brief(error)}; give an address of this "
            "machine"
        ) from error
    try:
        backend = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise EngineError(
            f"rank {rank} of {size} cannot meet the others: {brief(error)}"
        ) from error
    return GlooGroup(backend, rank, size, "gloo", "cpu")
