"""GGUF's blocks, decoded to the values they stand for.

Layouts are ggml's (`ggml-common.h`): a row is cut into blocks of 32 or 256 values, each block
with its own scale and packed integers. The products are formed in fp32 and in ggml's order, so
the values equal those of the `gguf` package bit for bit; they are rounded once, to the target.

The functions here are the plain form. A device may offer a compiled decoder: the CPU's for fp32 and
bf16 is 40 times as fast. The package itself is not used to load: on SmolLM2 its
reader takes 2.2 s and its decoder 1.5 s, of a start-up that has 3 s.
"""

from collections.abc import Mapping

import torch

from octavo.quant.base import BlockCodec


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
    scale = _half(raw[:, :2])
    return _nibbles(raw[:, 2:]), scale, -8 * scale


def _q4_1_codes(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _nibbles(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q4_k_codes(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale, minimum = _scales_and_minima(raw)
    return _groups(raw[:, 16:]), scale, -minimum


# Name of a `checkpoint.gguf` format -> how its blocks are decoded.
BLOCKS: Mapping[str, BlockCodec] = {
    "Q4_0": BlockCodec(_q4_0, _q4_0_codes),
    "Q4_1": BlockCodec(_q4_1, _q4_1_codes),
    "Q5_0": BlockCodec(_q5_0),
    "Q5_1": BlockCodec(_q5_1),
    "Q8_0": BlockCodec(_q8_0),
    "Q4_K": BlockCodec(_q4_k, _q4_k_codes),
    "Q5_K": BlockCodec(_q5_k),
    "Q6_K": BlockCodec(_q6_k),
}
