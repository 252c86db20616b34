"""Numba kernels that map rows of logits to tokens and log-probabilities, row by row.

No function sorts a vocabulary. One pass over a row finds its maximum and the maximum of each
piece of 64 logits; those few maxima give a threshold above which the wanted tokens must be, and
only pieces that reach it are scanned again. Where that fails (a wide nucleus, a large k), the
token is drawn from the whole row: if it is in the kept set, it is also the winner within that
set; if not, which is rare, the set is computed from the whole row by bisection.

**Order.** Everywhere tokens rank by logit, the largest first, and equal logits by id, the lowest
first. So the argmax takes the lowest id, top-k keeps exactly k tokens, and top-p the shortest
prefix of that order whose mass reaches p. Logits are compared as integers of the same order
(`_key`), which makes exact maxima and thresholds vectorize; -0.0 counts as 0.0.

**Draw.** Token i of the kept set wins with probability p_i when E_i / p_i is the smallest and the
E_i are independent, exponentially distributed ("exponential race", equivalent to the Gumbel-max
trick). E_i = -log1p(-v_i), where v_i in (0, 1) is a hash of (seed, choice, position, i): the
output i of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014, with their mixing constants, Stafford's variant 13), started at a state that is
mixed from the other three. As E_i >= v_i, most tokens are ruled out by one comparison and
only those that might win take a logarithm, in float64.
"""

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.abi import EMPTY, NOT_FINITE, OK
from octavo.kernels.cpu.simd import getd, geti, seti, take

_CALL, _ITEM = abi.DRAW.offset, abi.SAMPLING_ITEM.offset
_COPY = abi.COPIES.offset
_ITEM_BYTES = abi.SAMPLING_ITEM.nbytes
_PIECE = abi.PIECE
# A nucleus or top-k is first searched for in this many pieces, those with the largest maxima.
_FEW = 128

_FLIP = np.int32(0x7FFFFFFF)
_INF_KEY = np.int32(0x7F800000)
_NEG_INF_KEY = np.int32(-0x7F800001)

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # short enough for n * high to be exact
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_FLOOR = np.float32(-87.0)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
# Taylor's coefficients 1/k!; on |r| <= ln2 / 2 the remainder is below half a unit of float32.
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / math.factorial(k)) for k in (2, 3, 4, 5, 6))

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_S11, _S40, _U1 = np.uint64(11), np.uint64(40), np.uint64(1)
_TO_24 = np.float32(2.0**-24)
# Slack for the rounding of float32, wherever a comparison may only rule out, never decide.
_SLACK = np.float32(1.0001)
_NO_COUNT = np.int32(0)


# Without Numba's memory runtime, which is not there when compiled code runs later: no function
# may create or return an array, so lists are in a thread's scratch and functions return counts.
# Nothing but kernels calls them, so they need no wrappers, which would double the compile time.
_options: Any = {
    "error_model": "numpy", "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
jit: Any = numba.njit(**_options)
# Sums may be split into lanes, in an order fixed at compile time; nothing else is relaxed.
_jit_sum: Any = numba.njit(fastmath={"reassoc", "nsz"}, **_options)


def _view(kind: Any) -> Any:
    """A function (address, size) -> array over memory that is there already."""

    @intrinsic
    def view(context, address, size):
        array = types.Array(kind, 1, "C")

        def code(context, builder, signature, values):
            made = context.make_array(array)(context, builder)
            step = context.get_constant(types.intp, kind.bitwidth // 8)
            data = builder.inttoptr(values[0], made.data.type)
            populate_array(made, data, [values[1]], [step], step, None)
            return made._getvalue()

        return array(types.int64, types.int64), code

    return view


_floats, _doubles = _view(types.float32), _view(types.float64)
_shorts, _ints, _longs = _view(types.int16), _view(types.int32), _view(types.int64)


@jit
def _key(x):
    """An int32 that orders as the float32 does; NaN lies beyond both infinities."""
    bits = np.float32(x + _ZERO).view(np.int32)  # -0.0 becomes 0.0
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & _FLIP))


@jit
def _float(key):
    """The inverse of `_key`."""
    return np.int32(key ^ np.int32(np.int32(key >> np.int32(31)) & _FLIP)).view(np.float32)


@jit
def _exp(x):
    """e**x in float32 for x <= 0, plain arithmetic so that it vectorizes; relative error < 3e-7.

    Below -87 it stays at e**-87 = 1.6e-38, which no sum over a vocabulary notices.
    """
    x = x if x > _EXP_FLOOR else _EXP_FLOOR
    n = np.int32(x * _LOG2E - _HALF)  # rounds to nearest, as x <= 0
    whole = np.float32(n)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    return p * np.int32(np.int32(n + np.int32(127)) << np.int32(23)).view(np.float32)


@jit
def _scale(temperature):
    return np.float32(min(1.0 / temperature, 1e30))


@jit
def _mix(z):
    z = (z ^ (z >> _S30)) * _MIX_1
    z = (z ^ (z >> _S27)) * _MIX_2
    return z ^ (z >> _S31)


@jit
def _state(seed, index, position):
    """The SplitMix64 state of one draw; each of the three is mixed in by a full round."""
    state = _mix(np.uint64(seed) + _GOLDEN)
    state = _mix(state + _GOLDEN * (np.uint64(index) + _U1))
    return _mix(state + _GOLDEN * (np.uint64(position) + _U1))


@jit
def _step(state, token):
    """SplitMix64's counter at a token id."""
    return state + (np.uint64(token) + _U1) * _GOLDEN


@jit
def _time(bits, logit, top, temperature):
    """A token's arrival in the race, E / p, in float64; `top` is the largest logit."""
    weight = math.exp((np.float64(logit) - np.float64(top)) / temperature)
    if weight == 0.0:
        return np.inf
    return -math.log1p(-(np.float64(bits >> _S11) + 0.5) * 2.0**-53) / weight


# Inner loops over one piece: a slice of known start is what lets LLVM vectorize them.
@jit
def _bounds(piece):
    high, low = _NEG_INF_KEY, _INF_KEY
    for i in range(piece.size):
        key = _key(piece[i])
        high = max(high, key)
        low = min(low, key)
    return high, low


@_jit_sum
def _piece_count(piece, low):
    count = _NO_COUNT
    for i in range(piece.size):
        count = np.int32(count + np.int32(_key(piece[i]) >= low))
    return count


@_jit_sum
def _piece_mass(piece, top, scale, low):
    mass = _ZERO
    for i in range(piece.size):
        weight = _exp((piece[i] - top) * scale)
        mass += weight if _key(piece[i]) >= low else _ZERO
    return mass


@_jit_sum
def _piece_hits(piece, counter, top, scale, least):
    """How many tokens might arrive before `least`: E >= v, and 24 bits of v bound v from below."""
    bound = np.float32(least) * _SLACK
    hits = _NO_COUNT
    for i in range(piece.size):
        bits = _mix(counter + np.uint64(i) * _GOLDEN)
        soonest = np.float32(np.int32(bits >> _S40)) * _TO_24
        hits = np.int32(hits + np.int32(soonest <= _exp((piece[i] - top) * scale) * bound))
    return hits


@jit
def _survey(row, tops):
    """The key of each piece's largest logit into `tops`; (status, largest key, its id)."""
    best, worst, at = _NEG_INF_KEY, _INF_KEY, 0
    for n in range(tops.size):
        high, low = _bounds(row[n * _PIECE : (n + 1) * _PIECE])
        tops[n] = high
        worst = min(worst, low)
        if high > best:
            best, at = high, n * _PIECE
    if worst < _NEG_INF_KEY or best >= _INF_KEY:
        return NOT_FINITE, best, -1
    if best == _NEG_INF_KEY:
        return EMPTY, best, -1
    while _key(row[at]) != best:
        at += 1
    return OK, best, at


@_jit_sum
def _mass(row, top, temperature, low):
    """Sum of exp((logit - top) / temperature) over the tokens of a key of at least `low`."""
    scale = _scale(temperature)
    mass = 0.0
    for begin in range(0, row.size, _PIECE):
        mass += np.float64(_piece_mass(row[begin : begin + _PIECE], top, scale, low))
    return mass


@_jit_sum
def _count_from(keys, low):
    count = _NO_COUNT
    for i in range(keys.size):
        count = np.int32(count + np.int32(keys[i] >= low))
    return count


@_jit_sum
def _mass_from(keys, weights, low):
    mass = 0.0
    for i in range(keys.size):
        mass += np.float64(weights[i] if keys[i] >= low else _ZERO)
    return mass


@jit
def _kth(keys, k):
    """The k-th largest of `keys` (1 <= k <= size), by bisection."""
    low, high = np.int64(_NEG_INF_KEY), np.int64(_INF_KEY)
    while high - low > 1:
        middle = (low + high) >> 1
        if _count_from(keys, np.int32(middle)) >= k:
            low = middle
        else:
            high = middle
    return np.int32(low)


@jit
def _reaching(keys, weights, target):
    """The largest key from which upward the weights sum to at least `target`."""
    low, high = np.int64(_NEG_INF_KEY), np.int64(_INF_KEY)
    while high - low > 1:
        middle = (low + high) >> 1
        if _mass_from(keys, weights, np.int32(middle)) >= target:
            low = middle
        else:
            high = middle
    return np.int32(low)


@jit
def _gather(row, scratch, low):
    """Keys and ids of every logit whose key is at least `low`, by rising id; how many."""
    tops, keys, ids, _ = scratch
    count = 0
    for n in range(tops.size):
        if tops[n] >= low:
            for i in range(n * _PIECE, min((n + 1) * _PIECE, row.size)):
                key = _key(row[i])
                keys[count], ids[count] = key, i  # kept only if the next line moves on
                count += np.int64(key >= low)
    return count


@jit
def _keep(keys, ids, low, ties):
    """Move what lies above `low`, and the first `ties` that equal it, to the front; how many."""
    count = 0
    for i in range(keys.size):
        if keys[i] > low or (keys[i] == low and ties > 0):
            ties -= np.int64(keys[i] == low)
            keys[count], ids[count] = keys[i], ids[i]
            count += 1
    return count


@jit
def _largest(row, scratch, k):
    """Exactly the k first of the order (1 <= k <= V) to the front of the lists, by rising id."""
    tops, keys, ids, _ = scratch
    # As k pieces have a maximum of at least the k-th maximum, so have k logits.
    count = _gather(row, scratch, _kth(tops, k) if k < tops.size else _NEG_INF_KEY)
    if count > k:
        keys, ids = keys[:count], ids[:count]
        low = _kth(keys, k)
        _keep(keys, ids, low, k - _count_from(keys, np.int32(low + 1)))


@jit
def _weigh(keys, weights, top, temperature):
    """Unnormalized probabilities in float32; the likeliest token's is 1."""
    scale = _scale(temperature)
    for i in range(keys.size):
        weights[i] = _exp((_float(keys[i]) - top) * scale)


@jit
def _top_p(keys, ids, weights, mass):
    """Keep the shortest prefix of the order whose weights sum to at least `mass`; how many."""
    low = _reaching(keys, weights, mass)
    above = _mass_from(keys, weights, np.int32(low + 1))
    each = 0.0
    for i in range(keys.size):
        if keys[i] == low:
            each = np.float64(weights[i])
            break
    ties = max(1.0, math.ceil((mass - above) / each)) if each > 0 else 1.0
    return _keep(keys, ids, low, np.int64(min(ties, np.float64(keys.size))))


@jit
def _min_p(keys, ids, top, temperature, share):
    """Keep the tokens at least `share` times as likely as the likeliest; how many."""
    count = 0
    for i in range(keys.size):
        gap = np.float64(_float(keys[i])) - np.float64(top)
        if math.exp(gap / temperature) >= share:
            keys[count], ids[count] = keys[i], ids[i]
            count += 1
    return count


@jit
def _min_p_bound(top, temperature, share):
    """A key that every token which `_min_p` keeps reaches, and few others do."""
    lowest = np.float64(top) + temperature * math.log(share)
    return max(_NEG_INF_KEY, _key(np.float32(lowest - 1e-5 * (1.0 + abs(lowest)))))


@jit
def _race(keys, ids, top, temperature, state):
    """The winner among candidates by rising id."""
    scale = _scale(temperature)
    winner, least = -1, np.inf
    for i in range(keys.size):
        logit, bits = _float(keys[i]), _mix(_step(state, ids[i]))
        soonest = np.float32(np.int32(bits >> _S40)) * _TO_24
        if soonest <= _exp((logit - top) * scale) * (np.float32(least) * _SLACK):
            time = _time(bits, logit, top, temperature)
            if time < least:
                winner, least = ids[i], time
    return winner


@jit
def _race_all(row, top, at, temperature, state):
    """The winner among all tokens of a row; `at` is the likeliest, which starts ahead."""
    scale = _scale(temperature)
    winner, least = at, _time(_mix(_step(state, at)), top, top, temperature)
    for begin in range(0, row.size, _PIECE):
        piece = row[begin : begin + _PIECE]
        if _piece_hits(piece, _step(state, begin), top, scale, least) == 0:
            continue
        for i in range(piece.size):
            time = _time(_mix(_step(state, begin + i)), piece[i], top, temperature)
            if time < least or (time == least and begin + i < winner):
                winner, least = begin + i, time
    return winner


@_jit_sum
def _rank(row, token):
    """The place of `token` in the order of a row, from 1."""
    key = _key(row[token])
    rank = 1 + np.int64(_piece_count(row, np.int32(key + 1)))
    for i in range(token):
        rank += np.int64(_key(row[i]) == key)
    return rank


@jit
def _mass_before(row, token, top, temperature):
    """The mass of the tokens that come before `token` in the order of a row."""
    key = _key(row[token])
    ties = 0
    for i in range(token):
        ties += np.int64(_key(row[i]) == key)
    each = np.float64(_exp((row[token] - top) * _scale(temperature)))
    return _mass(row, top, temperature, np.int32(key + 1)) + ties * each


@jit
def _draw_kept(keys, ids, top, temperature, min_p, state):
    if min_p > 0.0:
        count = _min_p(keys, ids, top, temperature, min_p)
        keys, ids = keys[:count], ids[:count]
    return _race(keys, ids, top, temperature, state)


@jit
def _draw_top_k(row, scratch, top, at, temperature, filters, state):
    top_k, top_p, min_p = filters
    if top_k > _FEW and top_p == 1.0 and min_p == 0.0:
        winner = _race_all(row, top, at, temperature, state)
        if _rank(row, winner) <= top_k:
            return winner
    _largest(row, scratch, top_k)
    keys, ids, weights = scratch[1][:top_k], scratch[2][:top_k], scratch[3][:top_k]
    if top_p < 1.0:
        _weigh(keys, weights, top, temperature)
        mass = top_p * _mass_from(keys, weights, _NEG_INF_KEY)
        count = _top_p(keys, ids, weights, mass)
        keys, ids = keys[:count], ids[:count]
    return _draw_kept(keys, ids, top, temperature, min_p, state)


@jit
def _draw_top_p(row, scratch, top, at, temperature, filters, state):
    _, top_p, min_p = filters
    tops, all_keys, all_ids, weights = scratch
    mass = top_p * _mass(row, top, temperature, _NEG_INF_KEY)
    bound = _kth(tops, _FEW) if tops.size > _FEW else _NEG_INF_KEY
    count = _gather(row, scratch, bound)
    keys, ids = all_keys[:count], all_ids[:count]
    _weigh(keys, weights, top, temperature)
    if bound > _NEG_INF_KEY and _mass_from(keys, weights, bound) < mass:
        if min_p == 0.0:
            winner = _race_all(row, top, at, temperature, state)
            if _mass_before(row, winner, top, temperature) < mass:
                return winner
        count = _gather(row, scratch, _NEG_INF_KEY)
        keys, ids = all_keys[:count], all_ids[:count]
        _weigh(keys, weights, top, temperature)
    count = _top_p(keys, ids, weights, mass)
    return _draw_kept(keys[:count], ids[:count], top, temperature, min_p, state)


@jit
def _draw(row, scratch, temperature, top_k, top_p, min_p, state):
    """(status, token) of one row."""
    status, best, at = _survey(row, scratch[0])
    if status != OK or temperature == 0.0 or top_k == 1:
        return status, at
    top, filters = _float(best), (top_k, top_p, min_p)
    if 0 < top_k < row.size:
        at = _draw_top_k(row, scratch, top, at, temperature, filters, state)
    elif top_p < 1.0:
        at = _draw_top_p(row, scratch, top, at, temperature, filters, state)
    elif min_p > 0.0:
        count = _gather(row, scratch, _min_p_bound(top, temperature, min_p))
        at = _draw_kept(scratch[1][:count], scratch[2][:count], top, temperature, min_p, state)
    else:
        at = _race_all(row, top, at, temperature, state)
    return status, at


def _by_items(one: Any) -> Any:
    """A kernel that calls one(arguments, item, its number, scratch lists, spare row) per item."""

    @jit
    def work(a):
        size = geti(a + _CALL.vocab)
        pieces, most = (size + _PIECE - 1) // _PIECE, size + 1
        mine = geti(a + _CALL.scratch) + take(a + _CALL.thread) * geti(a + _CALL.scratch_size)
        lists = mine + 4 * pieces
        wide = lists + 12 * most
        scratch = (
            _ints(mine, pieces),
            _ints(lists, most),
            _ints(lists + 4 * most, most),
            _floats(lists + 8 * most, most),
        )
        count, items = geti(a + _CALL.count), geti(a + _CALL.items)
        number = take(a)
        while number < count:
            one(a, items + number * _ITEM_BYTES, number, scratch, wide)
            number = take(a)

    def kernel(a: int) -> None:
        work(a)

    return kernel


@jit
def _row_at(a, item):
    """The address of an item's logits."""
    row = geti(item + _ITEM.row) * geti(a + _CALL.vocab)
    return geti(a + _CALL.logits) + row * geti(a + _CALL.logit_bytes)


@jit
def _widened(address, size, itemsize, wide):
    """The address of a row as float32: where it is, or `wide`, if it had to be widened."""
    if itemsize == 4:
        return address
    bits, target = _shorts(address, size), _ints(wide, size)
    for i in range(size):
        target[i] = np.int32(bits[i]) << np.int32(16)
    return wide


_BF16_INF, _BF16_NEG_INF = np.int16(0x7F80), np.int16(-0x7F81)


@jit
def _bf16_key(bits):
    bits = np.int16(0) if bits == np.int16(-32768) else bits  # -0.0 becomes 0.0
    return np.int16(bits ^ np.int16(np.int16(bits >> np.int16(15)) & np.int16(0x7FFF)))


@jit
def _bf16_bounds(piece):
    high, low = _BF16_NEG_INF, _BF16_INF
    for i in range(piece.size):
        key = _bf16_key(piece[i])
        high = max(high, key)
        low = min(low, key)
    return high, low


@jit
def _bf16_argmax(row):
    """(status, id) of the largest of bfloat16 logits, given as int16 bit patterns."""
    best, worst, at = _BF16_NEG_INF, _BF16_INF, 0
    for begin in range(0, row.size, 4 * _PIECE):
        high, low = _bf16_bounds(row[begin : begin + 4 * _PIECE])
        worst = min(worst, low)
        if high > best:
            best, at = high, begin
    if worst < _BF16_NEG_INF or best >= _BF16_INF:
        return NOT_FINITE, -1
    if best == _BF16_NEG_INF:
        return EMPTY, -1
    while _bf16_key(row[at]) != best:
        at += 1
    return OK, at


_NEG_INF_BITS, _BF16_NEG_INF_BITS = np.int32(-0x00800000), np.int16(-0x80)


@jit
def _masked(word, bits, target):
    """32 logits as float32 bits to `target`; -inf where the word has a 0. Vectorizes."""
    for i in range(target.size):
        keep = np.int32(-np.int32(np.int32(word >> np.int32(i)) & np.int32(1)))
        target[i] = np.int32(bits[i] & keep) | np.int32(_NEG_INF_BITS & ~keep)


@jit
def _masked_bf16(word, bits, target):
    """The same of bfloat16 bits."""
    for i in range(target.size):
        keep = np.int16(-np.int32(np.int32(word >> np.int32(i)) & np.int32(1)))
        target[i] = np.int16(bits[i] & keep) | np.int16(_BF16_NEG_INF_BITS & ~keep)


@jit
def _copy_bf16(bits, words, target):
    """A row of bfloat16; -inf where the mask has a 0."""
    for n in range(words.size):
        begin, end = 32 * n, min(32 * n + 32, target.size)
        if words[n] == np.int32(0):
            target[begin:end] = _BF16_NEG_INF_BITS
        else:
            _masked_bf16(words[n], bits[begin:end], target[begin:end])


@jit
def _copy(size, address, logit_bytes, mask, to):
    target = _ints(to, size)
    if logit_bytes == 2:
        halves = _shorts(address, size)
        for i in range(size):
            target[i] = np.int32(halves[i]) << np.int32(16)
    else:
        whole = _ints(address, size)
        for i in range(size):
            target[i] = whole[i]
    if mask:
        words = _ints(mask, (size + 31) // 32)
        for n in range(words.size):
            part = target[32 * n : min(32 * n + 32, size)]
            if words[n] == np.int32(0):
                part[:] = _NEG_INF_BITS
            elif words[n] != np.int32(-1):
                _masked(words[n], part, part)


@jit
def _draw_item(a, item, number, scratch, wide):
    size, itemsize = geti(a + _CALL.vocab), geti(a + _CALL.logit_bytes)
    address, temperature = _row_at(a, item), getd(item + _ITEM.temperature)
    argmax = itemsize == 2 and temperature == 0.0
    masks = geti(a + _CALL.masks)
    mask = geti(masks + 8 * number) if masks else 0
    if mask:
        if argmax:
            words = _ints(mask, (size + 31) // 32)
            _copy_bf16(_shorts(address, size), words, _shorts(wide, size))
        else:
            _copy(size, address, itemsize, mask, wide)
            itemsize = 4
        address = wide
    if argmax:
        status, token = _bf16_argmax(_shorts(address, size))
    else:
        status, token = _draw(
            _floats(_widened(address, size, itemsize, wide), size),
            scratch,
            temperature,
            geti(item + _ITEM.top_k),
            getd(item + _ITEM.top_p),
            getd(item + _ITEM.min_p),
            _state(geti(item + _ITEM.seed), geti(item + _ITEM.index), geti(item + _ITEM.position)),
        )
    seti(item + _ITEM.status, status)
    seti(item + _ITEM.token, token)


def draw() -> Any:
    """Draws a token from a row of logits for each item."""
    return _by_items(_draw_item)


@jit
def _in_order(keys, ids):
    """Sort few keys, the largest first, in place; equal ones stay by rising id."""
    for i in range(1, keys.size):
        key, token, j = keys[i], ids[i], i
        while j > 0 and keys[j - 1] < key:
            keys[j], ids[j] = keys[j - 1], ids[j - 1]
            j -= 1
        keys[j], ids[j] = key, token


@jit
def _logprobs(row, scratch, token, k, ids, values):
    """(status, rank of `token`); ids [1 + k] and values [1 + k] are written."""
    status, best, _ = _survey(row, scratch[0])
    if status != OK:
        return status, 0
    top = _float(best)
    shift = np.float64(top) + math.log(_mass(row, top, 1.0, _NEG_INF_KEY))
    ids[0], values[0] = token, np.float64(row[token]) - shift
    if k > 0:
        _largest(row, scratch, k)
        keys, likeliest = scratch[1][:k], scratch[2][:k]
        _in_order(keys, likeliest)
        for i in range(k):
            ids[1 + i], values[1 + i] = likeliest[i], np.float64(_float(keys[i])) - shift
    return status, _rank(row, token)


@jit
def _logprob_item(a, item, number, scratch, wide):
    size, most = geti(a + _CALL.vocab), geti(a + _CALL.out_size)
    address = _widened(_row_at(a, item), size, geti(a + _CALL.logit_bytes), wide)
    status, rank = _logprobs(
        _floats(address, size),
        scratch,
        geti(item + _ITEM.token),
        geti(item + _ITEM.top_k),
        _longs(geti(a + _CALL.out_ids) + number * most * 8, most),
        _doubles(geti(a + _CALL.out_values) + number * most * 8, most),
    )
    seti(item + _ITEM.status, status)
    seti(item + _ITEM.rank, rank)


def logprobs() -> Any:
    """Log-probabilities of one token, and of the likeliest, for each item."""
    return _by_items(_logprob_item)


def copies() -> Any:
    """Copies rows as float32; where a row has a mask, tokens whose bit is 0 become -inf."""

    @jit
    def work(a):
        size, logit_bytes = geti(a + _COPY.vocab), geti(a + _COPY.logit_bytes)
        number = take(a)
        while number < geti(a + _COPY.count):
            row = geti(geti(a + _COPY.rows) + 8 * number)
            _copy(
                size,
                geti(a + _COPY.logits) + row * size * logit_bytes,
                logit_bytes,
                geti(geti(a + _COPY.masks) + 8 * number),
                geti(a + _COPY.out) + 4 * number * size,
            )
            number = take(a)

    def kernel(a: int) -> None:
        work(a)

    return kernel
