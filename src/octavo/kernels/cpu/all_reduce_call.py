"""Operations of ranks that share memory (see `all_reduce`): the region's layout, and the calls.

Who makes the memory and who the ranks are: `dist.shared_memory`. Imports no Numba.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.errors import PeerLostError
from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.kernel import (
    FLOAT_NAMES,
    address,
    check_replays,
    empty,
    function_address,
    kernel,
)

# 64 x 4096 in bfloat16 took 57 us on two ranks, and with slots of 8 KB 91. From SLICED_FROM on,
# slices took 57 us, and without them 71.
SLOT_BYTES = 65536
SLICED_FROM = 16384
SPINS = 2000  # of about 50 ns each
_NEVER = 2**62
_RANK_BYTES = abi.RANK_SLOTS + 2 * abi.LANES * SLOT_BYTES
_MARK_WORDS = abi.MARK_BYTES // 8

DTYPES = tuple(FLOAT_NAMES)  # of sums
Words = NDArray[np.int64]


def region_bytes(ranks: int) -> int:
    """Memory that `ranks` ranks share. Pages are taken when a lane is first used."""
    return abi.RANK_AREAS + ranks * _RANK_BYTES


def lay_out(region: Words, ranks: int, crowded: bool) -> None:
    """Make zeroed memory a region; by one rank, before any operation.

    crowded: ranks share processors. Then a wait offers its own at once, and there are few waits.
    """
    header = region[: abi.SHARED_REGION.nbytes // 8].view(abi.SHARED_REGION.dtype)
    header["ranks"], header["lanes"], header["slot_bytes"] = ranks, abi.LANES, SLOT_BYTES
    header["rank_bytes"] = _RANK_BYTES
    header["sliced_from"], header["spins"] = (_NEVER, 0) if crowded else (SLICED_FROM, SPINS)


class Exchange:
    """The operations of one rank over a region that was laid out.

    Each waits until all ranks have begun the same one, in the same order. One that has no result,
    since `abort` was called here or by another rank, raises PeerLostError, in a replay too.
    """

    def __init__(self, region: Words, rank: int) -> None:
        header = region[: abi.SHARED_REGION.nbytes // 8].view(abi.SHARED_REGION.dtype)[0]
        self.rank, self.ranks = rank, int(header["ranks"])
        self._header, self._region = header, region  # which stays mapped as long as they live
        area = (abi.RANK_AREAS + rank * _RANK_BYTES) // 8
        self._marks = region[area : area + abi.LANES * _MARK_WORDS : _MARK_WORDS]
        self._lost = region[area + abi.RANK_LOST // 8 :][:1]
        self._packed = abi.ALL_REDUCE.packer(
            region=region.ctypes.data, rank=rank, sched_yield=function_address("sched_yield"),
            usleep=function_address("usleep"),
        )  # fmt: skip

    @property
    def begun(self) -> int:
        """Pieces that this rank has offered to the others: it rises with each operation."""
        return int(self._marks.sum())

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of x, of DTYPES, contiguous, which it overwrites."""
        rows = x.shape[0] if x.dim() > 1 else 1
        self._run(FLOAT_NAMES[x.dtype], x, x, rows)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, n] of each rank, contiguous -> [rows, ranks * n], in rank order."""
        rows, n = x.shape
        out = empty((rows, self.ranks * n), x.dtype)
        self._run("gather", x, out, rows)
        return out

    def abort(self) -> None:
        """Let operations fail, on all ranks, those that wait too. From any thread."""
        self._header["aborted"] = 1

    def check(self) -> None:
        """Raise PeerLostError if an operation so far had no result."""
        if self._lost[0]:
            raise PeerLostError(f"rank {self.rank} of {self.ranks}: the group was aborted")

    def _run(self, variant: str, x: torch.Tensor, out: torch.Tensor, rows: int) -> None:
        if not (nbytes := x.nbytes):
            return
        check_replays(self.check)
        arguments = self._packed(
            rows=rows, x=address(x), out=address(out), row_bytes=nbytes // rows
        )
        threads = min(openmp.threads(), abi.LANES, 1 + nbytes // abi.LANE_BYTES)
        kernel(abi.ALL_REDUCE, variant).run(arguments, threads)
        self.check()
