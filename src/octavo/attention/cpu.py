"""The CPU backend: paged attention over compiled kernels, the cache in 16, 32 or 8 bits.

It plans a step once and runs the plan for each layer. A plan is a list of work items: query blocks
(some queries of one row) over ranges of KV splits. Layout of the cache and numerics: see
`kernels.cpu.attention`; the fields of an item: `kernels.cpu.abi`.
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
_MAX_PRODUCTS = 8  # of 32 rows in a work item, which loads K and V of a split once for all
Ints = np.ndarray[Any, np.dtype[np.int64]]
Records = np.ndarray[Any, np.dtype[np.void]]
_pack = abi.ATTENTION.packer()


# What layers must have in common to share a plan: KV group, spec, and dtype of the queries.
_LayerKind = tuple[int, AttentionSpec, torch.dtype]


@dataclass(frozen=True, slots=True)
class _Work:
    """A step's work items for layers of one kind. step: the address of the ATTENTION_STEP that
    points to them. `keep` owns the memory that it points to."""

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
        if not cpu_ops.reads(key.dtype, cache.dtype):
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
        q = _in_rows(query)
        if not cpu_ops.reads(key.dtype, cache.dtype):
            cpu_ops.rope_write(
                q, key, key, cos_sin, meta.positions, None, None, 1, q_norm, k_norm, eps
            )
            self.write(key, value, cache, meta)
        else:
            cpu_ops.rope_write(
                q, _in_rows(key), _in_rows(value), cos_sin, meta.positions, cache,
                meta.slots, meta.block_size, q_norm, k_norm, eps,
            )  # fmt: skip
        if q is not query:
            query.copy_(q)

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See AttentionBackend.attend. For a cache of float32 a query in bfloat16 is converted."""
        if not cpu_ops.reads(query.dtype, cache.dtype):
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
    ) -> bool:
        """See CaptureSafe.prepare_replay. One capture serves any number of tokens."""
        self._planned(meta, spec, dtype)
        return True

    def _planned(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        """The work of this step's layers of one kind, planned for the first of them."""
        kind = (meta.group, spec, dtype)
        work = self._work.get(kind)
        if work is None or work.meta is not meta:
            work = self._work[kind] = self._replan(meta, spec, dtype)
        return work

    def _replan(self, meta: AttentionMetadata, spec: AttentionSpec, dtype: torch.dtype) -> _Work:
        """Reuse the plan of another KV group, with this group's block tables, or make a plan.

        Only plans of layers without a window depend on the contents of the block tables.
        """
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
        blocks = _query_blocks(meta, spec, openmp.threads())
        plan = _work_items(blocks, spec, _shared_prefix_groups(blocks, meta, spec))
        groups, dim = spec.num_heads // spec.num_kv_heads, abi.padded_dim(spec.head_dim)
        depth = abi.padded_depth(spec.head_dim, cpu_ops.attention_kind(dtype, dtype) == "tiles")
        rows = int(blocks.queries.max(initial=1)) * groups
        layout = abi.scratch_layout(dim, depth, rows, meta.block_size, dtype.itemsize)
        team = openmp.threads()  # a captured step runs on all of it
        if self._scratch.numel() < layout.nbytes * team:
            self._scratch = torch.empty(layout.nbytes * team, dtype=torch.uint8)
        step = self._step_record((meta.group, spec, dtype))
        values = {
            "items": plan.items.ctypes.data, "num_items": len(plan.items),
            "tables": address(meta.block_tables),
            "scratch": address(self._scratch), "scratch_size": layout.nbytes,
            "block_size": meta.block_size, "window": spec.window or 0, "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads, "groups": groups, "head_dim": spec.head_dim,
            "dim": dim, "depth": depth, "at_o": layout.o, "at_stats": layout.stats,
            "at_new": layout.new, "at_k": layout.k, "at_v": layout.v, "scale": spec.scale,
            "cap": spec.soft_cap or 0.0,
        }  # fmt: skip
        step[0] = tuple(values[name] for name in abi.ATTENTION_STEP.names)
        threads = min(blocks.threads, len(plan.items)) or 1
        return _Work(meta, Address(step.ctypes.data), threads, (plan, self._scratch))


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    return x if cpu_ops.in_rows(x) else x.contiguous()


@dataclass(frozen=True, slots=True)
class _QueryBlocks:
    """Runs of queries of one row, each over the KV splits first..last - 1, in arrays [blocks].

    token, position, table: see `abi.ATTENTION_ITEM`; row: in the step's metadata; max_items: work
    items that divide the splits, per KV head.
    """

    token: Ints
    queries: Ints
    position: Ints
    row: Ints
    table: Ints
    first: Ints
    last: Ints
    max_items: Ints
    threads: int


def _query_blocks(meta: AttentionMetadata, spec: AttentionSpec, threads: int) -> _QueryBlocks:
    """Divide a step into query blocks, balanced: an item has at most 1/4 of a thread's work.

    Work is counted in keys x products of 32 rows. A split of 256 keys takes about 3 us with a
    head of 64, so fewer than two of them run on one thread, and none is divided.
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
    fitting = np.clip(most // np.maximum(lengths, 1), 1, _MAX_PRODUCTS) * QUERY_ROWS // groups
    size = np.maximum(fitting, 1)
    blocks = -(-counts // size)
    row = np.repeat(np.arange(len(counts)), blocks)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * size[row]
    queries = np.minimum(size[row], counts[row] - offset)
    position = lengths[row] - counts[row] + offset
    low = position - (spec.window or 0) + 1 if spec.window else np.zeros_like(position)
    first, last = np.maximum(low, 0) // SPLIT_KEYS, -(-(position + queries) // SPLIT_KEYS)
    max_items = np.minimum(last - first, -(-(last - first) * SPLIT_KEYS // most))
    max_items[queries * groups > QUERY_ROWS] = 1
    table = row * meta.block_tables.stride(0)
    return _QueryBlocks(
        starts[row] + offset, queries, position, row, table, first, last, max_items, threads
    )


def _shared_prefix_groups(
    blocks: _QueryBlocks, meta: AttentionMetadata, spec: AttentionSpec
) -> list[tuple[int, Ints]]:
    """(split, query blocks of one query that share all of its cache blocks), in order.

    A group has at most as many members as a product has rows for. Only the first splits of a
    query are shared, and never its last, which this step writes to.
    """
    most = QUERY_ROWS * spec.num_kv_heads // spec.num_heads
    if spec.window or most < 2:
        return []
    whole = np.where(blocks.queries == 1, blocks.position // SPLIT_KEYS, 0)
    candidates = np.flatnonzero(whole)
    per_split, tables = SPLIT_KEYS // meta.block_size, meta.block_tables.numpy()
    found: list[tuple[int, Ints]] = []
    split = 0
    while len(candidates) > 1:
        cached = tables[blocks.row[candidates], split * per_split : (split + 1) * per_split]
        if len(np.unique(cached[:, 0])) == len(candidates):
            break
        _, which, counts = np.unique(cached, axis=0, return_inverse=True, return_counts=True)
        order = candidates[np.argsort(which.ravel(), kind="stable")]
        same = np.split(order, np.cumsum(counts)[:-1])
        same = [members for members in same if len(members) > 1]
        for members in same:
            parts = np.array_split(members, -(-len(members) // most))
            found += [(split, group) for group in parts]
        split += 1
        candidates = np.concatenate(same) if same else candidates[:0]
        candidates = candidates[whole[candidates] > split]
    return found


@dataclass(frozen=True, slots=True)
class _Plan:
    """Work items, sorted by cost, largest first, and the memory that they point to."""

    items: Records
    counters: Ints
    members: Ints
    partial: np.ndarray[Any, np.dtype[np.float32]]


def _work_items(
    blocks: _QueryBlocks, spec: AttentionSpec, prefix_groups: list[tuple[int, Ints]]
) -> _Plan:
    """Work items of each query block for the splits that it does not share; then one for each
    shared-prefix group and KV head."""
    heads, groups = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    shared = np.zeros_like(blocks.first)  # splits of a block that groups compute
    for _, members in prefix_groups:
        shared[members] += 1
    begin = blocks.first + shared
    own = np.minimum(blocks.max_items, blocks.last - begin)  # items of a block and head
    num_items = own + shared
    block = np.repeat(np.arange(len(own)), own * heads)
    first_item = np.cumsum(own * heads) - own * heads  # of a block
    index = np.arange(len(block)) - first_item[block]
    head, part = index // own[block], index % own[block]
    counters = np.zeros(len(own) * heads, np.int64)
    padded_rows = -(-blocks.queries * groups // abi.TILE_ROWS) * abi.TILE_ROWS
    partial_floats = padded_rows * abi.padded_dim(spec.head_dim) + 2 * QUERY_ROWS  # of a split
    floats = np.where(num_items > 1, (blocks.last - blocks.first) * partial_floats, 0)
    floats = np.repeat(floats, heads)  # of a block and head
    partial = np.empty(int(floats.sum()), np.float32)
    at, splits = block * heads + head, (blocks.last - begin)[block]
    items = np.zeros(len(block) + len(prefix_groups) * heads, abi.ATTENTION_ITEM.dtype)
    own_items = items[: len(block)]
    own_items["token"], own_items["num_queries"] = blocks.token[block], blocks.queries[block]
    own_items["rows"] = blocks.queries[block] * groups
    own_items["position"] = blocks.position[block]
    own_items["kv_head"], own_items["table"] = head, blocks.table[block]
    own_items["split_begin"] = begin[block] + splits * part // own[block]
    own_items["split_end"] = begin[block] + splits * (part + 1) // own[block]
    own_items["counter"] = np.where(num_items[block] > 1, counters.ctypes.data + 8 * at, 0)
    own_items["num_items"] = num_items[block]
    own_items["block_begin"], own_items["block_end"] = blocks.first[block], blocks.last[block]
    own_items["partial"] = partial.ctypes.data + 4 * (np.cumsum(floats) - floats)[at]
    own_items["partial_bytes"] = 4 * partial_floats[block]
    if not prefix_groups:
        return _Plan(items[_by_cost(items)], counters, np.empty(0, np.int64), partial)
    first_items: Ints = first_item[:, None] + np.arange(heads) * own[:, None]
    numbers = _add_prefix_groups(items[len(block) :], prefix_groups, blocks, first_items, groups)
    order = _by_cost(items)
    items = items[order]
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    addresses = items.ctypes.data + place[np.concatenate(numbers)] * items.itemsize
    sizes = np.array([len(group) for group in numbers], np.int64)
    items["members"][place[len(block) :]] = addresses.ctypes.data + 8 * (np.cumsum(sizes) - sizes)
    return _Plan(items, counters, addresses, partial)


def _by_cost(items: Records) -> Ints:
    """The permutation that sorts items by cost, largest first."""
    cost = items["num_queries"] * (items["split_end"] - items["split_begin"])
    return np.argsort(-cost, kind="stable")


def _add_prefix_groups(
    items: Records,
    prefix_groups: list[tuple[int, Ints]],
    blocks: _QueryBlocks,
    first_items: Ints,
    groups: int,
) -> list[Ints]:
    """Write an item for each group and KV head; returns the item numbers of its members.

    first_items: [query blocks, heads], the number of the first item of each; groups: query heads
    of a KV head.
    """
    members: list[Ints] = []
    heads = first_items.shape[1]
    for split, group in prefix_groups:
        for head in range(heads):
            item = items[len(members)]
            item["num_queries"], item["rows"] = len(group), len(group) * groups
            item["position"] = (split + 1) * SPLIT_KEYS
            item["kv_head"], item["table"] = head, blocks.table[group[0]]
            item["split_begin"], item["split_end"] = split, split + 1
            members.append(first_items[group, head])
    return members
