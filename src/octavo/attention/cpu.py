"""The CPU backend: paged attention over compiled kernels, in bfloat16 and float32.

It divides a step into items of work once and runs them for each layer. Layout of the cache and
numerics: see `kernels.cpu_attention`.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention.base import AttentionMetadata, AttentionSpec, Capabilities
from octavo.kernels import cpu_jit, cpu_layout, cpu_ops
from octavo.kernels.cpu_layout import ITEM_SLOTS, KEYS

_FLOATS = (torch.float32, torch.bfloat16)
_ROWS = 256  # rows (queries x groups) of an item: a piece is read again for every 32 of them
_pack_call = struct.Struct(cpu_layout.CALL_FORMAT).pack
_pack_step = struct.Struct(cpu_layout.STEP_FORMAT).pack


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's items for layers of one kind. `keep` owns the memory that `packed` points to."""

    packed: bytes
    threads: int
    keep: tuple[object, ...]


class CpuAttention:
    """Paged attention on the processor's vector and matrix units."""

    name = "cpu"
    capabilities = Capabilities(
        dtypes=_FLOATS,
        kv_dtypes=_FLOATS,
        devices=("cpu",),
        head_dims=tuple(range(8, 257, 8)),
        block_sizes=(8, 16, 32, 64, 128),
    )

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._meta: AttentionMetadata | None = None
        self._work: dict[AttentionSpec, _Work] = {}

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """See AttentionBackend.kv_layout."""
        dim = cpu_layout.padded_dim(spec.head_dim)
        return (num_blocks, spec.num_kv_heads, 2, block_size * dim), kv_dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """See AttentionBackend.write."""
        key, value = _in_rows(key.to(cache.dtype)), _in_rows(value.to(cache.dtype))
        cpu_ops.rope_write(None, key, value, None, None, cache, meta.slots, meta.block_size)

    def rope_write(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Head norms (if given) and rotary embedding of query, in place, and of key; then write.

        Shapes as in `attend` and `write`; cos_sin as in `kernels.reference.rope`. What `key`
        holds afterwards is not defined.
        """
        cpu_ops.rope_write(
            query, _in_rows(key), _in_rows(value), cos_sin, meta.positions, cache, meta.slots,
            meta.block_size, q_norm, k_norm, eps,
        )  # fmt: skip

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        if meta is not self._meta:
            self._work.clear()
            self._meta = meta
        work = self._work.get(spec)
        if work is None:
            work = self._work[spec] = self._plan(meta, spec, cache.dtype)
        query = _in_rows(query)
        out = torch.empty((query.shape[0], spec.num_heads * spec.head_dim), dtype=query.dtype)
        stride = query.stride(0) * query.element_size()
        call = _pack_call(0, 0, query.data_ptr(), stride, cache.data_ptr(), out.data_ptr())
        kind = cpu_ops.attention_kind(query.dtype)
        cpu_ops.kernel("attention", kind).run(call + work.packed, work.threads)
        return out

    def _plan(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        threads = cpu_jit.threads()
        tables = meta.block_tables
        items, counters, partial = _items(meta, spec, threads)
        groups = spec.num_heads // spec.num_kv_heads
        rows = max(1, int(items[:, 1].max(initial=1))) * groups
        size = cpu_layout.scratch_bytes(spec.head_dim, meta.block_size, rows, dtype.itemsize)
        threads = max(1, min(threads, len(items)))
        if self._scratch.numel() < size * threads:
            self._scratch = torch.empty(size * threads, dtype=torch.uint8)
        shared = torch.empty(partial, dtype=torch.float32)
        packed = _pack_step(
            items.ctypes.data, len(items), tables.data_ptr(), self._scratch.data_ptr(), size,
            shared.data_ptr(), meta.block_size, spec.head_dim, spec.num_heads, spec.num_kv_heads,
            spec.window or 0, spec.scale, spec.soft_cap or 0.0,
        )  # fmt: skip
        return _Work(packed, threads, (items, counters, shared, tables, self._scratch))


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if cpu_ops.in_rows(x) else x.contiguous()


def _items(
    meta: AttentionMetadata, spec: AttentionSpec, threads: int
) -> tuple["np.ndarray[tuple[int, int], np.dtype[np.int64]]", object, int]:
    """Items (see `kernels.cpu_layout`), dearest first; their counters; floats of partials."""
    starts, lengths = meta.query_starts.tolist(), meta.seq_lens.tolist()
    stride, groups = meta.block_tables.stride(0), spec.num_heads // spec.num_kv_heads
    parts: list[tuple[int, ...]] = []  # token, queries, position, table, first, last piece
    total = sum((starts[r + 1] - starts[r]) * lengths[r] for r in range(meta.num_rows))
    # An item should cost at most a part of a thread's share, so that threads end together.
    most = max(1, total * spec.num_kv_heads // (4 * threads))
    for row in range(meta.num_rows):
        token, end, length = starts[row], starts[row + 1], lengths[row]
        step = max(1, min(_ROWS // groups, most // length))
        step = max(step, min(end - token, -(-cpu_layout.SUB // groups)))
        for first in range(token, end, step):
            queries = min(step, end - first)
            position = length - (end - first)
            low = 0 if spec.window is None else max(0, position - spec.window + 1)
            last = -(-(position + queries) // KEYS)
            parts.append((first, queries, position, row * stride, low // KEYS, last))
    return _with_heads(parts, spec, groups, most)


def _with_heads(
    parts: list[tuple[int, ...]], spec: AttentionSpec, groups: int, most: int
) -> tuple["np.ndarray[tuple[int, int], np.dtype[np.int64]]", object, int]:
    """Each part for each KV head, those of few queries and many keys shared among items."""
    out: list[tuple[int, ...]] = []
    dim, partial, counter = cpu_layout.padded_dim(spec.head_dim), 0, 0
    counters = np.zeros(len(parts) * spec.num_kv_heads, np.int64)
    for token, queries, position, table, first, last in parts:
        pieces, rows = last - first, queries * groups
        shares = 1
        if rows <= cpu_layout.SUB:
            shares = min(pieces, -(-queries * pieces * KEYS // most))
        for head in range(spec.num_kv_heads):
            base = (token, queries, position, head, table)
            if shares == 1:
                out.append((*base, first, last, 0, 1, first, last, 0))
                continue
            address = counters.ctypes.data + 8 * counter
            for share in range(shares):
                a, b = (first + pieces * (share + i) // shares for i in (0, 1))
                out.append((*base, a, b, address, shares, first, last, partial))
            counter += 1
            partial += pieces * (rows * dim + 2 * cpu_layout.SUB)
    items = np.array(out, np.int64).reshape(-1, ITEM_SLOTS)
    cost = items[:, 1] * (items[:, 6] - items[:, 5])
    return np.ascontiguousarray(items[np.argsort(-cost, kind="stable")]), counters, partial
