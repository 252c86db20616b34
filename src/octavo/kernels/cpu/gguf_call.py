"""The calls of the compiled GGUF block decoders. Free of Numba."""

import torch

from octavo.kernels.cpu import abi
from octavo.kernels.cpu.kernel import FLOAT_NAMES, address, kernel

_pack = abi.GGUF_DECODE.packer()


def decode(name: str, count: int, raw: torch.Tensor, out: torch.Tensor) -> bool:
    """Write the values of `count` blocks of ggml type `name` to `out`; False if not possible.

    raw: uint8, whole blocks in order; out: contiguous, in host memory, float32 or bfloat16.
    """
    if out.device.type != "cpu" or out.dtype not in FLOAT_NAMES:
        return False
    arguments = _pack(blocks=count, chunk=count, raw=address(raw), out=address(out))
    kernel(abi.GGUF_DECODE, f"{name}-{FLOAT_NAMES[out.dtype]}").run(arguments)
    return True
