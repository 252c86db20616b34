"""The CPU backend: paged attention over compiled kernels, the cache in 16, 32 or 8 bits.

It divides a step into items of work once and runs them for each layer. Layout of the cache and
numerics: see `kernels.cpu.attention`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.attention.base import AttentionMetadata, AttentionSpec, Capabilities
from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu import fused_call as cpu_ops
from octavo.kernels.cpu.abi import QUERY_ROWS, SPLIT_KEYS
from octavo.kernels.cpu.arguments import Address
from octavo.kernels.cpu.kernel import address, empty, kernel

_FLOATS = (torch.float32, torch.bfloat16)
_PRODUCTS = 8  # of 32 rows in an item at most: K and V of a piece are placed once for all
Ints = np.ndarray[Any, np.dtype[np.int64]]
Records = np.ndarray[Any, np.dtype[np.void]]
_pack = abi.ATTENTION.packer()


# What layers must have in common to share a plan: KV group, spec, and dtype of the queries.
_LayerKind = tuple[int, AttentionSpec, torch.dtype]


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's work items for layers of one kind. step: the address of the ATTENTION_STEP that
    says where they are. `keep` owns the memory that it points to."""

    meta: AttentionMetadata
    step: Address
    threads: int
    keep: tuple[object, ...]


class CpuAttention:
    """Paged attention on the processor's vector and matrix units."""

    name = "cpu"
    capabilities = Capabilities(
        dtypes=_FLOATS,
        kv_dtypes=(*_FLOATS, *cpu_ops.CODES),
        devices=("cpu",),
        head_dims=tuple(range(8, 257, 8)),
        block_sizes=(8, 16, 32, 64, 128),
        graph_safe=True,
    )

    def __init__(self) -> None:
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._work: dict[_LayerKind, _Work] = {}
        # One ATTENTION_STEP for each kind of layer, at one address for as long as this lives:
        # the address is in the arguments of captured calls.
        self._steps: dict[_LayerKind, Records] = {}

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """See AttentionBackend.kv_layout."""
        if kv_dtype in cpu_ops.CODES:
            size = abi.head_bytes(spec.head_dim, block_size)
            return (num_blocks, spec.num_kv_heads, size), kv_dtype
        dim = abi.padded_dim(spec.head_dim)
        return (num_blocks, spec.num_kv_heads, 2, block_size * dim), kv_dtype

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """See AttentionBackend.write."""
        if cache.dtype not in cpu_ops.CODES and key.dtype != cache.dtype:
            key, value = key.to(cache.dtype), value.to(cache.dtype)
        key, value = _in_rows(key), _in_rows(value)
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
        turned = _in_rows(query)
        if cache.dtype not in (key.dtype, *cpu_ops.CODES):
            cpu_ops.rope_write(
                turned, key, key, cos_sin, meta.positions, None, None, 1, q_norm, k_norm, eps
            )
            self.write(key, value, cache, meta)
        else:
            cpu_ops.rope_write(
                turned, _in_rows(key), _in_rows(value), cos_sin, meta.positions, cache,
                meta.slots, meta.block_size, q_norm, k_norm, eps,
            )  # fmt: skip
        if turned is not query:
            query.copy_(turned)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See AttentionBackend.attend. A query of another dtype than the cache is converted."""
        if cache.dtype not in (query.dtype, *cpu_ops.CODES):
            return self.attend(query.to(cache.dtype), cache, meta, spec).to(query.dtype)
        work = self._planned(meta, spec, query.dtype)
        query = _in_rows(query)
        tokens, heads, head_dim = query.shape
        out = empty((tokens, heads * head_dim), query.dtype)
        arguments = _pack(
            q=address(query), q_stride=query.stride(0) * query.itemsize, cache=address(cache),
            out=address(out), step=work.step,
        )  # fmt: skip
        variant = cpu_ops.attention_kind(query.dtype, cache.dtype)
        kernel(abi.ATTENTION, variant).run(arguments, work.threads)
        return out

    def prepare_replay(
        self,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        dtype: torch.dtype,
        captured_tokens: int,
    ) -> None:
        """See CaptureSafe.prepare_replay. One capture serves any number of tokens."""
        self._planned(meta, spec, dtype)

    def _planned(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        """The work of this step's layers of one kind, planned for the first of them."""
        kind = (meta.group, spec, dtype)
        work = self._work.get(kind)
        if work is None or work.meta is not meta:
            work = self._work[kind] = self._replan(meta, spec, dtype)
        return work

    def _replan(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        """The work of another KV group with its own block tables, where it is the same; else of
        a plan. Only items of layers without a window depend on what tables have in common."""
        for group in range(meta.group) if spec.window else ():
            other = self._work.get((group, spec, dtype))
            if other and other.meta.query_starts is meta.query_starts:
                step = self._step_record((meta.group, spec, dtype))
                step[0] = self._steps[group, spec, dtype][0]
                step["tables"] = address(meta.block_tables)
                return _Work(meta, Address(step.ctypes.data), other.threads, other.keep)
        return self._plan(meta, spec, dtype)

    def _step_record(self, kind: _LayerKind) -> Records:
        if kind not in self._steps:
            self._steps[kind] = np.zeros(1, abi.ATTENTION_STEP.dtype)
        return self._steps[kind]

    def _plan(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        parts = _parts(meta, spec, openmp.threads())
        items, counters, members, partial = _items(parts, spec, _companies(parts, meta, spec))
        groups = spec.num_heads // spec.num_kv_heads
        rows = int(parts.queries.max(initial=1)) * groups
        size = abi.scratch_bytes(spec.head_dim, meta.block_size, rows, dtype.itemsize)
        threads = min(parts.threads, len(items)) or 1
        team = openmp.threads()  # a captured step runs on all of it
        if self._scratch.numel() < size * team:
            self._scratch = torch.empty(size * team, dtype=torch.uint8)
        shared, tables = np.empty(partial, np.float32), meta.block_tables
        step = self._step_record((meta.group, spec, dtype))
        step[0] = (
            items.ctypes.data, len(items), address(tables), address(self._scratch), size,
            shared.ctypes.data, meta.block_size, spec.head_dim, spec.num_heads, spec.num_kv_heads,
            spec.window or 0, spec.scale, spec.soft_cap or 0.0,
        )  # fmt: skip
        keep = (items, counters, members, shared, self._scratch)
        return _Work(meta, Address(step.ctypes.data), threads, keep)


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if cpu_ops.in_rows(x) else x.contiguous()


@dataclass(frozen=True, slots=True)
class _Parts:
    """Runs of queries of one row, each over the pieces first..last-1 of its keys, in arrays;
    what `abi` says of an item. `shares`: items that share a part's pieces, per KV head."""

    token: Ints
    queries: Ints
    position: Ints
    table: Ints
    first: Ints
    last: Ints
    shares: Ints
    threads: int


def _parts(meta: AttentionMetadata, spec: AttentionSpec, threads: int) -> _Parts:
    """Cut a step so that threads end together: a part has at most a quarter of a thread's share.

    Work is counted in keys x products of 32 rows. A piece of 256 keys takes about 3 us with a
    head of 64, so less than two of them is left to one thread, and none is cut smaller.
    """
    groups, heads = spec.num_heads // spec.num_kv_heads, spec.num_kv_heads
    starts = meta.query_starts.numpy().astype(np.int64)
    lengths = meta.seq_lens.numpy().astype(np.int64)
    counts = starts[1:] - starts[:-1]
    products = -(-counts * groups // QUERY_ROWS)
    total = int((products * lengths).sum()) * heads
    if total * spec.head_dim < 2 * SPLIT_KEYS * 64:
        threads = 1
    most = max(SPLIT_KEYS, total // (4 * threads))
    taken = np.clip(most // np.maximum(lengths, 1), 1, _PRODUCTS) * QUERY_ROWS // groups
    step = np.maximum(taken, 1)
    parts = -(-counts // step)
    row = np.repeat(np.arange(len(counts)), parts)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * step[row]
    queries = np.minimum(step[row], counts[row] - offset)
    position = lengths[row] - counts[row] + offset
    low = position - (spec.window or 0) + 1 if spec.window else np.zeros_like(position)
    first, last = np.maximum(low, 0) // SPLIT_KEYS, -(-(position + queries) // SPLIT_KEYS)
    shares = np.minimum(last - first, -(-(last - first) * SPLIT_KEYS // most))
    shares[queries * groups > QUERY_ROWS] = 1
    table = row * meta.block_tables.stride(0)
    return _Parts(starts[row] + offset, queries, position, table, first, last, shares, threads)


def _companies(
    parts: _Parts, meta: AttentionMetadata, spec: AttentionSpec
) -> list[tuple[int, Ints]]:
    """(piece, parts of one query that see it whole and from the same blocks), piece by piece.

    As many parts as one product has rows for. A part is in the companies of its first pieces
    only, and never of its last one: there it writes.
    """
    most = QUERY_ROWS * spec.num_kv_heads // spec.num_heads
    whole = np.where(parts.queries == 1, parts.position // SPLIT_KEYS, 0)
    left = np.flatnonzero(whole)
    if spec.window or most < 2:
        return []
    blocks, tables = SPLIT_KEYS // meta.block_size, meta.block_tables.numpy()
    rows = parts.table // meta.block_tables.stride(0)
    found: list[tuple[int, Ints]] = []
    piece = 0
    while len(left) > 1:
        held = tables[rows[left], piece * blocks : (piece + 1) * blocks]
        if len(np.unique(held[:, 0])) == len(left):
            break
        _, which, counts = np.unique(held, axis=0, return_inverse=True, return_counts=True)
        same = np.split(left[np.argsort(which.ravel(), kind="stable")], np.cumsum(counts)[:-1])
        same = [members for members in same if len(members) > 1]
        for members in same:
            cut = np.array_split(members, -(-len(members) // most))
            found += [(piece, some) for some in cut]
        piece += 1
        left = np.concatenate(same) if same else left[:0]
        left = left[whole[left] > piece]
    return found


def _items(
    parts: _Parts, spec: AttentionSpec, companies: list[tuple[int, Ints]]
) -> tuple[Records, Ints, Ints, int]:
    """Items (see `kernels.cpu.abi`), the dearest first; their counters; the members of companies;
    floats of what is shared."""
    heads, groups = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    together = np.zeros_like(parts.first)  # pieces of a part that are in companies
    for _, some in companies:
        together[some] += 1
    begins = parts.first + together
    own = np.minimum(parts.shares, parts.last - begins)
    each = own * heads
    part = np.repeat(np.arange(len(each)), each)
    index = np.arange(len(part)) - np.repeat(np.cumsum(each) - each, each)
    head, share = index // own[part], index % own[part]
    pieces, group = (parts.last - begins)[part], part * heads + head
    counters = np.zeros(len(each) * heads, np.int64)
    shares = own + together
    # AMX stores 16 rows at a time.
    row_floats = -(-parts.queries * groups // 16) * 16 * abi.padded_dim(spec.head_dim)
    floats = (parts.last - parts.first) * (row_floats + 2 * QUERY_ROWS)
    floats = np.repeat(np.where(shares > 1, floats, 0), heads)
    items = np.zeros(len(part) + len(companies) * heads, abi.ATTENTION_ITEM.dtype)
    mine = items[: len(part)]
    mine["token"], mine["num_queries"] = parts.token[part], parts.queries[part]
    mine["position"], mine["table"] = parts.position[part], parts.table[part]
    mine["kv_head"] = head
    mine["split_begin"] = begins[part] + pieces * share // own[part]
    mine["split_end"] = begins[part] + pieces * (share + 1) // own[part]
    mine["counter"] = np.where(shares[part] > 1, counters.ctypes.data + 8 * group, 0)
    mine["num_items"] = shares[part]
    mine["block_begin"], mine["block_end"] = parts.first[part], parts.last[part]
    mine["partial"] = (np.cumsum(floats) - floats)[group]
    first_item = (np.cumsum(each) - each)[:, None] + np.arange(heads) * own[:, None]
    lists = _add_companies(items[len(part) :], companies, parts, first_item)
    cost = items["num_queries"] * (items["split_end"] - items["split_begin"])
    order = np.argsort(-cost, kind="stable")
    items, place = items[order], np.argsort(order)
    members = items.ctypes.data + place[np.concatenate(lists)] * items.itemsize
    sizes = np.array([len(some) for some in lists[1:]], np.int64)
    items["members"][place[len(part) :]] = members.ctypes.data + 8 * (np.cumsum(sizes) - sizes)
    return items, counters, members, int(floats.sum())


def _add_companies(
    items: Records, companies: list[tuple[int, Ints]], parts: _Parts, first_item: Ints
) -> list[Ints]:
    """Write an item for each company and KV head; an empty list, and of each the numbers of an
    item of its members. first_item: [parts, heads], the number of a part's first item."""
    lists = [np.empty(0, np.int64)]
    for piece, some in companies:
        for head in range(first_item.shape[1]):
            item = items[len(lists) - 1]
            item["num_queries"], item["position"] = len(some), (piece + 1) * SPLIT_KEYS
            item["kv_head"], item["table"] = head, parts.table[some[0]]
            item["split_begin"], item["split_end"] = piece, piece + 1
            lists.append(first_item[some, head])
    return lists
