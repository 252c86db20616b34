"""GGUF's block formats, decoded to the values they stand for.

Layouts are ggml's (`ggml-common.h`): a row is cut into blocks of 32 or 256 values, each block
with its own scale and packed integers. The products are formed in fp32 and in ggml's order, so
the values equal those of the `gguf` package bit for bit; they are rounded once, to the target.

The functions here are the plain form. A device may offer a compiled decoder: the CPU's for fp32 and
bf16 is 40 times as fast. The package itself is not used to load: on SmolLM2 its
reader takes 2.2 s and its decoder 1.5 s, of a start-up that has 3 s.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.quant.base import Codes, Decode

_BLOCKS_AT_ONCE = 4096
# (name of a format, number of blocks, the stored blocks, contiguous output) -> whether it wrote
# the values; if not, the plain form does.
BlockDecoder = Callable[[str, int, torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml type: `block_bytes` bytes hold `block_values` values. decode: None for plain
    numbers of `dtype`."""

    name: str
    block_values: int
    block_bytes: int
    decode: Decode | None = None
    dtype: torch.dtype = torch.float32
    # blocks -> (codes, step, low) of each 32 values, where they are affine codes of 4 bits
    codes: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None

    @property
    def is_float(self) -> bool:
        return self.decode is not None or self.dtype.is_floating_point


def decode_into(
    kind: BlockFormat, raw: torch.Tensor, out: torch.Tensor, decoder: BlockDecoder | None = None
) -> None:
    """Write the values of `raw` (uint8 on the CPU, whole blocks in order) to contiguous `out`.

    decoder: tried first.
    """
    flat = out.view(-1)
    if kind.decode is None:
        flat.copy_(raw.view(kind.dtype))
        return
    count = raw.numel() // kind.block_bytes
    if decoder is not None and decoder(kind.name, count, raw, flat):
        return
    decoded, blocks = kind.decode, raw.view(count, kind.block_bytes)
    target = flat.view(count, kind.block_values)
    for begin in range(0, count, _BLOCKS_AT_ONCE):
        piece = slice(begin, begin + _BLOCKS_AT_ONCE)
        target[piece].copy_(decoded(blocks[piece]))


def codes_of(kind: BlockFormat, raw: torch.Tensor, shape: tuple[int, ...]) -> Codes | None:
    """The stored 4-bit codes of a matrix [N, K], groups of 32; None for any other format."""
    if kind.codes is None:
        return None
    codes, step, low = kind.codes(raw.view(-1, kind.block_bytes))
    n = shape[0]
    return Codes(codes.reshape(shape), step.reshape(n, -1), low.reshape(n, -1), 32, 4)


def _half(raw: torch.Tensor) -> torch.Tensor:
    """fp16 stored in two bytes [n, 2] -> fp32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, k] bytes -> [n, 2k]: all low halves, then all high halves."""
    packed = packed.contiguous()
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """[n, k] bytes -> [n, count, k]: field i of `width` bits of every byte."""
    shifts = torch.arange(0, width * count, width, dtype=torch.uint8).view(1, count, 1)
    return (packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)


def _high_bits(packed: torch.Tensor) -> torch.Tensor:
    """A 32-bit little-endian mask in 4 bytes [n, 4] -> its bits as 0 or 16, [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(2) >> shifts) & 1) << 4).flatten(1)


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    return _nibbles(raw[:, 2:]).float().sub_(8).mul_(_half(raw[:, :2]))


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    return _nibbles(raw[:, 4:]).float().mul_(_half(raw[:, :2])).add_(_half(raw[:, 2:4]))


def _q5_0(raw: torch.Tensor) -> torch.Tensor:
    values = _nibbles(raw[:, 6:]) | _high_bits(raw[:, 2:6])
    return values.float().sub_(16).mul_(_half(raw[:, :2]))


def _q5_1(raw: torch.Tensor) -> torch.Tensor:
    values = _nibbles(raw[:, 8:]) | _high_bits(raw[:, 4:8])
    return values.float().mul_(_half(raw[:, :2])).add_(_half(raw[:, 2:4]))


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return raw[:, 2:].contiguous().view(torch.int8).float().mul_(_half(raw[:, :2]))


def _scales_and_minima(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of a Q4_K or Q5_K block -> scale and minimum of its 8 groups, fp32 [n, 8, 1].

    Twelve bytes hold eight 6-bit scales and eight 6-bit minima: groups 0-3 in the low six bits
    of bytes 0-3 and 4-7; groups 4-7 have their low four bits in bytes 8-11 and their high two
    in the top of bytes 0-7.
    """
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    scale = scales.float() * _half(raw[:, :2])
    return scale.unsqueeze(2), (minima.float() * _half(raw[:, 2:4])).unsqueeze(2)


def _groups(raw: torch.Tensor) -> torch.Tensor:
    """The nibbles of a K block: 128 bytes -> [n, 8, 32], each 32 bytes giving two groups."""
    return _bits(raw.reshape(-1, 32), 4, 2).reshape(len(raw), 8, 32)


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales_and_minima(raw)
    return (_groups(raw[:, 16:]).float().mul_(scale) - minimum).flatten(1)


def _q5_k(raw: torch.Tensor) -> torch.Tensor:
    scale, minimum = _scales_and_minima(raw)
    values = _groups(raw[:, 48:]) | (_bits(raw[:, 16:48], 1, 8) << 4)
    return (values.float().mul_(scale) - minimum).flatten(1)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    low = _bits(raw[:, :128].reshape(-1, 64), 4, 2).reshape(len(raw), 8, 32)
    high = _bits(raw[:, 128:192].reshape(-1, 32), 2, 4).reshape(len(raw), 8, 32)
    scale = raw[:, 192:208].contiguous().view(torch.int8).float() * _half(raw[:, 208:210])
    values = (low | (high << 4)).float().sub_(32).view(len(raw), 16, 16)
    return values.mul_(scale.unsqueeze(2)).flatten(1)


def _q4_0_codes(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step = _half(raw[:, :2])
    return _nibbles(raw[:, 2:]), step, -8 * step


def _q4_1_codes(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _nibbles(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q4_k_codes(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step, minimum = _scales_and_minima(raw)
    return _groups(raw[:, 16:]), step, -minimum


# ggml type number -> format
FORMATS: dict[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2, dtype=torch.float16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0, codes=_q4_0_codes),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, codes=_q4_1_codes),
    6: BlockFormat("Q5_0", 32, 22, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, _q5_1),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    12: BlockFormat("Q4_K", 256, 144, _q4_k, codes=_q4_k_codes),
    13: BlockFormat("Q5_K", 256, 176, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, _q6_k),
    30: BlockFormat("BF16", 1, 2, dtype=torch.bfloat16),
}
