"""The threads that kernels run on: the OpenMP team of torch.

One pool serves torch's GEMMs and the kernels here; a second one would compete for the cores.
"""

import contextlib
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from octavo import cgroup, log
from octavo.errors import ConfigError
from octavo.kernels.cpu.arguments import Address
from octavo.processes import Owner

_logger = log.get_logger(__name__)

# The C type of a compiled kernel: void (*)(void *arguments).
Function = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Team:
    """The OpenMP threads that torch uses, or Python threads where libgomp cannot be found."""

    def __init__(self) -> None:
        self.owner = Owner("the OpenMP team")
        self._gomp = _find_gomp()
        self._fork = _fork_of(self._gomp)
        self._pool: ThreadPoolExecutor | None = None
        if self._fork is None:
            _logger.warning(
                "libgomp was not found among the loaded libraries: kernels run on Python threads, "
                "which costs about 50 us more a call"
            )

    def is_exact(self, threads: int) -> bool:
        """Whether `threads` threads will run at once, as threads that wait for each other must."""
        if self._gomp is None:
            return threads == 1
        most = self._gomp.omp_get_thread_limit()
        return not self._gomp.omp_get_dynamic() and bool(threads <= most)

    def run(self, address: Address, arguments: bytes, threads: int) -> None:
        """Run the function at `address` once on each of `threads` threads, and wait."""
        if self._fork is not None:
            self._fork(address, arguments, threads, 0)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                max_workers=max(torch.get_num_threads(), allowed_threads())
            )
        function = Function(address)
        for job in [self._pool.submit(function, arguments) for _ in range(threads)]:
            job.result()


@lru_cache(maxsize=1)
def team() -> Team:
    """The one team of this process."""
    return Team()


def threads() -> int:
    """How many threads a kernel may use: torch's setting."""
    return torch.get_num_threads()


def check_fork() -> None:
    """Raise ConfigError in a fork of a process that has used its team, unless one thread is enough.

    Torch and the kernels would wait for ever for threads that the fork does not have.
    """
    if team.cache_info().currsize and not team().owner.is_here() and threads() > 1:
        raise ConfigError(
            f"{team().owner.complaint()}: this process lacks its threads, also for a new engine"
        )


def allowed_threads() -> int:
    """Processors of this process's affinity (cpuset), or fewer where a cgroup's quota is less.

    A thread more than the quota gains no time: the group is stopped once it has used its share,
    and threads that wait for each other spend theirs on waiting.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    quota = cgroup.processor_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def set_threads(wanted: int | None) -> None:
    """Let torch and the kernels use `wanted` threads; None: OMP_NUM_THREADS, else what is allowed.

    OpenMP reads OMP_NUM_THREADS itself. Says how many there are and why, and warns of more
    threads than processors.
    """
    before, allowed = threads(), allowed_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
        why = "threads"
    elif log.threads_from_environment() is not None:
        why = "OMP_NUM_THREADS"
    elif allowed < before:
        torch.set_num_threads(allowed)
        quota = cgroup.processor_quota() or allowed
        why = (
            f"{allowed} threads rather than {before}: this container may use {quota:.2f} processors"
        )
    else:
        why = "torch's choice for this machine"
    _logger.info("compute threads: %d (%s)", threads(), why)
    if threads() > allowed:
        _logger.warning(
            "%d compute threads have %d processors: they wait for each other at every step; use "
            "threads=%d (--threads) or fewer", threads(), allowed, allowed,
        )  # fmt: skip


def _find_gomp() -> ctypes.CDLL | None:
    """The libgomp that torch has loaded, or None.

    Asking the loader for a library that is already mapped gives that very library, and with it
    torch's team.
    """
    for path in _mapped_libraries("libgomp"):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


def _fork_of(gomp: ctypes.CDLL | None) -> Any:
    """GOMP_parallel, or None."""
    function = getattr(gomp, "GOMP_parallel", None)
    if function is not None:
        function.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
    return function


def _mapped_libraries(name: str) -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return sorted({path for path in paths if name in os.path.basename(path)})
