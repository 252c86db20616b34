"""Triton kernels that draw tokens: the draws of `kernels.sampling.ReferenceSampling`.

Tokens rank by a 64-bit integer that no two of a row share (`_rank`): the logit as an integer of the
same order, then the id. So every filter keeps the ranks from some cut upwards, which a bisection
finds: with counts for top-k, with sums of float64 weights for top-p.

`survey` finds the largest logit of each piece of 64. `spread` does what takes a whole row, with
several programs a row: the race of an item without top-k and top-p, or the sum of all weights.
`draw` looks at the pieces with the largest logits only, and can finish all other items with them,
but for a top-k of more tokens than pieces and a nucleus that does not lie within them.
`draw_from_row` does these from the whole row.
"""

import triton
import triton.language as tl

PIECE = tl.constexpr(64)

# The status of an item (`kernels.sampling`), and what is left to do for it.
OK, NOT_FINITE, EMPTY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
DONE, CUTS = tl.constexpr(0), tl.constexpr(1)

_NAN_KEY = tl.constexpr(0x7FFFFFFF)
_INF_KEY = tl.constexpr(0x7F800000)
_NEG_INF_KEY = tl.constexpr(-0x7F800001)
_NO_KEY = tl.constexpr(-0x80000000)
_LAST_ID = tl.constexpr(0x7FFFFFFF)
# Below every rank.
LEAST_RANK = tl.constexpr(-(2**62))
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)

# Columns of an item as it is copied: those of `kernels.sampling.ITEM`, the seed replaced by the
# state of the random numbers.
FIELDS = tl.constexpr(11)
ROW, TEMPERATURE, TOP_P, MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
TOP_K, STATE = tl.constexpr(4), tl.constexpr(5)


@triton.jit
def _double(address):
    return tl.load(address).to(tl.float64, bitcast=True)


@triton.jit
def _key(x):
    """An int32 that orders as the float32 does; NaN is the largest."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN_KEY)


@triton.jit
def _logit(key):
    """The inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _rank(key, token, SPAN: tl.constexpr):
    """The larger, the likelier; of equal logits that of the lowest id. token < SPAN."""
    return key.to(tl.int64) * SPAN - token


@triton.jit
def _floor(SPAN: tl.constexpr):
    """The least rank of a logit of -inf."""
    return tl.full((), _NEG_INF_KEY - 1, tl.int64) * SPAN + 1


@triton.jit
def survey(maxima, logits, vocab, PIECES: tl.constexpr, TILE: tl.constexpr):
    """The key of the largest logit of each piece, into maxima [rows, PIECES].

    Grid: (rows, PIECES / TILE). logits: [rows, vocab].
    """
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=0.0).to(tl.float32)
    key = tl.where(token < vocab, _key(x), _NO_KEY)
    tl.store(maxima + row * PIECES + piece, tl.max(key, 1))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _bits(state, token):
    """Output `token` of SplitMix64: 53 bits."""
    return (_mix(state + (token + 1).to(tl.uint64) * _GOLDEN) >> 11).to(tl.int64)


@triton.jit
def _weight(x, top, temperature):
    """Unnormalized probability in float64: that of the likeliest token, with logit top, is 1."""
    gap = x.to(tl.float64) - top.to(tl.float64)
    return tl.exp(tl.maximum(gap, -800.0 * temperature) / temperature)


@triton.jit
def _time(token, x, top, temperature, state):
    """The arrival of one token in the race: -log1p(-v) / weight, in float64."""
    v = (_bits(state, token).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    rest = 1.0 - v
    # log1p(-v) = -v log(rest) / (1 - rest), in which the rounding of `rest` cancels (Kahan).
    ratio = v / tl.where(rest < 1.0, 1.0 - rest, v)
    exponential = tl.where(rest < 1.0, -tl.log(tl.maximum(rest, 1e-300)) * ratio, v)
    weight = _weight(x, top, temperature)
    return tl.where(weight > 0, exponential / tl.maximum(weight, 1e-290), float("inf"))


@triton.jit
def _rough_time(token, x, top, temperature, state):
    """`_time` in float32, with an error below 1 / 2,000; infinite for what cannot win.

    That is a token e^-60 times as likely as the likeliest, since e^-38 < E < 38 for each.
    """
    bits = _bits(state, token)
    v = (2 * bits + 1).to(tl.float32) * 5.551115123125783e-17
    rest = (18014398509481983 - 2 * bits).to(tl.float32) * 5.551115123125783e-17
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.1, series, -tl.log(rest))
    gap = tl.maximum(x - top, -60.0 * temperature)
    weight = tl.exp(gap / temperature)
    return tl.where(gap > -60.0 * temperature, exponential / weight, float("inf"))


@triton.jit
def _race(best, winner, token, x, kept, top, temperature, state):
    """(time, id) of the first to arrive: `winner`, which took `best`, or one of `kept`.

    Those that may be first by their rough times, which are one or two, take the exact one.
    """
    narrow = tl.minimum(tl.maximum(temperature, 1e-30), 1e30).to(tl.float32)
    rough = tl.where(kept, _rough_time(token, x, top, narrow, state), float("inf"))
    limit = tl.minimum(tl.min(rough), best.to(tl.float32)) * 1.001
    left = (rough <= limit) & (rough < float("inf"))
    while tl.max(left.to(tl.int32)) > 0:
        first = tl.min(tl.where(left, token, _LAST_ID))
        logit = tl.max(tl.where(token == first, x, float("-inf")))
        time = _time(first, logit, top, temperature, state)
        ahead = time < best
        best, winner = tl.where(ahead, time, best), tl.where(ahead, first, winner)
        left = left & (token != first)
    return best, winner


@triton.jit
def _row_tile(row, start, vocab, SPAN: tl.constexpr, TILE: tl.constexpr):
    """(ids, logits, ranks) from `start` on; the least rank where the row has ended."""
    token = start + tl.arange(0, TILE)
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return token, x, tl.where(token < vocab, _rank(_key(x), token, SPAN), LEAST_RANK)


@triton.jit
def _between(
    rank, weight, row, vocab, low, high, top, temperature,
    WEIGHS: tl.constexpr, WHOLE: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(count, sum of weights) of the tokens with low <= rank < high.

    Of a tile of ranks and weights; or, WHOLE, of a row in memory. WEIGHS: otherwise no sum.
    """
    if WHOLE:
        count = 0
        mass = tl.zeros((), tl.float64)
        for start in range(0, vocab, TILE):
            _, x, at = _row_tile(row, start, vocab, SPAN, TILE)
            inside = (at >= low) & (at < high)
            found = tl.sum(inside.to(tl.int32))
            count += found
            if WEIGHS and found > 0:
                mass += tl.sum(tl.where(inside, _weight(x, top, temperature), 0.0))
    else:
        inside = (rank >= low) & (rank < high)
        count = tl.sum(inside.to(tl.int32))
        mass = tl.zeros((), tl.float64)
        if WEIGHS:
            mass = tl.sum(tl.where(inside, weight, 0.0))
    return count, mass


@triton.jit
def _cut(
    rank, weight, row, vocab, low, high, count, goal, total, share, top, temperature,
    WEIGHS: tl.constexpr, WHOLE: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The largest rank from which upwards tokens are `goal`; WEIGHS: have `share` of `total`.

    Between low, which has that, and high, which has no tokens above it; count: of those between.
    """
    above, mass_above = 0, tl.zeros((), tl.float64)
    while (low + 1 < high) & (count > above + 1):
        middle = (low + high) >> 1
        found, mass = _between(
            rank, weight, row, vocab, middle, high, top, temperature, WEIGHS, WHOLE, SPAN, TILE
        )
        found += above
        mass += mass_above
        if WEIGHS:
            reached = mass / total >= share
        else:
            reached = found >= goal
        low, count = tl.where(reached, middle, low), tl.where(reached, found, count)
        high, above = tl.where(reached, high, middle), tl.where(reached, above, found)
        mass_above = tl.where(reached, mass_above, mass)
    return low


@triton.jit
def _least_likely(top_key, top, temperature, min_p):
    """The least key of the tokens that are min_p times as likely as the likeliest."""
    low, high = tl.full((), _NEG_INF_KEY - 1, tl.int64), top_key.to(tl.int64)
    while low + 1 < high:
        middle = (low + high) >> 1
        inside = _weight(_logit(middle.to(tl.int32)), top, temperature) >= min_p
        low, high = tl.where(inside, low, middle), tl.where(inside, middle, high)
    return high


@triton.jit
def _select(places, piece_key, first, last, FEW: tl.constexpr, PIECES: tl.constexpr):
    """The FEW pieces with the largest keys into `places`, by rising number.

    Returns the least of these keys. first <= every key <= last.
    """
    piece = tl.arange(0, PIECES)
    low, high = first.to(tl.int64), last.to(tl.int64) + 1
    while low + 1 < high:
        middle = (low + high) >> 1
        enough = tl.sum((piece_key >= middle).to(tl.int32)) >= FEW
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    above, equal = piece_key > low, piece_key == low
    equals = tl.cumsum(equal.to(tl.int32), 0)
    taken = above | (equal & (equals + tl.sum(above.to(tl.int32)) <= FEW))
    tl.store(places + tl.cumsum(taken.to(tl.int32), 0) - 1, piece, mask=taken)
    tl.debug_barrier()  # all threads of the program read them
    return low.to(tl.int32)


@triton.jit
def spread(
    values, winners, logits, maxima, items, vocab,
    PIECES: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of an item without top-k, in each part of SIZE tokens: the first to arrive, its time in
    `values` and its id in `winners` [items, PARTS]; or with top-p the sum of weights in `values`.

    Grid: (items, PARTS).
    """
    number, part = tl.program_id(0), tl.program_id(1)
    item = items + number * FIELDS
    at, top_k = tl.load(item + ROW), tl.load(item + TOP_K)
    temperature, top_p, min_p = (
        _double(item + TEMPERATURE), _double(item + TOP_P), _double(item + MIN_P)
    )  # fmt: skip
    top_key = tl.max(tl.load(maxima + at * PIECES + tl.arange(0, PIECES)), 0)
    finite = (top_key < _INF_KEY) & (top_key > _NEG_INF_KEY)
    if finite & (temperature > 0) & ((top_k <= 0) | (top_k >= vocab)):
        row, top = logits + at * vocab, _logit(top_key)
        begin = part * SIZE
        value = tl.zeros((), tl.float64)
        if top_p < 1.0:
            for start in range(0, SIZE, TILE):
                _, x, _ = _row_tile(row, begin + start, vocab, PIECES * PIECE, TILE)
                value += tl.sum(_weight(x, top, temperature))
        else:
            low = _floor(PIECES * PIECE)
            if min_p > 0.0:
                key = _least_likely(top_key, top, temperature, min_p)
                low = (key - 1) * (PIECES * PIECE) + 1
            state = tl.load(item + STATE).to(tl.uint64, bitcast=True)
            value, winner = tl.full((), float("inf"), tl.float64), tl.full((), -1, tl.int32)
            for start in range(0, SIZE, TILE):
                token, x, rank = _row_tile(row, begin + start, vocab, PIECES * PIECE, TILE)
                if tl.max(rank, 0) >= low:
                    value, winner = _race(
                        value, winner, token, x, rank >= low, top, temperature, state
                    )
            tl.store(winners + number * PARTS + part, winner)
        tl.store(values + number * PARTS + part, value)


@triton.jit
def draw(
    out, plans, places, logits, maxima, values, winners, items, vocab,
    PIECES: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A token for each item: the first of `spread`, or of the pieces with the largest logits.

    out: [items, 2], (token, status). plans: [items, 2], (what is left to do, the rank from which
    it is done). places: scratch [items, FEW]. FEW <= PIECES. maxima: of `survey`. Grid: (items,).
    """
    number = tl.program_id(0)
    item = items + number * FIELDS
    at = tl.load(item + ROW)
    row = logits + at * vocab
    piece = tl.arange(0, PIECES)
    piece_key = tl.load(maxima + at * PIECES + piece)
    top_key = tl.max(piece_key, 0)
    status = tl.where(top_key >= _INF_KEY, NOT_FINITE, tl.where(top_key == _NEG_INF_KEY, EMPTY, OK))
    best_piece = tl.argmax(piece_key, 0, tie_break_left=True)
    token = best_piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    winner = tl.min(tl.where((token < vocab) & (_key(x) == top_key), token, _LAST_ID), 0)
    temperature, top_k = _double(item + TEMPERATURE), tl.load(item + TOP_K)
    plan, low = tl.full((), DONE, tl.int32), tl.full((), LEAST_RANK, tl.int64)
    if (status == OK) & (temperature > 0) & (top_k != 1):
        part = number * PARTS + tl.arange(0, PARTS)
        filters_k = (top_k > 0) & (top_k < vocab)
        if filters_k | (_double(item + TOP_P) < 1.0):
            bound, chosen = top_key, piece
            if FEW < PIECES:
                bound = _select(places + number * FEW, piece_key, tl.min(piece_key, 0), top_key,
                                FEW, PIECES)  # fmt: skip
                chosen = tl.load(places + number * FEW + tl.arange(0, FEW))
            total = tl.zeros((), tl.float64)
            if not filters_k:
                total = tl.sum(tl.load(values + part), 0)
            plan, low, winner = _draw_from_few(
                row, vocab, item, chosen, bound, top_key, temperature, filters_k, total, FEW, PIECES
            )
        else:
            time = tl.load(values + part)
            first = tl.where(time == tl.min(time, 0), tl.load(winners + part), _LAST_ID)
            winner = tl.min(first, 0)
    tl.store(out + number * 2, tl.where(status == OK, winner, -1).to(tl.int64))
    tl.store(out + number * 2 + 1, (status + tl.zeros((), tl.int64)))
    tl.store(plans + number * 2, (plan + tl.zeros((), tl.int64)))
    tl.store(plans + number * 2 + 1, low)


@triton.jit
def _draw_from_few(
    row, vocab, item, chosen, bound, top_key, temperature, filters_k, total,
    FEW: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(what is left to do, from which rank, token) of an item, given the `chosen` pieces [FEW].

    They have every token of a key above `bound`, and the FEW of the highest rank. total: the sum
    of the row's weights, unless `filters_k`.
    """
    SPAN: tl.constexpr = PIECES * PIECE
    top = _logit(top_key)
    state = tl.load(item + STATE).to(tl.uint64, bitcast=True)
    top_p, min_p = _double(item + TOP_P), _double(item + MIN_P)
    token = chosen[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    rank = tl.where(token < vocab, _rank(_key(x), token, SPAN), LEAST_RANK)
    certain = _floor(SPAN)  # from which rank on all tokens are here
    if FEW < PIECES:
        certain = bound.to(tl.int64) * SPAN + 1
    low, high = _floor(SPAN), top_key.to(tl.int64) * SPAN + 1
    plan = tl.full((), DONE, tl.int32)
    if filters_k:
        top_k = tl.load(item + TOP_K)
        if (top_k <= FEW) | (FEW == PIECES):
            count = tl.sum((rank >= low).to(tl.int32))
            low = _cut(rank, x, row, vocab, low, high, count, top_k, 1.0, 1.0, top, temperature,
                       False, False, SPAN, PIECE)  # fmt: skip
            certain = low
        else:
            plan = CUTS
    if (top_p < 1.0) & (plan == DONE):
        weight = tl.where(rank >= low, _weight(x, top, temperature), 0.0)
        total = tl.where(filters_k, tl.sum(weight), total)
        count, mass = _between(rank, weight, row, vocab, certain, high, top, temperature,
                               True, False, SPAN, PIECE)  # fmt: skip
        if (mass / total >= top_p) | (certain <= low):
            low = _cut(rank, weight, row, vocab, certain, high, count, 0, total, top_p, top,
                       temperature, True, False, SPAN, PIECE)  # fmt: skip
        else:
            plan = CUTS
    if min_p > 0.0:
        least_likely = _least_likely(top_key, top, temperature, min_p)
        low = tl.maximum(low, (least_likely - 1) * SPAN + 1)
    winner = tl.full((), -1, tl.int32)
    if plan == DONE:
        best = tl.full((), float("inf"), tl.float64)
        _, winner = _race(best, winner, token, x, rank >= low, top, temperature, state)
    return plan, low, winner


@triton.jit
def draw_from_row(
    out, plans, logits, maxima, items, vocab, PIECES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Draws the tokens that `draw` left. Grid: (items,)."""
    number = tl.program_id(0)
    plan, low = tl.load(plans + number * 2), tl.load(plans + number * 2 + 1)
    if plan == CUTS:
        item = items + number * FIELDS
        at = tl.load(item + ROW)
        row = logits + at * vocab
        top_key = tl.max(tl.load(maxima + at * PIECES + tl.arange(0, PIECES)), 0)
        top, temperature = _logit(top_key), _double(item + TEMPERATURE)
        floor = _cut_row(row, vocab, item, top_key, temperature, PIECES * PIECE, TILE)
        low = tl.maximum(low, floor)
        state = tl.load(item + STATE).to(tl.uint64, bitcast=True)
        best, winner = tl.full((), float("inf"), tl.float64), tl.full((), -1, tl.int32)
        for start in range(0, vocab, TILE):
            token, x, rank = _row_tile(row, start, vocab, PIECES * PIECE, TILE)
            kept = rank >= low
            if tl.max(kept.to(tl.int32), 0) > 0:
                best, winner = _race(best, winner, token, x, kept, top, temperature, state)
        tl.store(out + number * 2, winner.to(tl.int64))


@triton.jit
def _cut_row(
    row, vocab, item, top_key, temperature, SPAN: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The rank from which an item's top-k and top-p keep the tokens of a row."""
    top, top_k, top_p = _logit(top_key), tl.load(item + TOP_K), _double(item + TOP_P)
    low, high = _floor(SPAN), top_key.to(tl.int64) * SPAN + 1
    if (top_k > 0) & (top_k < vocab):
        low = _cut(low, low, row, vocab, low, high, vocab, top_k, 1.0, 1.0, top, temperature,
                   False, True, SPAN, TILE)  # fmt: skip
    if top_p < 1.0:
        count, total = _between(low, low, row, vocab, low, high, top, temperature,
                                True, True, SPAN, TILE)  # fmt: skip
        low = _cut(low, low, row, vocab, low, high, count, 0, total, top_p, top, temperature,
                   True, True, SPAN, TILE)  # fmt: skip
    return low


@triton.jit(do_not_specialize=["count"])
def take_drawn(ids, drawn, count, TILE: tl.constexpr):
    """Replaces -1 - i in ids, int64 [count], by the token of draw i, drawn[i, 0]: int64 [draws, 2];
    by 0 where nothing was drawn, since the model must be able to embed it. Grid: (tiles,)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    token = tl.load(ids + at, mask=inside, other=0)
    open_ = inside & (token < 0)
    found = tl.load(drawn + 2 * (-1 - token), mask=open_, other=0)
    tl.store(ids + at, tl.maximum(found, 0), mask=open_)
