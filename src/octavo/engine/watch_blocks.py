"""The map of a pool's blocks, from the tables of those that hold them.

Per block there is no Python loop: tables are concatenated, and NumPy does the rest. Not here: which
requests there are (`engine.watcher`), and whether the pool is sound (`core.block_pool`).
"""

import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.block_pool import BlockPool
from octavo.core.kv_manager import KVManager
from octavo.core.request import Request
from octavo.engine.watch import (
    CACHED,
    FREE,
    HOST,
    MOST_BLOCKS,
    NO_GROUP,
    SEVERAL,
    SHARED,
    BlockMap,
    Table,
)

_FULL = 255

Owner = Callable[[Request], int]


class _Runs:
    """Blocks one after the other, and of each the owner, fill and group, as runs of equal ones."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self._owners: list[int] = []
        self._groups: list[int] = []
        self._lengths: list[int] = []
        self._fills: list[int] = []
        self._fill_lengths: list[int] = []

    def add(self, blocks: list[int], owner: int, group: int, full: int, partly: int) -> None:
        """Of `blocks` the first `full` are full, and the next one is filled `partly`."""
        count = len(blocks)
        full = min(max(full, 0), count)
        some = 1 if partly and full < count else 0
        self.blocks += blocks
        self._owners.append(owner)
        self._groups.append(group)
        self._lengths.append(count)
        self._fills += (_FULL, partly, 0)
        self._fill_lengths += (full, some, count - full - some)

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """(blocks, owners, fills, groups), each with an entry a block."""
        return (
            _array(self.blocks),
            np.repeat(np.array(self._owners, np.uint16), self._lengths),
            np.repeat(np.array(self._fills, np.uint8), self._fill_lengths),
            np.repeat(np.array(self._groups, np.uint8), self._lengths),
        )


def device_map(kv: KVManager, owner: Owner) -> BlockMap:
    """Of the pool that layers read. owner: the number of a request."""
    runs = _Runs()
    for request in kv.holders:
        number, table = owner(request), request.table
        full, partly = _fill(request, kv.block_size)
        for group, (blocks, first) in enumerate(zip(table.groups, table.first, strict=True)):
            held = blocks[first:] if first else blocks
            runs.add(held, number, group, full - first, partly)
    return _map(kv.pool, runs, kv.num_groups, 0)


def host_map(kv: KVManager, owner: Owner) -> BlockMap | None:
    """Of the pool that swapped requests use; None without one."""
    if kv.host is None:
        return None
    runs = _Runs()
    for request in kv.on_host:
        full, partly = _fill(request, kv.block_size)
        for group in range(kv.num_groups):
            blocks = request.host_blocks[group :: kv.num_groups]
            first = blocks.count(0)  # behind the window, so in front
            runs.add(blocks[first:], owner(request), group, full - first, partly)
    return _map(kv.host, runs, kv.num_groups, HOST)


def _fill(request: Request, block_size: int) -> tuple[int, int]:
    """(full logical blocks, how far the next one is filled, of 255)."""
    full, rest = divmod(request.num_computed, block_size)
    return full, max(1, _FULL * rest // block_size) if rest else 0


def _map(pool: BlockPool, runs: _Runs, groups: int, flag: int) -> BlockMap:
    blocks, owners, fills, of_groups = runs.arrays()
    owner = np.full(pool.num_blocks, FREE, "<u2")
    fill = np.zeros(pool.num_blocks, np.uint8)
    owner[blocks], fill[blocks] = owners, fills
    flags = np.full(pool.num_blocks, flag, np.uint8)
    holders = np.bincount(blocks, minlength=pool.num_blocks)
    if pool.num_shared:
        several = holders > 1
        owner[several] = SEVERAL
        flags[several] |= SHARED
        # A block that two requests hold has what the further one of them has written.
        common = several[blocks]
        np.maximum.at(fill, blocks[common], fills[common])
    if pool.num_cached:
        cached = _array(pool.cached)
        flags[cached] |= CACHED
        unheld = cached[holders[cached] == 0]
        owner[unheld], fill[unheld] = SEVERAL, _FULL
    group = np.empty(0, np.uint8)
    if groups > 1:
        group = np.full(pool.num_blocks, NO_GROUP, np.uint8)
        group[blocks] = of_groups
    shown = min(pool.num_blocks, MOST_BLOCKS)
    arrays = (array[:shown].tobytes() for array in (owner, fill, flags, group))
    return BlockMap(pool.num_blocks, shown, *arrays)


def _array(numbers: Collection[int]) -> NDArray[np.intp]:
    """The numbers as NumPy's indices; `struct` takes half of the time that `np.array` does."""
    packed = struct.pack(f"={len(numbers)}i", *numbers)
    return np.frombuffer(packed, np.int32).astype(np.intp)


def tables_of(choices: Iterable[Request], groups: int) -> tuple[Table, ...]:
    """The blocks of a request's choices, wherever they are."""
    return tuple([_table(request, groups) for request in choices])


def _table(request: Request, groups: int) -> Table:
    on_host = bool(request.host_blocks)
    lists: Sequence[Sequence[int]] = request.table.groups
    if on_host:
        lists = [request.host_blocks[group::groups] for group in range(groups)]
    arrays = [np.array(blocks, "<u4").tobytes() for blocks in lists or [()] * groups]
    return Table(request.index, on_host, request.num_computed, tuple(arrays))
