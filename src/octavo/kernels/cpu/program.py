"""A kernel that runs a list of kernels, each on the whole team, with a barrier after each.

A step of one token makes about nine kernel calls per layer, and each costs about as much in Python
as the work it starts. One call of this kernel runs the whole list instead.
"""

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import I32, I64, geti, jit, op, peek, take

_CALL = abi.PROGRAM.offset
SPINS = 2000  # of about 50 ns each before yielding the processor


@op(types.void, types.int64, types.int64)
def _invoke(b, function, arguments):
    """Call the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [arguments])


@op(types.void, types.int64)
def yield_processor(b, function):
    """Call sched_yield, whose address is given."""
    b.call(b.inttoptr(function, ir.FunctionType(I32, []).as_pointer()), [])


def program() -> Any:
    """The kernel; arguments: `abi.PROGRAM`."""

    @jit
    def wait(a, count):
        """Wait until the total number of arrivals is `count`."""
        spins = 0
        while peek(a) < count:
            spins += 1
            if spins > SPINS:
                yield_processor(geti(a + _CALL.sched_yield))

    @jit
    def work(a):
        kernels, team = geti(a + _CALL.kernels), geti(a + _CALL.team)
        for i in range(geti(a + _CALL.count)):
            _invoke(geti(kernels + 16 * i), geti(kernels + 16 * i + 8))
            take(a)
            wait(a, (i + 1) * team)

    def program(a: int) -> None:
        work(a)

    return program
