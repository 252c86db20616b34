"""The memory layouts that kernels and their callers share: arguments, work items, scratch.

Each is declared once, by field and kind (see `arguments`). Free of Numba, so that compiled
kernels can be called without importing it.
"""

from dataclasses import dataclass

from octavo.kernels.cpu.arguments import Arguments, Kind, Record

_COUNTER, _POINTER, _I64, _F64 = Kind.COUNTER, Kind.POINTER, Kind.I64, Kind.F64

# -- attention (see `attention`) ----------------------------------------------------------------

SPLIT_KEYS = 256  # keys of a KV split: K and V of one head of 64 take 64 KB in bfloat16
QUERY_ROWS = 32  # rows of a product; 32 x SPLIT_KEYS scores take 32 KB
AHEAD_KEYS, AHEAD_CODES = 64, 128  # how far ahead keys and values are prefetched: 8 KB in 16 bits
DECODED_ROWS = 16  # from so many rows on, codes are decoded once for all products of a work item
SCORE_STRIDE = SPLIT_KEYS * 4 + 64  # a cache line more, so that rows fall on different sets

# q_stride: bytes from token to token. step: the address of an ATTENTION_STEP.
ATTENTION = Arguments(
    "attention:attention",
    counter=_COUNTER, thread=_COUNTER, q=_POINTER, q_stride=_I64, cache=_POINTER, out=_POINTER,
    step=_POINTER,
)  # fmt: skip

# Shared by all layers of one kind, rewritten for each step at the same address.
# items: ATTENTION_ITEMs; tables: int32 block tables; scratch_size: bytes of each thread; window:
# 0 for none; groups: query heads of a KV head; dim, depth: of a head as V and K are read (see
# `padded_dim`); at_...: offsets in a thread's scratch (see `scratch_layout`); cap: 0 for none.
ATTENTION_STEP = Record(
    items=_POINTER, num_items=_I64, tables=_POINTER, scratch=_POINTER, scratch_size=_I64,
    block_size=_I64, window=_I64, heads=_I64, kv_heads=_I64, groups=_I64, head_dim=_I64, dim=_I64,
    depth=_I64, at_o=_I64, at_stats=_I64, at_new=_I64, at_k=_I64, at_v=_I64, scale=_F64, cap=_F64,
)  # fmt: skip

# A work item: a query block (some queries of one row) and one KV head over a range of KV splits.
# token: the first query's index in the step; position: its index in the sequence; rows: of its
# products, num_queries x groups; table: the row's block table, an entry counted from `tables`;
# split_begin..split_end - 1: the item's splits. Where num_items items divide the splits of a query
# block, counter is their common counter, block_begin..block_end - 1 are all splits of the block,
# and partial holds o [rows up to 16s, dim], m [QUERY_ROWS] and l [QUERY_ROWS] of each split,
# partial_bytes each; else counter is 0. members: 0, or the item belongs to a shared-prefix group:
# one split that the single query of each of num_queries rows sees whole; members then points to
# an array of addresses, of one item of each of these rows.
ATTENTION_ITEM = Record(
    token=_I64, num_queries=_I64, rows=_I64, position=_I64, kv_head=_I64, table=_I64,
    split_begin=_I64, split_end=_I64, counter=_POINTER, num_items=_I64, block_begin=_I64,
    block_end=_I64, partial=_POINTER, partial_bytes=_I64, members=_POINTER,
)  # fmt: skip

# The KV split that a thread works on: its keys start..start + count - 1, bytes from word to word
# of K, and keys in a piece of V (0: V is not loaded yet).
ATTENTION_SPLIT = Record(start=_I64, count=_I64, k_stride=_I64, v_keys=_I64)

# A thread's scratch: areas at fixed offsets, then from Q on those of `scratch_layout`.
CONFIG, SPLIT, K_AT, V_AT, STATS, FACTORS, SUMS, S = 0, 64, 128, 1152, 2176, 2432, 2688, 4736
BLOCK_AT = K_AT + 512  # addresses of the split's blocks, of the item's KV head
K_SCALES = S + QUERY_ROWS * SCORE_STRIDE  # right behind S: those of a KV split, float32; then V's
V_SCALES = K_SCALES + SPLIT_KEYS * 4
V_LOGS = V_SCALES + SPLIT_KEYS * 4  # logarithms of the scales of V, for weights in int16
V_BROKEN = V_LOGS + SPLIT_KEYS * 4  # zeros; NaN where a scale of V is
Q = V_BROKEN + 64
RUN = 16  # keys whose codes of a pair of dimensions of K are contiguous
SCALE_BYTES = 4  # of one key or value of a cache of codes
TILE_ROWS = 16  # rows that AMX stores together


def padded_dim(head_dim: int) -> int:
    """Dimensions of a head as stored in the cache."""
    return _round_up(head_dim, 16)


def padded_depth(head_dim: int, tiles: bool) -> int:
    """Dimensions of a head of K as products read it: on AMX 32 at a time."""
    return _round_up(head_dim, 32 if tiles else 16)


def head_bytes(head_dim: int, block_size: int) -> int:
    """Bytes of one KV head in a block of codes: K, V, then a float32 scale for each key of both."""
    return 2 * block_size * (padded_dim(head_dim) + SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class ScratchLayout:
    """Offsets in a thread's scratch that depend on the step; `nbytes`: its total size.

    Q holds queries [rows, depth], each with a scale if they are integers. o [rows, dim] float32 and
    stats (m and l of QUERY_ROWS rows, then of the next) are accumulators; new: o of one KV split
    for QUERY_ROWS rows, whose m and l are at STATS; k, v: keys and values of a split that cannot be
    read in place.
    """

    o: int
    stats: int
    new: int
    k: int
    v: int
    nbytes: int


def scratch_layout(
    dim: int, depth: int, rows: int, block_size: int, itemsize: int
) -> ScratchLayout:
    """For work items of up to `rows` rows; itemsize: bytes of a value of Q."""
    rows = _round_up(rows, QUERY_ROWS)
    o = _round_up(Q + rows * (depth * itemsize + SCALE_BYTES), 64)
    stats = o + rows * dim * 4
    new = stats + rows * 8
    k = new + QUERY_ROWS * dim * 4
    v = k + SPLIT_KEYS * depth * itemsize
    end = v + (SPLIT_KEYS + block_size) * dim * itemsize
    return ScratchLayout(o, stats, new, k, v, _round_up(end, 4096))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# -- fused kernels (see `fused`) ----------------------------------------------------------------

# Strides are bytes from row to row; a residual is contiguous.
RMS_NORM = Arguments(
    "fused:rms_norm",
    counter=_COUNTER, thread=_COUNTER, rows=Kind.ROWS, chunk=Kind.CHUNK, x=_POINTER,
    x_stride=_I64, residual=_POINTER, weight=_POINTER, out=_POINTER, out_stride=_I64, size=_I64,
    eps=_F64,
)  # fmt: skip

# out, squares: float32, of a row's two columns the address of the first row's. count: of the values
# of a whole row.
ROW_SQUARES = Arguments(
    "fused:row_squares",
    counter=_COUNTER, thread=_COUNTER, rows=Kind.ROWS, chunk=Kind.CHUNK, x=_POINTER,
    x_stride=_I64, out=_POINTER, size=_I64,
)  # fmt: skip
DIVIDED_ROW_NORM = Arguments(
    "fused:divided_row_norm",
    counter=_COUNTER, thread=_COUNTER, rows=Kind.ROWS, chunk=Kind.CHUNK, x=_POINTER,
    x_stride=_I64, weight=_POINTER, squares=_POINTER, size=_I64, count=_F64, eps=_F64,
)  # fmt: skip

ADD = Arguments(
    "fused:add",
    counter=_COUNTER, thread=_COUNTER, rows=Kind.ROWS, chunk=Kind.CHUNK, x=_POINTER,
    residual=_POINTER, size=_I64, scale=_F64,
)  # fmt: skip

ACTIVATION = Arguments(
    "fused:activation",
    counter=_COUNTER, thread=_COUNTER, rows=Kind.ROWS, chunk=Kind.CHUNK, x=_POINTER,
    out=_POINTER, size=_I64,
)  # fmt: skip

# Strides are bytes from token to token; half: half of the rotated dimensions.
ROPE_WRITE = Arguments(
    "fused:rope_write",
    counter=_COUNTER, thread=_COUNTER, rows=Kind.ROWS, chunk=Kind.CHUNK, q=_POINTER,
    q_stride=_I64, k=_POINTER, k_stride=_I64, v=_POINTER, v_stride=_I64, cos_sin=_POINTER,
    half=_I64, positions=_POINTER, cache=_POINTER, slots=_POINTER, block_size=_I64, head_dim=_I64,
    heads=_I64, kv_heads=_I64, q_norm=_POINTER, k_norm=_POINTER, eps=_F64,
)  # fmt: skip

ACTIVATIONS = ("silu", "gelu_tanh")  # those that GEMMs of gate over up can apply

# -- GEMM in bfloat16 (see `gemm_bf16`) ---------------------------------------------------------

# Strides are bytes from row to row. bias: float32. k_steps: of 32 along k; blocks: of 32
# columns; columns: of out. A work item is item_rows rows x item_blocks blocks.
GEMM_BF16 = Arguments(
    "gemm_bf16:linear",
    counter=_COUNTER, thread=_COUNTER, x=_POINTER, x_stride=_I64, weights=_POINTER, out=_POINTER,
    out_stride=_I64, bias=_POINTER, rows=Kind.ROWS, k_steps=_I64, blocks=_I64, columns=_I64,
    item_rows=_I64, item_blocks=_I64,
)  # fmt: skip

# -- GEMM of floats on vectors (see `gemm_vectors`) ------------------------------------------------

# Strides are bytes from row to row. bias: float32, of every column of the panels. steps: of 2 along
# k; panels: of 32 columns; item_rows: of a work item, at most GEMM_VECTORS_ROWS and whole tiles;
# activation, out_size: as of WEIGHT_ONLY.
GEMM_VECTORS = Arguments(
    "gemm_vectors:linear",
    counter=_COUNTER, x=_POINTER, x_stride=_I64, weights=_POINTER, out=_POINTER, out_stride=_I64,
    bias=_POINTER, rows=Kind.ROWS, steps=_I64, panels=_I64, item_rows=_I64, activation=_I64,
    out_size=_I64,
)  # fmt: skip
# raw: int64 [panels][32], the address of each row of `depth` values, or 0 for zeros.
PACK_VECTORS = Arguments(
    "gemm_vectors:pack", counter=_COUNTER, panels=_I64, depth=_I64, raw=_POINTER, out=_POINTER
)
GEMM_VECTORS_TALL = 6  # rows of a tile
GEMM_VECTORS_ROWS = 120  # whose sums of two panels take 30 KB of a thread's stack

# -- GEMM in int8 and int4 (see `gemm_int8`) ----------------------------------------------------

# taken, done: rows whose quantization was started and finished; thread: assigns each thread its
# scratch. factors: of int4, [panel][group][16 columns] of (m, o); group: 32s of k in a group.
# q, s, x, out: as in the formulas there; added: int32, to be added to the sums of each column.
GEMM_INT8 = Arguments(
    "gemm_int8:product",
    counter=_COUNTER, taken=_COUNTER, rows=Kind.ROWS, done=_COUNTER, thread=_COUNTER, x=_POINTER,
    x_stride=_I64, in_size=_I64, out=_POINTER, out_size=_I64, weights=_POINTER, scales=_POINTER,
    added=_POINTER, bias=_POINTER, factors=_POINTER, num_groups=_I64, group=_I64, q=_POINTER,
    q_stride=_I64, s=_POINTER, scratch=_POINTER, scratch_size=_I64,
)  # fmt: skip
GEMM_INT8_ROWS = 256  # rows per pair of unpacked panels: 393 KB of q at a width of 1,536

# -- GEMM of weights in groups of codes (see `weight_only`) ---------------------------------------

# taken, done: rows whose preparation was started and finished; thread: assigns each thread its
# scratch. q: rows as they are read, q_stride bytes each; sums: of the groups of a row, float32,
# sums_stride bytes a row. table: the values of codes. group_blocks: blocks of k in a group;
# super_groups: groups that share factors. item_rows: rows of a work item, whole blocks of
# WEIGHT_ONLY_TALL. activation: 0, or 1 plus the index in ACTIVATIONS, of panels of gate and up;
# out_size: columns of out. threads: that work on it, about.
_WEIGHT_ONLY = {
    "counter": _COUNTER, "taken": _COUNTER, "rows": Kind.ROWS, "done": _COUNTER,
    "thread": _COUNTER, "x": _POINTER, "x_stride": _I64, "in_size": _I64, "q": _POINTER,
    "q_stride": _I64, "sums": _POINTER, "sums_stride": _I64, "codes": _POINTER, "terms": _POINTER,
    "factors": _POINTER, "table": _POINTER, "bias": _POINTER, "blocks": _I64,
    "group_blocks": _I64, "super_groups": _I64, "panels": _I64, "item_rows": _I64,
    "activation": _I64, "out": _POINTER, "out_size": _I64, "out_stride": _I64,
    "scratch": _POINTER, "scratch_size": _I64, "threads": _I64,
}  # fmt: skip
WEIGHT_ONLY = Arguments("weight_only:product", **_WEIGHT_ONLY)
# The same on AMX. item_panels: of a work item; chunk_groups: groups of a panel whose weights are in
# the first cache at a time, an even number of blocks.
WEIGHT_ONLY_TILES = Arguments(
    "weight_only_tiles:product", **_WEIGHT_ONLY, item_panels=_I64, chunk_groups=_I64
)
WEIGHT_ONLY_TALL = {16: 8, 8: 6}  # rows multiplied together, by the floats of a vector
WEIGHT_ONLY_SPARE = 8  # rows beyond the last that are read, if memory allows, and not used

# -- programs (see `program`) -------------------------------------------------------------------

# counter: arrivals so far. team: threads; kernels: the list, of (address of a kernel, address of
# its arguments); sched_yield: the address of that function.
PROGRAM = Arguments(
    "program:program",
    counter=_COUNTER, thread=_COUNTER, team=_I64, count=_I64, kernels=_POINTER,
    sched_yield=_POINTER,
)  # fmt: skip

# -- operations of several ranks over shared memory (see `all_reduce`) ---------------------------

# x: contiguous, row_bytes a row; region: this process's address of a SHARED_REGION; sched_yield,
# usleep: the addresses of those functions.
ALL_REDUCE = Arguments(
    "all_reduce:all_reduce",
    counter=_COUNTER, rows=Kind.ROWS, x=_POINTER, out=_POINTER, row_bytes=_I64, region=_POINTER,
    rank=_I64, sched_yield=_POINTER, usleep=_POINTER,
)  # fmt: skip

# The beginning of the shared region; the areas of the ranks follow it from RANK_AREAS on,
# rank_bytes each. aborted: not 0 once a rank is lost; sliced_from: bytes of a piece from which each
# rank sums a slice of it; spins: of a wait, before it offers its processor.
SHARED_REGION = Record(
    aborted=_I64, ranks=_I64, lanes=_I64, slot_bytes=_I64, rank_bytes=_I64, sliced_from=_I64,
    spins=_I64,
)  # fmt: skip
# An area: a mark for each lane, MARK_BYTES apart; at RANK_LOST a word that is not 0 once an
# operation of this rank had no result; from RANK_SLOTS on two slots of slot_bytes for each lane.
RANK_AREAS = RANK_SLOTS = 4096  # a page, so that each rank's memory is near to it
MARK_BYTES = 128  # two cache lines, which are fetched together
LANES = 16
RANK_LOST = LANES * MARK_BYTES
LANE_BYTES = 32768  # of data for each lane but the first

# -- GGUF's block formats (see `gguf`) ----------------------------------------------------------

# chunk: blocks that a thread claims at a time; raw: the stored blocks; out: the values.
GGUF_DECODE = Arguments(
    "gguf:decode",
    counter=_COUNTER, thread=_COUNTER, blocks=_I64, chunk=_I64, raw=_POINTER, out=_POINTER,
)  # fmt: skip

# raw: int64 [rows], the address of each row's blocks; columns: of a row, whole blocks; codes,
# terms, factors: see `weight_only_layout`.
GGUF_PACK = Arguments(
    "gguf_pack:pack",
    counter=_COUNTER, rows=Kind.ROWS, columns=_I64, raw=_POINTER, codes=_POINTER, terms=_POINTER,
    factors=_POINTER,
)  # fmt: skip

# -- layout of values and codes (see `codes_pack`) -------------------------------------------------

# raw: rows of `columns` values, `stride` bytes apart, in groups of `group`; scale, minimum,
# maximum: float32 [rows, groups].
EXTENTS = Arguments(
    "codes_pack:extents",
    counter=_COUNTER, rows=Kind.ROWS, columns=_I64, group=_I64, raw=_POINTER, stride=_I64,
    minimum=_POINTER, maximum=_POINTER,
)  # fmt: skip
CODES_PACK = Arguments(
    "codes_pack:pack",
    counter=_COUNTER, rows=Kind.ROWS, columns=_I64, group=_I64, raw=_POINTER, stride=_I64,
    scale=_POINTER, minimum=_POINTER, codes=_POINTER,
)  # fmt: skip

# -- rows of codes (see `code_rows`) --------------------------------------------------------------

# ids: int64 [rows]; out: out_stride bytes a row; columns: values of a row; blocks: of 16 of them;
# terms_size, factors_size: bytes of a panel; group_blocks: blocks of a group; table: float32, the
# values of codes.
CODE_ROWS = Arguments(
    "code_rows:rows",
    counter=_COUNTER, rows=Kind.ROWS, ids=_POINTER, out=_POINTER, out_stride=_I64, columns=_I64,
    codes=_POINTER, terms=_POINTER, terms_size=_I64, factors=_POINTER, factors_size=_I64,
    table=_POINTER, blocks=_I64, group_blocks=_I64,
)  # fmt: skip

# -- sampling (see `sampling`) ------------------------------------------------------------------

# The status of an item.
OK = 0
NOT_FINITE = 1  # a NaN or +inf among the logits
EMPTY = 2  # every logit is -inf

# Pieces of 64 logits: four vectors of 512 bits. 32 and 128 measured within 10% of it.
PIECE = 64

_SAMPLING = {
    "counter": _COUNTER, "thread": _COUNTER, "count": _I64, "items": _POINTER, "logits": _POINTER,
    "vocab": _I64, "scratch": _POINTER, "scratch_size": _I64, "out_ids": _POINTER,
    "out_values": _POINTER, "out_size": _I64, "logit_bytes": _I64,
}  # fmt: skip
# masks: 0, or int64 [count], for each item 0 or the address of int32 words, one bit for each logit.
DRAW = Arguments("sampling:draw", **_SAMPLING, masks=_POINTER)
LOGPROBS = Arguments("sampling:logprobs", **_SAMPLING)
# rows: int64 [count], of logits; masks: int64 [count], addresses of int32 words, or 0; out: float32
# [count, vocab].
COPIES = Arguments(
    "sampling:copies",
    counter=_COUNTER, count=_I64, rows=_POINTER, masks=_POINTER, logits=_POINTER, vocab=_I64,
    logit_bytes=_I64, out=_POINTER,
)  # fmt: skip

# A row to draw from, and how. token and status are written; for log-probabilities token is
# an input, top_k is how many of the likeliest, and rank and status are written.
SAMPLING_ITEM = Record(
    row=_I64, temperature=_F64, top_p=_F64, min_p=_F64, top_k=_I64, seed=Kind.U64, index=_I64,
    position=_I64, token=_I64, status=_I64, rank=_I64,
)  # fmt: skip
