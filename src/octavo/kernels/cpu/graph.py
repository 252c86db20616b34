"""A recorded list of kernel calls, replayed as one for any number of rows: the CPU's captured run.

Every kernel is a C function of one address, that of its arguments, so a recording is a copy of the
arguments of each call. To replay it, the number of rows is written to the fields that the layouts
declare for it, and the list is run by one call (`program`). Everything else that changes between
steps is read by the kernels from fixed addresses. Imports no Numba.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.capture import CaptureError
from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.arguments import Kind
from octavo.kernels.cpu.kernel import Kernel, Recording, function_address, kernel, record

_pack = abi.PROGRAM.packer()
_FEW = 8  # rows that one thread finishes before another has started
_MAX_TOKENS = 256  # beyond, the cost of the calls is small relative to the step

Words = NDArray[np.int64]


def program() -> Kernel:
    """The kernel that calls the others."""
    return kernel(abi.PROGRAM)


def capture_sizes(max_tokens: int) -> tuple[int, ...]:
    """One size: a capture is replayed for any number of rows up to its own. None where the
    threads of a team may not all run at once, since the threads of a replay use barriers."""
    if not openmp.team().is_exact(openmp.threads()):
        return ()
    return (min(max_tokens, _MAX_TOKENS),)


def capture(run: Callable[[], torch.Tensor]) -> "Graph":
    """The calls of kernels that `run` makes. Raises CaptureError if it computes anything else."""
    refused = _NoTorchOps()  # type: ignore[no-untyped-call]
    with record() as recording, refused:
        result = run()
    return Graph(recording, result)


class Graph:
    """The calls of `recording`, which gave `result` [rows, H].

    Raises CaptureError for a call of undeclared arguments, or of another number of rows.
    """

    def __init__(self, recording: Recording, result: torch.Tensor) -> None:
        self._result, self._pool = result, recording.pool
        self._checks = tuple(recording.checks)
        self._threads = openmp.threads()
        calls = [np.frombuffer(arguments, np.int64) for _, arguments in recording.calls]
        begins = np.cumsum([0, *map(len, calls)])
        self._template = np.concatenate(calls)
        called = [one for one, _ in recording.calls]
        self._rows = _fields(called, begins, Kind.ROWS)
        self._chunks = _fields(called, begins, Kind.CHUNK)
        if not (self._template[self._rows] == len(result)).all():
            raise CaptureError("its calls have different numbers of rows")
        self._arguments = np.empty_like(self._template)
        addresses = self._arguments.ctypes.data + 8 * begins[:-1]
        entries = np.array([one.address for one in called], np.int64)
        self._calls = np.stack([entries, addresses], axis=1)
        self._yield = function_address("sched_yield")

    def replay(self, num_tokens: int) -> torch.Tensor:
        """See `CapturedRun.replay`."""
        words = self._arguments
        words[:] = self._template  # counters begin at zero
        words[self._rows] = num_tokens
        shared = self._threads > 1 and num_tokens > _FEW
        words[self._chunks] = max(1, num_tokens // (4 * self._threads)) if shared else num_tokens
        arguments = _pack(
            team=self._threads, count=len(self._calls), kernels=self._calls.ctypes.data,
            sched_yield=self._yield,
        )  # fmt: skip
        program().run(arguments, self._threads)
        for check in self._checks:
            check()
        return self._result[:num_tokens]


def _fields(called: list[Kernel], begins: Words, kind: Kind) -> Words:
    """The words of `kind` in the arguments of all calls; call i's begin at begins[i]."""
    found: list[int] = []
    for one, begin in zip(called, begins.tolist(), strict=False):
        if one.arguments is None:
            raise CaptureError(f"{one.where} has no declared arguments")
        found += [begin + word for word in one.arguments.words_of(kind)]
    return np.array(found, np.int64)


class _NoTorchOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses torch ops, except allocations and views: they are not recorded, and would compute on
    what no kernel has written."""

    _HARMLESS = frozenset(("empty", "view", "split_with_sizes", "slice", "detach"))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Called by torch. Otherwise it wraps the mode in a guard that imports its compiler: 1.5 s.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self._HARMLESS:
            raise CaptureError(f"{name} has no capturable kernel")
        return func(*args, **(kwargs or {}))
