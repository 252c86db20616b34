"""AMX in software: the tile instructions of our kernels, on a register file in memory.

A pytest plugin (`-p amx_emulation`): with it the kernels made for AMX run on any processor with
AVX-512, so that code which this machine cannot execute is tested on it. `kernels.cpu.amx` emits
every tile instruction through one function, which is replaced by a call of the functions below.
Compiled kernels then hold addresses of this process: give it a cache folder of its own.

Each thread has a configuration of 64 bytes and eight registers of 16 rows x 64 bytes. What the
processor faults on ends the process here, too (`llvm.trap`): a register without a shape, operands
whose shapes do not match, a malformed configuration. Registers of fewer than 64 bytes a row are
not used by our kernels, and fault. Sums are formed as Intel's manual says: of the even and of the
odd products by themselves, then both, then to what was there; subnormals are not flushed.
"""

import ctypes
from typing import Any

from llvmlite import ir
from numba import cfunc, types

from octavo.kernels.cpu import amx, target
from octavo.kernels.cpu.simd import (
    I64,
    LANES,
    VF,
    VI,
    Vec,
    call,
    consti,
    copy,
    get32,
    geti,
    jit,
    load,
    op,
    splat,
    store,
    vadd,
    vfma,
    vload,
    vsplat,
    vstore,
    zero,
)  # fmt: skip

assert LANES == 16, "AMX is emulated on AVX-512 only"

_TILES, _BYTES = 64, 64 + 8 * 1024  # a thread's state: its configuration, then the registers
_libc = ctypes.CDLL(None)
_key = ctypes.c_uint()
_libc.pthread_key_create(ctypes.byref(_key), None)
_KEY = _key.value


def _function(name: str, *arguments: Any) -> Any:
    address = ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value
    assert address
    return ctypes.CFUNCTYPE(ctypes.c_int64, *arguments)(address)


_get = _function("pthread_getspecific", ctypes.c_uint)
_set = _function("pthread_setspecific", ctypes.c_uint, ctypes.c_int64)
_allocate = _function("calloc", ctypes.c_int64, ctypes.c_int64)


@op(types.void, types.boolean)
def _require(b, condition):
    with b.if_then(b.not_(condition), likely=False):
        call(b, "llvm.trap", ir.VoidType())


@jit(returns=types.int64)
def _state():
    state = _get(_KEY)
    if state == 0:
        state = _allocate(1, _BYTES)
        _set(_KEY, state)
    return state


@jit(returns=types.int64)
def _byte(address):
    return get32(address) & 0xFF


@jit(returns=types.int64)
def _rows(state, register):
    """Rows of a register, which must be configured."""
    rows, row_bytes = _byte(state + 48 + register), get32(state + 16 + 2 * register) & 0xFFFF
    _require(_byte(state) == 1 and 1 <= rows <= 16 and row_bytes == 64)
    return rows


@jit(returns=types.int64)
def _at(state, register):
    return state + _TILES + 1024 * register


@jit
def _clear_from(state, register, rows):
    zero(_at(state, register) + 64 * rows, 1024 - 64 * rows)


@jit(returns=types.int64)
def _operands(state, total, left, right):
    """Rows of the sums; shapes must match."""
    _require(total != left and total != right and left != right)
    rows = _rows(state, total)
    _require(_rows(state, left) == rows and _rows(state, right) == 16)
    return rows


def ldtilecfg(config: int) -> None:
    state = _state()
    _require(_byte(config) == 1 and _byte(config + 1) == 0)
    for i in range(2, 16):
        _require(_byte(config + i) == 0)
    _require(geti(config + 32) == 0 and geti(config + 40) == 0 and geti(config + 56) == 0)
    copy(state, config, 64)
    zero(state + _TILES, 8 * 1024)


def tilerelease() -> None:
    zero(_state(), _BYTES)


def tilezero(register: int) -> None:
    state = _state()
    _rows(state, register)
    _clear_from(state, register, 0)


def tileloadd64(register: int, base: int, stride: int) -> None:
    state = _state()
    rows, to = _rows(state, register), _at(state, register)
    for r in range(rows):
        copy(to + 64 * r, base + stride * r, 64)
    _clear_from(state, register, rows)


def tilestored64(register: int, base: int, stride: int) -> None:
    state = _state()
    here = _at(state, register)
    for r in range(_rows(state, register)):
        copy(base + stride * r, here + 64 * r, 64)


@op(Vec, types.int64)
def _even(b, address):
    """The lower bfloat16 of 16 words, as float32."""
    return b.bitcast(b.shl(load(b, address, VI), consti(16)), VF)


@op(Vec, types.int64)
def _odd(b, address):
    return b.bitcast(b.and_(load(b, address, VI), consti(-65536)), VF)


@op(Vec, types.int64)
def _even_of_one(b, word):
    value = b.trunc(b.shl(word, ir.Constant(I64, 16)), ir.IntType(32))
    return b.bitcast(splat(b, value), VF)


@op(Vec, types.int64)
def _odd_of_one(b, word):
    value = b.trunc(b.and_(word, ir.Constant(I64, -65536)), ir.IntType(32))
    return b.bitcast(splat(b, value), VF)


def tdpbf16ps(total: int, left: int, right: int) -> None:
    state = _state()
    rows = _operands(state, total, left, right)
    for r in range(rows):
        even = odd = vsplat(0.0)
        for k in range(16):
            word, line = get32(_at(state, left) + 64 * r + 4 * k), _at(state, right) + 64 * k
            even = vfma(_even_of_one(word), _even(line), even)
            odd = vfma(_odd_of_one(word), _odd(line), odd)
        to = _at(state, total) + 64 * r
        vstore(to, vadd(vload(to), vadd(even, odd)))
    _clear_from(state, total, rows)


@op(types.void, types.int64, types.int64, types.int64)
def _add_byte_products(b, to, word, line):
    """To 16 int32: the sum of unsigned bytes of `word` times signed bytes of each of 16 words."""
    sums, words = load(b, to, VI), load(b, line, VI)
    for i in range(4):
        one = b.and_(b.lshr(word, ir.Constant(I64, 8 * i)), ir.Constant(I64, 255))
        signed = b.ashr(b.shl(words, consti(24 - 8 * i)), consti(24))
        sums = b.add(sums, b.mul(splat(b, b.trunc(one, ir.IntType(32))), signed))
    store(b, sums, to)


def tdpbusd(total: int, left: int, right: int) -> None:
    state = _state()
    rows = _operands(state, total, left, right)
    for r in range(rows):
        for k in range(16):
            word = get32(_at(state, left) + 64 * r + 4 * k)
            _add_byte_products(_at(state, total) + 64 * r, word, _at(state, right) + 64 * k)
    _clear_from(state, total, rows)


_EMULATED = {
    function.__name__: cfunc(
        types.void(*[types.int64] * count), error_model="numpy", nogil=True
    )(function)
    for function, count in (
        (ldtilecfg, 1), (tilerelease, 0), (tilezero, 1), (tileloadd64, 3), (tilestored64, 3),
        (tdpbf16ps, 3), (tdpbusd, 3),
    )
}  # fmt: skip


def instruction(b: Any, name: str, *values: Any) -> None:
    """In place of `amx.instruction`: call the function of that name above."""
    words = [
        b.ptrtoint(v, I64)
        if isinstance(v.type, ir.PointerType)
        else b.zext(v, I64)
        if v.type != I64
        else v
        for v in values
    ]
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(words))
    address = ir.Constant(I64, _EMULATED[name].address)
    b.call(b.inttoptr(address, kind.as_pointer()), words)


def pytest_configure() -> None:
    install()


def install() -> None:
    """From here on kernels made for AMX are compiled to emulated instructions, and used."""
    amx.instruction = instruction
    target.has_tiles = lambda: True
    target.int8_unit = lambda: "tiles"
