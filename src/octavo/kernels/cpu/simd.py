"""Vectors, raw memory and fast functions for Numba kernels, as LLVM code.

Numba has no vector type and no stack arrays, and cannot guarantee that its loops are vectorized;
so the kernels use explicit vectors. `Vec` is LANES floats in one register: 16 with AVX-512, else
8 (two NEON registers on ARM). An address is an int64; memory is float32 or bfloat16 (`HALF`,
widened when loaded and rounded to nearest even when stored). Every function here works on any
processor, and uses dedicated instructions where they exist.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import compiler
from numba.core.datamodel import models
from numba.core.targetconfig import ConfigStack
from numba.extending import intrinsic, register_model

from octavo.kernels.cpu import target

FEATURES = target.cpu()[1]
LANES = 16 if "avx512f" in FEATURES else 8
HAS_DOT = LANES == 16 and "avx512bf16" in FEATURES

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VH = ir.VectorType(I16, LANES)

# 2^f on [-0.5, 0.5] as 1 + f * (C1 + f * (C2 + ...)), least squares. Relative error 9e-8, 1e-4.
_EXP2 = (0.69314697758, 0.24022242072, 0.05550733773, 0.00967151326, 0.00132647184)
_EXP2_ROUGH = (0.69328294190, 0.24221098260, 0.05500885643)
# The same on [0, 1], the largest relative error as small as can be: 9e-5.
_EXP2_ABOVE = (0.69511677121, 0.22764505002, 0.07706699090)
# Added to x it leaves round(x) + 127 in the low bits: 1.5 * 2^23 has a unit of 1.
_ROUNDER = 1.5 * 2**23 + 127


class _VecType(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"Vec{LANES}")


Vec = _VecType()


@register_model(_VecType)
class _VecModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VF)


def jit(function: Any = None, *, returns: Any = types.void) -> Any:
    """A helper for kernels, compiled into them; `returns` is its result's Numba type.

    Unlike what numba.njit makes, it goes into the caller's own library: optimized once, as a
    whole, and not again at each level of calls (which doubles the compile time).
    """
    if function is None:
        return functools.partial(jit, returns=returns)

    def typed(context: Any, *given: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            library = context.active_code_library
            known = library.__dict__.setdefault("octavo_helpers", {})
            if (function, signature.args) not in known:
                flags = ConfigStack().top().copy()
                flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
                known[function, signature.args] = compiler.compile_internal(
                    context.typing_context, context, library, function, signature.args,
                    signature.return_type, flags, locals={},
                )  # fmt: skip
            called = known[function, signature.args].fndesc
            return context.call_internal(builder, called, signature, values)

        return returns(*given), codegen

    return _intrinsic(typed, function)


def _intrinsic(typed: Any, like: Callable[..., Any]) -> Any:
    """Numba takes the number of arguments from the signature, which an emitter has, too, with
    its builder in the place of the context."""
    parameters = list(inspect.signature(like).parameters.values())
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if parameters[:1] and parameters[0].name == "b":
        parameters = parameters[1:]
    typed.__signature__ = inspect.Signature([first, *parameters])
    typed.__name__ = like.__name__
    return intrinsic(typed)


def op(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of `emit(builder, *values)`, a function that writes LLVM code."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                value = emit(builder, *values)
                return context.get_dummy_value() if value is None else value

            return result(*arguments), codegen

        return _intrinsic(typed, emit)

    return wrap


# -- LLVM code -----------------------------------------------------------------------------


def call(b: Any, name: str, result: Any, *values: Any) -> Any:
    """Call an LLVM function by name, declaring it on first use."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [v.type for v in values]), name)
    return b.call(function, values)


def pointer(b: Any, address: Any, kind: Any) -> Any:
    return b.inttoptr(address, kind.as_pointer())


def offset(b: Any, address: Any, nbytes: int) -> Any:
    return b.add(address, ir.Constant(I64, nbytes)) if nbytes else address


def load(b: Any, address: Any, kind: Any) -> Any:
    return b.load(pointer(b, address, kind), align=1)


def store(b: Any, value: Any, address: Any) -> None:
    b.store(value, pointer(b, address, value.type), align=1)


def splat(b: Any, scalar: Any, lanes: int = LANES) -> Any:
    kind = ir.VectorType(scalar.type, lanes)
    zero = ir.Constant(I32, 0)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, zero)
    mask = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), mask)


def const(value: float) -> Any:
    return ir.Constant(VF, [value] * LANES)


def consti(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, f"llvm.fma.v{LANES}f32", VF, x, y, z)


def widen(b: Any, half: Any) -> Any:
    return b.bitcast(b.shl(b.zext(half, VI), consti(16)), VF)


def narrow(b: Any, value: Any) -> Any:
    """Round to bfloat16, to nearest even; NaN stays NaN."""
    if HAS_DOT:
        return call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", VH, value)
    bits = b.bitcast(value, VI)
    even = b.and_(b.lshr(bits, consti(16)), consti(1))
    rounded = b.lshr(b.add(b.add(bits, consti(0x7FFF)), even), consti(16))
    nan = b.fcmp_unordered("uno", value, value)
    return b.trunc(b.select(nan, consti(0x7FC0), rounded), VH)


def lane_ids() -> Any:
    return ir.Constant(VI, list(range(LANES)))


def loop(b: Any, count: Any, carried: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    """for i in range(count): carried = body(i, *carried); count >= 1. Returns carried."""
    before = b.block
    head = b.append_basic_block("turn")
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    phis = []
    for value in carried:
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    values = body(index, *phis)
    following = b.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, b.block)
    for phi, value in zip(phis, values, strict=True):
        phi.add_incoming(value, b.block)
    after = b.append_basic_block("done")
    b.cbranch(b.icmp_signed("<", following, count), head, after)
    b.position_at_end(after)
    return values


# -- what kernels call ------------------------------------------------------------------------


@op(types.int64, types.int64)
def geti(b, address):
    return b.load(pointer(b, address, I64))


@op(types.void, types.int64, types.int64)
def seti(b, address, value):
    b.store(value, pointer(b, address, I64))


@op(types.int64, types.int64)
def get32(b, address):
    return b.sext(load(b, address, I32), I64)


@op(types.void, types.int64, types.int64)
def set32(b, address, value):
    store(b, b.trunc(value, I32), address)


@op(types.int64, types.int64)
def get16(b, address):
    return b.sext(load(b, address, I16), I64)


@op(types.void, types.int64, types.int64)
def set16(b, address, value):
    store(b, b.trunc(value, I16), address)


@op(types.float64, types.int64)
def getd(b, address):
    return load(b, address, ir.DoubleType())


@op(types.float32, types.int64)
def getf(b, address):
    return load(b, address, F32)


@op(types.void, types.int64, types.float32)
def setf(b, address, value):
    store(b, value, address)


@op(types.int64, types.int64)
def take(b, address):
    """Add 1 to the integer at `address`, atomically; returns what it was."""
    return b.atomic_rmw("add", pointer(b, address, I64), ir.Constant(I64, 1), "seq_cst")


@op(types.int64, types.int64)
def peek(b, address):
    """The integer at an address, as other threads have left it."""
    if "sse2" in FEATURES:
        call(b, "llvm.x86.sse2.pause", ir.VoidType())
    return b.load_atomic(pointer(b, address, I64), "acquire", 8)


@op(types.void, types.int64, types.float32)
def seth(b, address, value):
    wide = narrow(b, splat(b, value))
    store(b, b.extract_element(wide, ir.Constant(I32, 0)), address)


@op(types.void, types.int64, types.int64, types.int64)
def copy(b, target, source, nbytes):
    """memcpy."""
    flag = ir.Constant(ir.IntType(1), 0)
    to, frm = pointer(b, target, I8), pointer(b, source, I8)
    call(b, "llvm.memcpy.p0.p0.i64", ir.VoidType(), to, frm, nbytes, flag)


@op(types.void, types.int64, types.int64)
def zero(b, target, nbytes):
    flag, byte = ir.Constant(ir.IntType(1), 0), ir.Constant(I8, 0)
    call(b, "llvm.memset.p0.i64", ir.VoidType(), pointer(b, target, I8), byte, nbytes, flag)


def prefetch(b: Any, address: Any, locality: int) -> None:
    """Into all caches (3), or all but the first (2)."""
    flags = [ir.Constant(I32, value) for value in (0, locality, 1)]
    call(b, "llvm.prefetch.p0", ir.VoidType(), pointer(b, address, I8), *flags)


@op(types.void, types.int64)
def fetch(b, address):
    """Prefetch a cache line that will be read soon."""
    prefetch(b, address, 3)


@op(types.void, types.int64)
def fetch2(b, address):
    """Prefetch a cache line into the second cache, which waits for more lines than the first."""
    prefetch(b, address, 2)


def stack(nbytes: int) -> Any:
    """A function that gives the address of `nbytes` of stack; another one at each call site."""

    @op(types.int64)
    def buffer(b):
        with b.goto_entry_block():
            memory = b.alloca(ir.ArrayType(I8, nbytes))
            memory.align = 64
        return b.ptrtoint(memory, I64)

    return buffer


@op(Vec, types.int64)
def vload(b, address):
    return load(b, address, VF)


@op(types.void, types.int64, Vec)
def vstore(b, address, value):
    store(b, value, address)


@op(Vec, types.int64)
def vloadh(b, address):
    """LANES bfloat16, widened."""
    return widen(b, load(b, address, VH))


@op(types.void, types.int64, Vec)
def vstoreh(b, address, value):
    store(b, narrow(b, value), address)


@op(types.void, types.int64, Vec, Vec)
def vstoreh2(b, address, x, y):
    """vstoreh of x, then of y behind it."""
    if HAS_DOT:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        store(b, call(b, name, ir.VectorType(I16, 2 * LANES), y, x), address)
    else:
        store(b, narrow(b, x), address)
        store(b, narrow(b, y), offset(b, address, 2 * LANES))


@op(types.void, types.int64, Vec, Vec)
def vstore2(b, address, x, y):
    """vstore of x, then of y behind it."""
    store(b, x, address)
    store(b, y, offset(b, address, 4 * LANES))


@op(Vec, types.float32)
def vsplat(b, value):
    return splat(b, value)


@op(Vec, Vec, Vec)
def vadd(b, x, y):
    return b.fadd(x, y)


@op(Vec, Vec, Vec)
def vsub(b, x, y):
    return b.fsub(x, y)


@op(Vec, Vec, Vec)
def vmul(b, x, y):
    return b.fmul(x, y)


@op(Vec, Vec, Vec)
def vdiv(b, x, y):
    return b.fdiv(x, y)


@op(Vec, Vec, Vec, Vec)
def vfma(b, x, y, z):
    """x * y + z, rounded once."""
    return fma(b, x, y, z)


@op(Vec, Vec, Vec)
def vmax(b, x, y):
    """The larger of each pair; y where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@op(Vec, Vec, Vec)
def vmin(b, x, y):
    """The smaller of each pair; y where either is NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@op(Vec, Vec)
def vup(b, x):
    """x > 0 rounded up to a bfloat16."""
    bits = b.and_(b.add(b.bitcast(x, VI), consti(0xFFFF)), consti(-65536))
    return b.bitcast(bits, VF)


@op(Vec, Vec)
def vabs(b, x):
    return call(b, f"llvm.fabs.v{LANES}f32", VF, x)


@op(Vec, Vec, types.int64, types.int64, types.float32)
def vkeep(b, x, low, high, fill):
    """Lanes low <= i < high of x, `fill` in the others."""
    ids = lane_ids()
    above = b.icmp_signed(">=", ids, splat(b, b.trunc(low, I32)))
    below = b.icmp_signed("<", ids, splat(b, b.trunc(high, I32)))
    return b.select(b.and_(above, below), x, splat(b, fill))


def _exp2(b: Any, x: Any, factors: tuple[float, ...]) -> Any:
    x = b.select(b.fcmp_ordered("<", x, const(-127.0)), const(-127.0), x)
    shifted = b.fadd(x, const(_ROUNDER))
    part = b.fsub(x, b.fsub(shifted, const(_ROUNDER)))
    value = const(factors[-1])
    for factor in (*factors[-2::-1], 1.0):
        value = fma(b, value, part, const(factor))
    power = b.shl(b.bitcast(shifted, VI), consti(23))
    return b.fmul(value, b.bitcast(power, VF))


@op(Vec, Vec)
def vexp2(b, x):
    """2^x, relative error about 1e-7; 0 below -126.5; NaN stays. For x up to 127."""
    return _exp2(b, x, _EXP2)


def _exp2_scaled(b: Any, x: Any) -> Any:
    """2^(x - floor x) * 2^(floor x) with AVX-512's instructions for both parts: 7 against 10."""
    every, nearest = ir.Constant(I16, -1), ir.Constant(I32, 4)
    down = ir.Constant(I32, 9)
    part = call(b, "llvm.x86.avx512.mask.reduce.ps.512", VF, x, down, x, every, nearest)
    value = const(_EXP2_ABOVE[-1])
    for factor in (*_EXP2_ABOVE[-2::-1], 1.0):
        value = fma(b, value, part, const(factor))
    return call(b, "llvm.x86.avx512.mask.scalef.ps.512", VF, value, x, value, every, nearest)


@op(Vec, Vec)
def vexp2_rough(b, x):
    """2^x, relative error 1e-4: a twentieth of what rounding to bfloat16 adds. What is below
    2^-126 may be zero."""
    if LANES == 16 and "avx512dq" in FEATURES:
        return _exp2_scaled(b, x)
    return _exp2(b, x, _EXP2_ROUGH)


def _reduce(b: Any, value: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Halve the vector until one lane is left: a fixed order."""
    width = LANES
    while width > 1:
        width //= 2
        mask = ir.Constant(VI, [(i + width) % LANES for i in range(LANES)])
        value = join(value, b.shuffle_vector(value, ir.Constant(VF, ir.Undefined), mask))
    return b.extract_element(value, ir.Constant(I32, 0))


@op(types.float32, Vec)
def vsum(b, x):
    """Sum of the lanes, by halves."""
    return _reduce(b, x, b.fadd)


@op(types.float32, Vec)
def vtop(b, x):
    """The largest lane."""
    return _reduce(b, x, lambda p, q: b.select(b.fcmp_ordered(">", p, q), p, q))


@op(Vec, Vec)
def vlog2_above(b, x):
    """At least log2 x, and at most 0.09 more; x > 0. The bits are the logarithm, but for a bend."""
    bits = b.sitofp(b.bitcast(x, VI), VF)
    return fma(b, bits, const(2.0**-23), const(0.0861 - 127))


@op(types.void, types.int64, Vec, Vec)
def vstore16x2(b, address, x, y):
    """x, then y behind it, as int16: values whose sum with 1.5 * 2^23 has been formed, which
    leaves the rounded value in the low bits."""
    short = ir.VectorType(I16, 2 * LANES)
    low = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(0, 4 * LANES, 2)))
    store(b, b.shuffle_vector(b.bitcast(x, short), b.bitcast(y, short), low), address)


@op(types.void, types.int64, Vec)
def vstore16(b, address, x):
    """Each x, rounded to nearest even, as an int16; |x| <= 32767."""
    # The sum has a unit of 1, so the rounded value is in its low bits.
    bits = b.bitcast(b.fadd(x, const(1.5 * 2**23)), VI)
    store(b, b.trunc(bits, VH), address)


def _larger(b: Any, x: Any, y: Any) -> Any:
    order = b.icmp_unsigned(">", b.bitcast(x, _bits(x)), b.bitcast(y, _bits(y)))
    return b.select(order, x, y)


def _bits(x: Any) -> Any:
    return VI if isinstance(x.type, ir.VectorType) else I32


@op(Vec, Vec, Vec)
def vlarger(b, x, y):
    """The larger of each pair of values that have no sign; NaN if one is."""
    return _larger(b, x, y)


@op(types.float32, Vec)
def vlargest(b, x):
    """The largest lane of values that have no sign; NaN if one is."""
    return _reduce(b, x, functools.partial(_larger, b))


def row_memory(half: bool) -> tuple[int, Any, Any]:
    """(bytes of a value, read, write) of up to LANES values of a row, `left` before its end."""
    size = 2 if half else 4
    get, put = (vloadh, vstoreh) if half else (vload, vstore)
    spare = stack(LANES * 4)

    @jit(returns=Vec)
    def read(here, left):
        if left >= LANES:
            return get(here)
        tail = spare()
        zero(tail, LANES * 4)
        copy(tail, here, left * size)
        return get(tail)

    @jit
    def write(here, value, left):
        if left >= LANES:
            put(here, value)
        else:
            tail = spare()
            put(tail, value)
            copy(here, tail, left * size)

    return size, read, write


# -- codes of one byte: int8, and fp8 e4m3 without subnormals (see `reference.quantize_kv`) --------

_FP8_BIAS = 127 - 7


def _code_pairs(b: Any, address: Any, lanes: int) -> Any:
    """`lanes` pairs of codes at an address, each code sign-extended to 16 bits."""
    codes = load(b, address, ir.VectorType(I8, 2 * lanes))
    return b.sext(codes, ir.VectorType(I16, 2 * lanes))


def load_int8_pairs(b: Any, address: Any) -> Any:
    """LANES pairs of int8 as words of two int16."""
    return b.bitcast(_code_pairs(b, address, LANES), VI)


def load_fp8_pairs(b: Any, address: Any, lanes: int = LANES) -> Any:
    """`lanes` pairs of fp8 as words of two bfloat16, exact."""
    short = ir.VectorType(I16, 2 * lanes)

    def each(value: int) -> Any:
        return ir.Constant(short, [value] * short.count)

    # The sign in its place, exponent and mantissa in those of a bfloat16.
    value = b.and_(b.shl(_code_pairs(b, address, lanes), each(4)), each(-0x7810))
    size = b.and_(value, each(0x7F0))
    value = b.select(
        b.icmp_unsigned(">=", size, each(0x80)), b.add(value, each(_FP8_BIAS << 7)), each(0)
    )
    return b.bitcast(value, ir.VectorType(I32, lanes))


def _halves(b: Any, words: Any) -> tuple[Any, Any]:
    """Words of two bfloat16 as two vectors of float32."""
    shift = ir.Constant(words.type, [16] * words.type.count)
    high = ir.Constant(words.type, [-65536] * words.type.count)
    return b.shl(words, shift), b.and_(words, high)


def _decoded(b: Any, kind: str, to: str, address: Any, lanes: int) -> tuple[Any, ...]:
    """`lanes` pairs of codes: one vector of pairs of bfloat16 or int16, or two of float32. All
    exact."""
    half = to == "bfloat16"
    if kind == "fp8":
        words = load_fp8_pairs(b, address, lanes)
        return (words,) if half else _halves(b, words)
    wide = ir.VectorType(I32, lanes)
    short = ir.Constant(wide, [16] * lanes)
    pairs = b.bitcast(_code_pairs(b, address, lanes), wide)
    if to == "int16":
        return (pairs,)
    values = (b.ashr(b.shl(pairs, short), short), b.ashr(pairs, short))
    # Of at most 8 bits, so the lower half of the float32 is zero.
    bits = [b.bitcast(b.sitofp(x, ir.VectorType(F32, lanes)), wide) for x in values]
    return (b.or_(b.lshr(bits[0], short), bits[1]),) if half else tuple(bits)


def decode(kind: str, numbers: str, lanes: int) -> Any:
    """A function (to, stride, codes): the words of `numbers` (float32, bfloat16, or int16) made of
    `lanes` pairs of codes, `stride` bytes from the first word of a pair to its second, if there
    are two."""

    def emit(b, to, stride, codes):
        for i, words in enumerate(_decoded(b, kind, numbers, codes, lanes)):
            store(b, words, b.add(to, b.mul(stride, ir.Constant(I64, i))))

    return op(types.void, types.int64, types.int64, types.int64)(emit)


def _rounded_fp8(b: Any, value: Any) -> Any:
    """The nearest code, ties to even; what is below 2^-6, the least one, is it or zero."""
    bits = b.bitcast(value, VI)
    size = b.and_(bits, consti(0x7FFFFFFF))
    even = b.and_(b.lshr(size, consti(20)), consti(1))
    code = b.lshr(b.add(b.add(size, consti(0x7FFFF)), even), consti(20))
    code = b.sub(code, consti(_FP8_BIAS << 3))
    code = b.select(b.icmp_signed("<", code, consti(8)), consti(8), code)
    none = b.icmp_signed("<=", size, b.bitcast(const(2.0**-7), VI))
    code = b.select(none, consti(0), code)
    return b.or_(code, b.and_(b.lshr(bits, consti(24)), consti(0x80)))


def encode(kind: str) -> Any:
    """A function (to, x): the codes of LANES values within the range of the kind."""

    def emit(b, to, x):
        if kind == "int8":  # the sum has a unit of 1, so the rounded value is in its low bits
            codes = b.bitcast(b.fadd(x, const(1.5 * 2**23)), VI)
        else:
            codes = _rounded_fp8(b, x)
        store(b, b.trunc(codes, ir.VectorType(I8, LANES)), to)

    return op(types.void, types.int64, Vec)(emit)
