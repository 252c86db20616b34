"""A list of kernels as one: each runs on the whole team, the next when all have finished.

A step of one token calls a kernel some nine times a layer, and each call costs about as much in
the interpreter as the work it starts. One call of this kernel walks the list instead.
"""

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.simd import I32, I64, geti, jit, op, peek, take

_CALL = abi.PROGRAM.offset
_SPINS = 2000  # of some 50 ns each before the processor is offered to others


@op(types.void, types.int64, types.int64)
def _invoke(b, function, arguments):
    """Call the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    b.call(b.inttoptr(function, kind.as_pointer()), [arguments])


@op(types.void, types.int64)
def _yield(b, function):
    """Call sched_yield, whose address is given."""
    b.call(b.inttoptr(function, ir.FunctionType(I32, []).as_pointer()), [])


def program() -> Any:
    """The kernel; arguments: `abi.PROGRAM`."""

    @jit
    def wait(a, count):
        """Until `count` arrivals have been counted in all."""
        spins = 0
        while peek(a) < count:
            spins += 1
            if spins > _SPINS:
                _yield(geti(a + _CALL.sched_yield))

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
