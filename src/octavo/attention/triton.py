"""The Triton backend: paged attention on NVIDIA GPUs, over the kernels of `kernels.gpu.attention`.

It plans a step once, in host memory, and runs the plan for each layer of one kind. Two lists of
work items differ in the shape of their tiles: small tiles over pieces of `SPLIT_KEYS` keys, whose
results are joined, serve rows of few queries, and large tiles over all keys serve prompts. Which
list a row is on depends on that row alone, so a row's result does not depend on the other rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton

from octavo.attention.base import (
    AttentionMetadata,
    AttentionSpec,
    HeadNorms,
    HostLengths,
)
from octavo.attention.triton_cache import CODES, SPLIT_KEYS, TritonCache, static_lines
from octavo.kernels.gpu import attention as kernels
from octavo.kernels.gpu import cache as cache_kernels
from octavo.kernels.gpu.attention import (
    ITEM_FIELDS,
    JOIN_FIELDS,
    Tile,
)
from octavo.kernels.gpu.matmul import is_wide
from octavo.kernels.gpu.staging import Staging, copies_of

Ints = np.ndarray[Any, np.dtype[np.int32]]
_Kind = tuple[int, AttentionSpec]  # of layers: the KV group, and the spec

_FORMS = dict(zip(CODES, (cache_kernels.INT8, cache_kernels.FP8), strict=True))
# Programs for each multiprocessor: two small tiles hide the latency of each other's loads.
_PROGRAMS = {"split": 4, "whole": 1, "joins": 8}

# int32 from the length of one list to the next, 16 bytes, since a kernel is compiled for the
# alignment of its arguments; and of all lengths, before the lists.
_COUNT, _HEADER = 4, 16

# Kinds of layers whose launches are remembered: they are asked for at each layer of a step.
_KINDS = 64
# Heads that one program rotates and stores.
_HEADS_AT_ONCE = 8


@lru_cache(maxsize=_KINDS)
def tiles(
    spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> Mapping[str, Tile]:
    """The tiles of rows of few queries and of prompts, for queries of `dtype`.

    Prompts have 128 rows in a tile, of which a Hopper GPU multiplies 64 in one instruction. Codes
    are converted in registers, which leaves fewer for long heads: no tile may spill.
    """
    group = triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)
    long_heads = spec.head_dim > 128
    wide = dtype == torch.float32 or long_heads
    coded = kv_dtype in _FORMS
    stages = 2 if long_heads or coded else 3
    split = Tile(max(16, group), 32 if long_heads else 64, 4, stages)
    keys = (16 if coded and long_heads else 32) if wide else 64
    whole = Tile(max(64 if wide else 128, group), keys, 8, 2 if wide else 3)
    return {"split": split, "whole": whole}


@lru_cache(maxsize=_KINDS)
def attend_constants(
    spec: AttentionSpec, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int, tile: Tile
) -> Mapping[str, Any]:
    """What `kernels.attend` is compiled for."""
    return {
        "KV_HEADS": spec.num_kv_heads, "GROUP": spec.num_heads // spec.num_kv_heads,
        "HEAD_DIM": spec.head_dim, "DIMS": triton.next_power_of_2(spec.head_dim),
        "BLOCK": block_size, "ROWS": tile.rows, "KEYS": tile.keys, "CODES": kv_dtype in _FORMS,
        "WINDOW": spec.window is not None, "CAPPED": spec.soft_cap is not None, "SINKS": spec.sinks,
        "WIDE": is_wide(dtype), "FIELDS": ITEM_FIELDS,
    }  # fmt: skip


@lru_cache(maxsize=_KINDS)
def join_constants(spec: AttentionSpec) -> Mapping[str, Any]:
    """What `kernels.join` is compiled for."""
    group = spec.num_heads // spec.num_kv_heads
    return {
        "KV_HEADS": spec.num_kv_heads, "GROUP": group, "HEADS": triton.next_power_of_2(group),
        "HEAD_DIM": spec.head_dim, "DIMS": triton.next_power_of_2(spec.head_dim),
        "SINKS": spec.sinks, "FIELDS": JOIN_FIELDS,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkLists:
    """A step's work for layers of one kind, int32 in host memory.

    split, whole: [items, ITEM_FIELDS]; joins: [joins, JOIN_FIELDS]; lines: of the partial results.
    """

    split: Ints
    whole: Ints
    joins: Ints
    lines: int

    def parts(self) -> dict[str, Ints]:
        """The lists by name, as they lie in memory: `split` last, the only one that may be long."""
        return {"joins": self.joins, "whole": self.whole, "split": self.split}


def plan(
    query_starts: Ints, seq_lens: Ints, spec: AttentionSpec, split_rows: int, whole_rows: int
) -> WorkLists:
    """The work of rows of query_starts[r+1] - query_starts[r] queries over seq_lens[r] keys.

    A row whose queries fit in one tile of `split_rows` is computed over pieces of keys, a longer
    one in tiles of `whole_rows`. Rows without queries are padding.
    """
    group = spec.num_heads // spec.num_kv_heads
    counts = query_starts[1:] - query_starts[:-1]
    small = counts * group <= split_rows
    step = np.where(small, split_rows // group, whole_rows // group)
    tiles = -(-counts // step)
    row = np.repeat(np.arange(len(counts)), tiles)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * step[row]
    queries = np.minimum(step[row], counts[row] - offset)
    position = seq_lens[row] - counts[row] + offset
    end, start = position + queries, np.zeros_like(position)
    if spec.window is not None:
        start = np.maximum(0, position + 1 - spec.window)
    first, last = start // SPLIT_KEYS, -(-end // SPLIT_KEYS)
    tile = np.stack((row, query_starts[row] + offset, queries, position), 1)
    whole = ~small[row]
    edges = np.stack((first * SPLIT_KEYS, end, np.full_like(end, -1), np.zeros_like(end)), 1)
    split, joins, lines = _pieces(tile[~whole], first[~whole], last[~whole], end[~whole], group)
    return WorkLists(split, np.hstack((tile, edges))[whole].astype(np.int32), joins, lines)


def _pieces(tile: Ints, first: Ints, last: Ints, end: Ints, group: int) -> tuple[Ints, Ints, int]:
    """(items, joins, lines) of `tile` [tiles, 4] over the pieces first..last - 1 of keys."""
    pieces, lines = last - first, tile[:, 2] * group
    joined = np.where(pieces > 1, pieces, 0)
    base = np.cumsum(joined * lines) - joined * lines  # first line of a tile
    of = np.repeat(np.arange(len(tile)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = (first[of] + number) * SPLIT_KEYS
    line = np.where(joined[of] > 0, base[of] + number * lines[of], -1)
    columns = (begin, np.minimum(begin + SPLIT_KEYS, end[of]), line, np.zeros_like(line))
    items = np.hstack((tile[of], np.stack(columns, 1)))
    tokens = np.where(joined > 0, tile[:, 2], 0)
    of = np.repeat(np.arange(len(tile)), tokens)
    number = np.arange(len(of)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
    joins = np.stack((tile[of, 1] + number, base[of] + number * group, pieces[of], lines[of]), 1)
    return items.astype(np.int32), joins.astype(np.int32), int((joined * lines).sum())


@dataclass(frozen=True, slots=True)
class _Work:
    """WorkLists on the device, the number of entries of each list behind it.

    launched: the lists that a kernel is launched for; all of them where a capture has launched it.
    """

    meta: AttentionMetadata
    tables: torch.Tensor  # int32 [rows, blocks]
    items: dict[str, torch.Tensor]  # int32
    counts: dict[str, torch.Tensor]  # int32 [1]
    partials: torch.Tensor
    moments: torch.Tensor
    launched: frozenset[str]


class _StaticWork:
    """Memory at fixed addresses for the work of steps of up to `tokens` tokens."""

    def __init__(self, meta: AttentionMetadata, spec: AttentionSpec, tokens: int) -> None:
        device = meta.block_tables.device
        group, per_line = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads * spec.head_dim
        self._lines = static_lines(spec, tokens, meta.max_blocks * meta.block_size)
        # The split items come last, so that only those in use are copied.
        self._capacity = {"joins": tokens, "whole": tokens, "split": tokens + self._lines // group}
        sizes = [tokens * JOIN_FIELDS, tokens * ITEM_FIELDS, self._capacity["split"] * ITEM_FIELDS]
        ends = np.cumsum([_HEADER, *sizes]).tolist()
        self._places = dict(zip(self._capacity, ends[:-1], strict=True))
        flat = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._flat = flat
        self._tables = torch.zeros(tokens, meta.max_blocks, dtype=torch.int32, device=device)
        self._items = {name: flat[at:] for name, at in self._places.items()}
        self._counts = {name: flat[_COUNT * i :][:1] for i, name in enumerate(self._capacity)}
        self._partials = torch.empty(self._lines * per_line, device=device)
        self._moments = torch.empty(self._lines * spec.num_kv_heads * 2, device=device)

    def fill(
        self,
        kind: _Kind,
        meta: AttentionMetadata,
        lists: WorkLists,
        launched: frozenset[str],
        staging: Staging,
    ) -> _Work | None:
        """The work of a step in this memory; None if it does not fit."""
        parts = lists.parts()
        most = self._capacity
        if lists.lines > self._lines or any(len(parts[n]) > most[n] for n in parts):
            return None
        used = self._places["split"] + lists.split.size
        flat = np.zeros(used, np.int32)
        for i, (name, part) in enumerate(parts.items()):
            flat[_COUNT * i] = len(part)
            at = self._places[name]
            flat[at : at + part.size] = part.ravel()
        staging.fill(("static", *kind), flat, self._flat[:used])
        rows, blocks = meta.block_tables.shape
        self._tables[:rows, :blocks] = meta.block_tables
        return _Work(
            meta, self._tables, self._items, self._counts, self._partials, self._moments,
            launched,
        )  # fmt: skip


class TritonAttention(TritonCache):
    """Paged attention on NVIDIA GPUs of compute capability 8.0 or newer."""

    capabilities = replace(
        TritonCache.capabilities,
        devices=("cuda", "cpu") if triton.knobs.runtime.interpret else ("cuda",),
    )

    def __init__(self) -> None:
        self._work: dict[_Kind, _Work] = {}
        self._static: dict[_Kind, _StaticWork] = {}
        self._staging: Staging | None = None

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """See AttentionBackend.write."""
        self._write(key[:, :0], key, value, None, cache, meta)

    def rope_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> None:
        """Rotary embedding of query, in place, and of key, as `kernels.reference.rope`; then
        `write`. `key` itself is not changed."""
        self._write(query, key, value, cos_sin, cache, meta)

    def norm_rope_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        norms: HeadNorms,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
    ) -> None:
        """`kernels.reference.head_norm` of query, in place, and of key; then `rope_write`."""
        self._write(query, key, value, cos_sin, cache, meta, norms)

    def _write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor | None,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        norms: HeadNorms | None = None,
    ) -> None:
        tokens, kv_heads, head_dim = key.shape
        codes, scales = _views(cache)
        heads = _HEADS_AT_ONCE if query.is_cuda else 64
        groups = -(-query.shape[1] // heads) + 2 * -(-kv_heads // heads)
        table = meta.positions if cos_sin is None else cos_sin
        weights = (query, key) if norms is None else (norms.query, norms.key)
        eps, cast_first = (0.0, False) if norms is None else (norms.eps, norms.cast_first)
        cache_kernels.rotate_and_write[tokens, groups](
            codes, scales, query, key, value, *weights, table, meta.positions, meta.slots, eps,
            *cache.stride()[:3], query.stride(0), key.stride(0), value.stride(0), table.stride(0),
            Q_HEADS=query.shape[1], KV_HEADS=kv_heads, HEADS=heads, HEAD_DIM=head_dim,
            DIMS=triton.next_power_of_2(head_dim), BLOCK=meta.block_size,
            HALF=0 if cos_sin is None else cos_sin.shape[1] // 2, WRITES=True,
            FORM=_FORMS.get(cache.dtype, cache_kernels.PLAIN), num_warps=4,
            NORMS=norms is not None, CAST_FIRST=cast_first,
        )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        work = self._planned(meta, spec, query.dtype)
        out = query.new_empty((len(query), spec.num_heads * spec.head_dim))
        if not query.is_cuda:
            out.zero_()  # rows that pad a step: the interpreter warns of large numbers
        kv, scales = _views(cache, decode=True)
        sinks = out if sinks is None else sinks
        for name, tile in tiles(spec, query.dtype, cache.dtype).items():
            if name not in work.launched:
                continue
            kernels.attend[(_programs(query.device, name),)](
                out, work.partials, work.moments, query, kv, scales, work.tables,
                work.items[name], work.counts[name], sinks, *cache.stride()[:3],
                work.tables.stride(0), query.stride(0), out.stride(0),
                spec.scale, spec.soft_cap or 1.0, spec.window or 0,
                **attend_constants(spec, query.dtype, cache.dtype, meta.block_size, tile),
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        if "joins" in work.launched:
            kernels.join[(_programs(query.device, "joins"),)](
                out, work.partials, work.moments, work.items["joins"], work.counts["joins"], sinks,
                out.stride(0), **join_constants(spec),
            )  # fmt: skip
        return out

    def prepare_replay(
        self,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        dtype: torch.dtype,
        captured_tokens: int,
    ) -> bool:
        """See CaptureSafe.prepare_replay."""
        kind = (meta.group, spec)
        if kind not in self._static:
            self._static[kind] = _StaticWork(meta, spec, captured_tokens)
        lists = self._lists(meta, spec, dtype)
        tile = tiles(spec, dtype)["split"]
        short = captured_tokens * (spec.num_heads // spec.num_kv_heads) <= tile.rows
        # Whether keys are joined is not known at capture; large tiles need a row that is long.
        launched = frozenset({"split", "joins"} if short else {"split", "joins", "whole"})
        work = self._static[kind].fill(kind, meta, lists, launched, self._staged(meta))
        if work is not None:
            self._work[kind] = work
        return work is not None

    def _planned(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        """The work of this step's layers of one kind, planned for the first of them."""
        work = self._work.get((meta.group, spec))
        if work is not None and meta.captured:
            return work  # in static memory
        if work is None or work.meta is not meta:
            work = self._work[meta.group, spec] = self._plan(meta, spec, dtype)
        return work

    def _staged(self, meta: AttentionMetadata) -> Staging:
        if self._staging is None:
            self._staging = Staging(copies_of(meta.query_starts.device))
        return self._staging

    def _lists(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> WorkLists:
        split, whole = tiles(spec, dtype).values()
        host = meta.host or HostLengths(
            meta.query_starts.cpu().numpy(), meta.seq_lens.cpu().numpy()
        )
        return plan(host.query_starts, host.seq_lens, spec, split.rows, whole.rows)

    def _plan(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        lists = self._lists(meta, spec, dtype)
        device = meta.query_starts.device
        parts = lists.parts()
        counts = np.zeros(_HEADER, np.int32)
        counts[: _COUNT * len(parts) : _COUNT] = [len(part) for part in parts.values()]
        flat = np.concatenate([counts, *(part.ravel() for part in parts.values())])
        (moved,) = self._staged(meta).send((meta.group, spec), [flat])
        items: dict[str, torch.Tensor] = {}
        at = _HEADER
        for name, part in parts.items():
            items[name] = moved[at : at + part.size]
            at += part.size
        lines = max(lists.lines, 1) * spec.num_kv_heads
        return _Work(
            meta,
            meta.block_tables,
            items,
            {name: moved[_COUNT * i :][:1] for i, name in enumerate(parts)},
            torch.empty(lines * spec.head_dim, dtype=torch.float32, device=device),
            torch.empty(lines * 2, dtype=torch.float32, device=device),
            frozenset(name for name, part in parts.items() if len(part)),
        )


def _views(cache: torch.Tensor, decode: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a cache as the kernels take them, and the same memory as float32 scales."""
    if cache.dtype not in _FORMS:
        return cache, cache
    codes = cache if decode or cache.dtype == torch.int8 else cache.view(torch.uint8)
    return codes, cache.view(torch.float32)


def _programs(device: torch.device, name: str) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS[name] * count
