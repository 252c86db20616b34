"""What kernels and their callers agree on: argument slots, the items of attention, scratch.

Free of Numba, so that compiled kernels can be called without importing it.
"""

# -- attention (see `attention`) ----------------------------------------------------------------

KEYS = 256  # keys of a piece: K and V of one head of 64 take 64 KB in bfloat16
SUB = 32  # rows of a product; 32 x KEYS scores take 32 KB
S_STRIDE = KEYS * 4 + 64  # one line more, so that rows do not fall on the same cache sets

# Byte offsets of the arguments, 8 bytes each. SCALE and CAP (0: none) are float64; WINDOW 0: none;
# Q_STRIDE is bytes from token to token; TABLES are int32; SCRATCH_SIZE is bytes of each thread.
# The first six change with every call, the others with every step: two formats of `struct`.
(
    COUNTER, THREAD, Q, Q_STRIDE, CACHE, OUT,
    ITEMS, NUM_ITEMS, TABLES, SCRATCH, SCRATCH_SIZE, PARTIAL, BLOCK_SIZE, HEAD_DIM, HEADS,
    KV_HEADS, WINDOW, SCALE, CAP,
) = range(0, 19 * 8, 8)  # fmt: skip
CALL_FORMAT, STEP_FORMAT = "<6q", "<11q2d"

# Byte offsets in an item, 8 bytes each. TOKEN: its first query in the step; POSITION: that of
# the first query in its sequence; TABLE: the row's block table, an entry counted from TABLES;
# pieces FIRST..LAST-1. Where a query's pieces are shared by SHARES items, COUNT is the address
# of their common counter, GROUP_FIRST..GROUP_LAST-1 all their pieces, and SHARED (in float32
# from the argument PARTIAL) where o [rows up to 16s, dim], m [SUB], l [SUB] of each piece are
# kept; else COUNT is 0. MEMBERS: 0; or the item is one piece that the one query of each of QUERIES
# rows sees whole, and MEMBERS the address of the addresses of an item of each of these.
(
    TOKEN, QUERIES, POSITION, KV_HEAD, TABLE, FIRST, LAST, COUNT, SHARES,
    GROUP_FIRST, GROUP_LAST, SHARED, MEMBERS,
) = range(0, 13 * 8, 8)  # fmt: skip
ITEM_SLOTS = 13

# A thread's scratch: fixed parts, then at REST those that depend on the shape.
CONFIG, K_AT, V_AT, STATS, FACTORS, SUMS, S = 0, 64, 1088, 2112, 2368, 2624, 4672
K_SCALES = S + SUB * S_STRIDE  # those of a piece, float32; then those of V
V_SCALES = K_SCALES + KEYS * 4
REST = V_SCALES + KEYS * 4
RUN = 16  # keys of a cache of codes whose K lies together
SCALE_BYTES = 4  # of one key or value of a cache of codes


def padded_dim(head_dim: int) -> int:
    """Dimensions of a head as they lie in the cache."""
    return -(-head_dim // 16) * 16


def head_bytes(head_dim: int, block_size: int) -> int:
    """Bytes of one KV head in a block of codes: K, V, then a float32 scale for each key of both."""
    return 2 * block_size * (padded_dim(head_dim) + SCALE_BYTES)


def scratch_bytes(head_dim: int, block_size: int, rows: int, itemsize: int) -> int:
    """Bytes of scratch of one thread for items of up to `rows` rows (queries x groups)."""
    dim, rows = -(-head_dim // 32) * 32, -(-rows // SUB) * SUB
    q_and_sums = rows * dim * (itemsize + 4) + rows * 8
    gathered = 2 * KEYS * dim * itemsize + block_size * dim * itemsize
    return (REST + q_and_sums + SUB * dim * 4 + gathered + 4095) // 4096 * 4096


# -- fused kernels (see `fused`) ----------------------------------------------------------------

# All begin with the counter, a slot not used, ROWS, and CHUNK: rows taken at a time. Addresses
# may be 0 where something is absent. N_: rms_norm, A_: activation, R_: rope_write.
ROWS, CHUNK = 16, 24
N_X, N_RESIDUAL, N_WEIGHT, N_OUT, N_SIZE, N_EPS = range(32, 80, 8)
NORM_FORMAT = "<9qd"
A_X, A_OUT, A_SIZE = range(32, 56, 8)
ACTIVATION_FORMAT = "<7q"
(
    R_Q, R_Q_STRIDE, R_K, R_K_STRIDE, R_V, R_V_STRIDE, R_COS_SIN, R_HALF, R_POSITIONS, R_CACHE,
    R_SLOTS, R_BLOCK_SIZE, R_HEAD_DIM, R_HEADS, R_KV_HEADS, R_Q_NORM, R_K_NORM, R_EPS,
) = range(32, 32 + 18 * 8, 8)  # fmt: skip
ROPE_FORMAT = "<21qd"

# -- dense products (see `gemm_bf16`) -----------------------------------------------------------

# The counter, a slot not used, x and its bytes from row to row, W, out and its bytes from row to
# row, bias (float32, or 0), rows, steps of 32 along k, blocks of 32 columns, columns of out; an
# item is TALL rows x WIDE blocks.
(
    L_X, L_X_STRIDE, L_W, L_OUT, L_OUT_STRIDE, L_BIAS, L_ROWS, L_TURNS, L_BLOCKS, L_COLUMNS,
    L_TALL, L_WIDE,
) = range(16, 16 + 12 * 8, 8)  # fmt: skip
LINEAR_FORMAT = "<14q"

# -- programs (see `program`) -------------------------------------------------------------------

# Arrivals so far, a slot not used, threads of the team, kernels in the list, the list (address
# of the kernel, address of its arguments), and the address of sched_yield.
P_TEAM, P_COUNT, P_KERNELS, P_YIELD = range(16, 16 + 4 * 8, 8)
PROGRAM_FORMAT = "<6q"

# -- quantized products (see `gemm_int8`) -------------------------------------------------------

# TAKEN, DONE: rows that a thread has begun and ended to round; THREAD gives each its scratch.
# FACTORS: of int4, [panel][group][16 columns] of (m, o); GROUP: 32s of k in a group. Q, S, X, OUT
# as in the formulas there; ADDED: int32, to be added to the sums of each column.
Q_TAKEN = 8
(
    Q_DONE, Q_THREAD, Q_X, Q_X_STRIDE, Q_IN, Q_OUT, Q_OUT_SIZE, Q_WEIGHTS, Q_SCALES, Q_ADDED,
    Q_BIAS, Q_FACTORS, Q_NUM_GROUPS, Q_GROUP, Q_Q, Q_Q_STRIDE, Q_S, Q_SCRATCH, Q_SCRATCH_SIZE,
) = range(24, 24 + 19 * 8, 8)  # fmt: skip
QUANT_FORMAT = "<22q"
Q_ROWS = 256  # rows for which a pair of panels is held: 393 KB of q at 1,536 wide

# -- sampling (see `sampling`) ------------------------------------------------------------------

# The status of an item.
OK = 0
NOT_FINITE = 1  # a NaN or +inf among the logits
EMPTY = 2  # every logit is -inf

# Pieces of 64 logits: four vectors of 512 bits. 32 and 128 measured within 10% of it.
PIECE = 64

# The arguments, then the fields of an item (`sampling_call.ITEM`).
(
    S_COUNTER, S_THREAD, S_COUNT, S_ITEMS, S_LOGITS, S_VOCAB, S_SCRATCH, S_SCRATCH_SIZE, S_OUT_IDS,
    S_OUT_VALUES, S_OUT_SIZE, S_LOGIT_BYTES,
) = range(0, 12 * 8, 8)  # fmt: skip
SAMPLING_FORMAT = "<12q"
(
    S_ROW, S_TEMPERATURE, S_TOP_P, S_MIN_P, S_TOP_K, S_SEED, S_INDEX, S_POSITION, S_TOKEN,
    S_STATUS, S_RANK,
) = range(0, 11 * 8, 8)  # fmt: skip
S_ITEM_BYTES = 11 * 8
