"""The activations of gated MLPs, for the kernels that fuse one."""

from typing import Any

import numpy as np

from octavo.kernels.cpu.simd import Vec, jit, vadd, vdiv, vexp2, vfma, vmin, vmul, vsplat

_LOG2E = 1.4426950408889634
_GELU = 1.5957691216057308  # 2 sqrt(2 / pi)


def activated(name: str, limit: float = 100.0) -> Any:
    """A function of one vector, "silu" or "gelu_tanh".

    Both are g * sigmoid(u): u = g for silu, u = 2 sqrt(2 / pi) (g + 0.044715 g^3) for gelu.
    limit: of -u in base 2, so that exp2 stays finite; below it the result is about g * 2^-limit.
    """
    gelu = {"silu": False, "gelu_tanh": True}[name]

    @jit(returns=Vec)
    def activate(g):
        slope = vsplat(np.float32(-_LOG2E * (_GELU if gelu else 1.0)))
        u = vfma(vmul(vsplat(np.float32(0.044715)), vmul(g, g)), g, g) if gelu else g
        power = vexp2(vmin(vmul(u, slope), vsplat(np.float32(limit))))
        return vdiv(g, vadd(vsplat(np.float32(1.0)), power))

    return activate
