"""What kernels of panels have in common: storing a product's rows, and claiming panels to lay out.

A panel is 32 columns of a weight. With an activation it is [16 of gate | 16 of up].
"""

from collections.abc import Callable
from typing import Any

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.activations import activated
from octavo.kernels.cpu.simd import LANES, geti, jit, row_memory, take, vadd, vload, vmul


def put_rows(fields: Any, dtype: str, sums_bytes: int) -> Any:
    """A function that stores y of sums [n, 32] of a panel, of rows r... .

    fields: offsets of the call's arguments. sums_bytes: from a row of sums to the next.
    """
    size, _, write = row_memory(dtype == "bfloat16")
    silu, gelu = (activated(name) for name in abi.ACTIVATIONS)

    @jit
    def put(a, sums, r, n, panel):
        columns, bias = geti(a + fields.out_size), geti(a + fields.bias)
        kind = geti(a + fields.activation)
        column = panel * 32 if kind == 0 else panel * 16
        stride = geti(a + fields.out_stride)
        out = geti(a + fields.out) + r * stride + column * size
        for i in range(n):
            here = sums + i * sums_bytes
            for c in range(0, min(32 if kind == 0 else 16, columns - column), LANES):
                value = vload(here + c * 4)
                if bias != 0:
                    value = vadd(value, vload(bias + (panel * 32 + c) * 4))
                if kind != 0:
                    up = vload(here + 64 + c * 4)
                    if bias != 0:
                        up = vadd(up, vload(bias + (panel * 32 + 16 + c) * 4))
                    value = vmul(silu(value) if kind == 1 else gelu(value), up)
                write(out + i * stride + c * size, value, columns - column - c)

    return put


def each_panel(fields: Any, panel: Any) -> Callable[[int], None]:
    """A kernel that calls panel(arguments, number) for each panel of a weight; threads claim them.

    fields: offsets of the call's arguments, `rows` among them.
    """

    @jit
    def work(a):
        panels = (geti(a + fields.rows) + 31) // 32
        number = take(a)
        while number < panels:
            panel(a, number)
            number = take(a)

    def kernel(a: int) -> None:
        work(a)

    return kernel
