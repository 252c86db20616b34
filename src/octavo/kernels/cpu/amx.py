"""AMX: the tile instructions, their configuration, and the tile GEMM built from them.

Every tile instruction of every kernel is emitted by `instruction`, so that tests can replace it
by an emulation on a processor without AMX. A tile register holds up to 16 rows of 64 bytes.
Registers 0-3 hold sums, 4-5 rows of the left operand, 6-7 the right operand.

Numerics: `tdpbf16ps` adds the products of 16 pairs of bfloat16 to a float32, `tdpbusd` those of
16 x 4 pairs of an unsigned and a signed byte to an int32.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.simd import I8, I64, call, jit, loop, offset, op, pointer, seti

# (step of k) -> (column of registers) -> (address, stride) of a tile of the right operand
RightTiles = Callable[[Any], Callable[[int], tuple[Any, Any]]]


def instruction(b: Any, name: str, *values: Any) -> None:
    """Emit one tile instruction: registers as int8, addresses as pointers, strides as int64."""
    call(b, f"llvm.x86.{name}", ir.VoidType(), *values)


def _register(number: int) -> Any:
    return ir.Constant(I8, number)


def _load(b: Any, register: int, address: Any, stride: Any) -> None:
    instruction(b, "tileloadd64", _register(register), pointer(b, address, I8), stride)


@op(types.void, types.int64)
def _load_config(b, config):
    instruction(b, "ldtilecfg", pointer(b, config, I8))


@op(types.void)
def release(b):
    """Release the tile registers; oneDNN configures them again."""
    instruction(b, "tilerelease")


@jit
def configure(config, first, second):
    """Write the 64 bytes at `config` and load them: the shapes of the registers, all cleared.

    Sums and left operands have 64 bytes in each of `first` rows (upper registers) and of `second`
    rows (lower registers, where `add_tiles` has a height of 2); right operands are 16 x 64.
    """
    seti(config, 1)  # palette
    for i in range(1, 8):
        seti(config + 8 * i, 0)
    seti(config + 16, 0x0040004000400040)  # bytes per row of registers 0-3
    seti(config + 24, 0x0040004000400040)  # and of 4-7
    rows = first * 0x0000000100000101 + second * 0x0000010001010000
    seti(config + 48, 0x1010000000000000 + rows)
    _load_config(config)


def clear_tiles(b: Any, height: int, width: int) -> None:
    """Registers height x width = 0."""
    for register in range(height * width):
        instruction(b, "tilezero", _register(register))


def add_tiles(
    b: Any, height: int, width: int, steps: Any, left: Any, left_stride: Any, right: RightTiles,
    dot: str = "tdpbf16ps",
) -> None:  # fmt: skip
    """Registers height x width += sum over `steps` of left tiles, 64 bytes deep, times right tiles.

    Step i of the left operand is at left + 64 * i. dot: the instruction, which decides what the
    64 bytes hold.
    """

    def body(i):
        here = b.add(left, b.mul(i, ir.Constant(I64, 64)))
        for t in range(height):
            row = b.add(here, b.mul(left_stride, ir.Constant(I64, 16 * t)))
            _load(b, 4 + t, row, left_stride)
        tile = right(i)
        for j in range(width):
            register = 6 + j % 2
            _load(b, register, *tile(j))
            for t in range(height):
                instruction(b, dot, *map(_register, (t * width + j, 4 + t, register)))
        return []

    loop(b, steps, [], body)


def sum_tiles(
    b: Any, height: int, width: int, steps: Any, left: Any, left_stride: Any, right: RightTiles,
    dot: str = "tdpbf16ps",
) -> None:  # fmt: skip
    """The same sums alone (see `add_tiles`)."""
    clear_tiles(b, height, width)
    add_tiles(b, height, width, steps, left, left_stride, right, dot)


def store_tiles(b: Any, height: int, width: int, base: Any, stride: Any) -> None:
    """Store these sums as one matrix at `base`."""
    for t in range(height):
        row = b.add(base, b.mul(stride, ir.Constant(I64, 16 * t)))
        for j in range(width):
            to = pointer(b, offset(b, row, 64 * j), I8)
            instruction(b, "tilestored64", _register(t * width + j), to, stride)
