"""Sums and gathers over the ranks of a tensor-parallel group, through memory that they share.

    all_reduce   out[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., x_r: the x of rank r
    gather       out[row] = [row of x_0 | row of x_1 | ...]

Sums are float32, in rank order, rounded once: so an element's bits depend on nothing else.

The data is cut into lanes, the same on each rank whatever its number of threads, and a lane into
pieces. Of each piece a rank writes its own part to a slot of its own area, sets its mark of that
lane, waits for the marks of the others, and reads their slots. A lane has two slots, used by turns:
the marks of the following piece say that all have read this one. Marks only rise, and live in the
shared region: so the arguments are the same each time, and a captured step can replay them.

Where each rank reads all parts of a piece, n ranks read n times n parts; of large pieces each sums
one slice and reads the sums of the others, after a second mark.

A thread that waits spins, then offers its processor, then sleeps. When `aborted` is set in the
region, it waits no longer: the call and all that follow have no result, and say so at RANK_LOST.
"""

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.program import yield_processor
from octavo.kernels.cpu.simd import (
    I32,
    I64,
    LANES,
    copy,
    geti,
    jit,
    op,
    peek,
    pointer,
    row_memory,
    seti,
    take,
    vadd,
    vload,
    vloadh,
    vstore2,
    vstoreh2,
)

_CALL, _REGION = abi.ALL_REDUCE.offset, abi.SHARED_REGION.offset
_YIELDS = 4000  # of about 0.3 us each or more before sleeping
_SLEEP_US = 50
_ALIGNMENT = 64  # of lanes and slices: no cache line is written by two


@op(types.void, types.int64, types.int64)
def _publish(b, address, value):
    """Store a mark, after all that was written before it."""
    b.store_atomic(value, pointer(b, address, I64), "release", 8)


@op(types.int64, types.int64)
def _seen(b, address):
    """A mark; what is read after it was written before it."""
    return b.load_atomic(pointer(b, address, I64), "acquire", 8)


@op(types.void, types.int64, types.int64)
def _sleep(b, function, microseconds):
    """Call usleep, whose address is given."""
    kind = ir.FunctionType(I32, [I32])
    b.call(b.inttoptr(function, kind.as_pointer()), [b.trunc(microseconds, I32)])


@jit(returns=types.int64)
def _area(a, rank):
    region = geti(a + _CALL.region)
    return region + abi.RANK_AREAS + rank * geti(region + _REGION.rank_bytes)


@jit(returns=types.boolean)
def _wait(a, mark, number):
    """Until `mark` is at least `number`; False if the group was aborted."""
    region = geti(a + _CALL.region)
    most, spins = geti(region + _REGION.spins), 0
    while _seen(mark) < number:
        spins += 1
        if spins > most:
            if _seen(region + _REGION.aborted) != 0:
                return False
            if spins > most + _YIELDS:
                _sleep(geti(a + _CALL.usleep), _SLEEP_US)
            else:
                yield_processor(geti(a + _CALL.sched_yield))
        else:
            peek(mark)  # with a pause
    return True


@jit(returns=types.boolean)
def _meet(a, lane, number):
    """Set this rank's mark of `lane` to `number`, and wait for those of all others."""
    at = lane * abi.MARK_BYTES
    _publish(_area(a, geti(a + _CALL.rank)) + at, number)
    for rank in range(geti(geti(a + _CALL.region) + _REGION.ranks)):
        if not _wait(a, _area(a, rank) + at, number):
            return False
    return True


@jit(returns=types.int64)
def _part(total, parts):
    """Bytes of each of `parts` of `total`; the last ones may have fewer or none."""
    return (total + parts * _ALIGNMENT - 1) // (parts * _ALIGNMENT) * _ALIGNMENT


def _by_lanes(exchange: Any) -> Any:
    """A kernel that calls exchange(a, lane, slot, number, begin, nbytes) for each piece.

    slot: its offset in an area; begin: of the piece in x; number: the mark that ends the piece,
    number - 1 being free for use within it. False ends the call.
    """

    @jit
    def work(a):
        region = geti(a + _CALL.region)
        total = geti(a + _CALL.rows) * geti(a + _CALL.row_bytes)
        most = geti(region + _REGION.slot_bytes)
        lanes = min(geti(region + _REGION.lanes), 1 + total // abi.LANE_BYTES)
        width, own = _part(total, lanes), _area(a, geti(a + _CALL.rank))
        lane, going = take(a), _seen(region + _REGION.aborted) == 0
        while going and lane < lanes:
            begin, end = lane * width, min(lane * width + width, total)
            while going and begin < end:
                nbytes = min(most, end - begin)
                number = geti(own + lane * abi.MARK_BYTES) + 2
                slot = abi.RANK_SLOTS + (2 * lane + (number >> 1 & 1)) * most
                copy(own + slot, geti(a + _CALL.x) + begin, nbytes)
                going = exchange(a, lane, slot, number, begin, nbytes)
                begin += nbytes
            lane = take(a)
        if not going:
            seti(own + abi.RANK_LOST, 1)

    def kernel(a: int) -> None:
        work(a)

    return kernel


def all_reduce(variant: str) -> Any:
    """`variant` is the dtype of x and out [rows, size]; or "gather" (see there)."""
    if variant == "gather":
        return _gather()
    half = variant == "bfloat16"
    size, read, write = row_memory(half)
    get, put2 = (vloadh, vstoreh2) if half else (vload, vstore2)

    @jit
    def add(a, slot, begin, end, out):
        """Sum begin..end of the parts in all slots to `out` and on."""
        region = geti(a + _CALL.region)
        ranks, stride = geti(region + _REGION.ranks), geti(region + _REGION.rank_bytes)
        first = region + abi.RANK_AREAS + slot
        step = LANES * size
        whole = begin + (end - begin) // (4 * step) * (4 * step)
        for i in range(begin, whole, 4 * step):
            here = first + i
            s0, s1 = get(here), get(here + step)
            s2, s3 = get(here + 2 * step), get(here + 3 * step)
            for _ in range(1, ranks):
                here += stride
                s0, s1 = vadd(s0, get(here)), vadd(s1, get(here + step))
                s2, s3 = vadd(s2, get(here + 2 * step)), vadd(s3, get(here + 3 * step))
            put2(out + i - begin, s0, s1)
            put2(out + i - begin + 2 * step, s2, s3)
        for i in range(whole, end, step):
            left = (end - i) // size
            total = read(first + i, left)
            for rank in range(1, ranks):
                total = vadd(total, read(first + rank * stride + i, left))
            write(out + i - begin, total, left)

    @jit(returns=types.boolean)
    def exchange(a, lane, slot, number, begin, nbytes):
        region, out = geti(a + _CALL.region), geti(a + _CALL.out) + begin
        if nbytes < geti(region + _REGION.sliced_from):
            if not _meet(a, lane, number):
                return False
            add(a, slot, 0, nbytes, out)
            return True
        if not _meet(a, lane, number - 1):
            return False
        ranks, rank = geti(region + _REGION.ranks), geti(a + _CALL.rank)
        width = _part(nbytes, ranks)
        low, high = min(rank * width, nbytes), min(rank * width + width, nbytes)
        add(a, slot, low, high, _area(a, rank) + slot + low)  # which no other rank reads
        if not _meet(a, lane, number):
            return False
        for other in range(ranks):
            low, high = min(other * width, nbytes), min(other * width + width, nbytes)
            copy(out + low, _area(a, other) + slot + low, high - low)
        return True

    return _by_lanes(exchange)


def _gather() -> Any:
    """x: rows of row_bytes of any type; out: rows of as many for each rank."""

    @jit(returns=types.boolean)
    def exchange(a, lane, slot, number, begin, nbytes):
        if not _meet(a, lane, number):
            return False
        width, ranks = geti(a + _CALL.row_bytes), geti(geti(a + _CALL.region) + _REGION.ranks)
        for rank in range(ranks):
            source, out = _area(a, rank) + slot, geti(a + _CALL.out) + rank * width
            done = 0
            while done < nbytes:
                row, column = (begin + done) // width, (begin + done) % width
                here = min(width - column, nbytes - done)
                copy(out + row * ranks * width + column, source + done, here)
                done += here
        return True

    return _by_lanes(exchange)
