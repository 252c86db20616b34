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

from octavo.kernels.codes import LEVELS, Form, linear
from octavo.quant.base import BlockCodec, Parts


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


def _scale_and_minimum_codes(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of a Q4_K or Q5_K block -> scale and minimum of its 8 groups, uint8 [n, 8].

    Twelve bytes hold eight 6-bit scales and eight 6-bit minima: groups 0-3 in the low six bits
    of bytes 0-3 and 4-7; groups 4-7 have their low four bits in bytes 8-11 and their high two
    in the top of bytes 0-7.
    """
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    return scales, torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)


def _scales_and_minima(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same multiplied by the block's factors, fp32 [n, 8, 1]."""
    scales, minima = _scale_and_minimum_codes(raw)
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


def _q2_k(raw: torch.Tensor) -> torch.Tensor:
    both = raw[:, :16]
    scale = (both & 15).float() * _half(raw[:, 80:82])
    minimum = (both >> 4).float() * _half(raw[:, 82:84])
    values = _quarters(raw[:, 16:80]).float()
    return (values.mul_(scale.unsqueeze(2)) - minimum.unsqueeze(2)).flatten(1)


def _q3_k(raw: torch.Tensor) -> torch.Tensor:
    codes, terms, _ = _q3_k_codes(raw)
    scale = terms.float() * _half(raw[:, 108:110]).unsqueeze(2)
    return codes.view(-1, 16, 16).float().sub_(4).mul_(scale).flatten(1)


def _iq4_nl(raw: torch.Tensor) -> torch.Tensor:
    return _levels(_nibbles(raw[:, 2:])).mul_(_half(raw[:, :2]))


def _iq4_xs(raw: torch.Tensor) -> torch.Tensor:
    codes, terms, _ = _iq4_xs_codes(raw)
    scale = terms.float() * _half(raw[:, :2]).unsqueeze(2)
    return _levels(codes).view(-1, 8, 32).mul_(scale).flatten(1)


def _levels(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32)[codes.int()]


# -- the same as codes: see BlockCodec.codes -------------------------------------------------------


def _halves(raw: torch.Tensor, count: int) -> torch.Tensor:
    """float16 [n, 1, count] of the first bytes."""
    return raw[:, : 2 * count].contiguous().view(torch.float16).unsqueeze(1)


def _q4_0_codes(raw: torch.Tensor) -> Parts:
    return _nibbles(raw[:, 2:]), _halves(raw, 1), None


def _q4_1_codes(raw: torch.Tensor) -> Parts:
    return _nibbles(raw[:, 4:]), _halves(raw, 2), None


def _q5_0_codes(raw: torch.Tensor) -> Parts:
    return _nibbles(raw[:, 6:]) | _high_bits(raw[:, 2:6]), _halves(raw, 1), None


def _q5_1_codes(raw: torch.Tensor) -> Parts:
    return _nibbles(raw[:, 8:]) | _high_bits(raw[:, 4:8]), _halves(raw, 2), None


def _q8_0_codes(raw: torch.Tensor) -> Parts:
    return raw[:, 2:] ^ 128, _halves(raw, 1), None


def _q2_k_codes(raw: torch.Tensor) -> Parts:
    terms = torch.stack((raw[:, :16] & 15, -(raw[:, :16] >> 4).to(torch.int8)), 2)
    return _quarters(raw[:, 16:80]).flatten(1), terms.to(torch.int8), _halves(raw[:, 80:], 2)


def _q3_k_codes(raw: torch.Tensor) -> Parts:
    """Sixteen scales of six bits: the low four in bytes 96-103, the high two in bytes 104-107."""
    low, high = raw[:, 96:104], raw[:, 104:108]
    scales = torch.cat((low & 15, low >> 4), 1) | (_bits(high, 2, 4).flatten(1) << 4)
    top = _bits(raw[:, :32], 1, 8).reshape(len(raw), 16, 16)
    codes = _quarters(raw[:, 32:96]) | (top << 2)
    terms = scales.to(torch.int8).sub_(32).unsqueeze(2)
    return codes.flatten(1), terms, _halves(raw[:, 108:], 1)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """64 bytes of four 2-bit fields -> [n, 16, 16], each 32 bytes giving eight groups."""
    return _bits(packed.reshape(-1, 32), 2, 4).reshape(len(packed), 16, 16)


def _q4_k_codes(raw: torch.Tensor) -> Parts:
    return _groups(raw[:, 16:]).flatten(1), _both_terms(raw), _halves(raw, 2)


def _q5_k_codes(raw: torch.Tensor) -> Parts:
    codes = _groups(raw[:, 48:]) | (_bits(raw[:, 16:48], 1, 8) << 4)
    return codes.flatten(1), _both_terms(raw), _halves(raw, 2)


def _both_terms(raw: torch.Tensor) -> torch.Tensor:
    scales, minima = _scale_and_minimum_codes(raw)
    return torch.stack((scales.to(torch.int8), -minima.to(torch.int8)), 2)


def _q6_k_codes(raw: torch.Tensor) -> Parts:
    low = _bits(raw[:, :128].reshape(-1, 64), 4, 2).reshape(len(raw), -1)
    high = _bits(raw[:, 128:192].reshape(-1, 32), 2, 4).reshape(len(raw), -1)
    terms = raw[:, 192:208].contiguous().view(torch.int8).unsqueeze(2)
    return low | (high << 4), terms, _halves(raw[:, 208:], 1)


def _iq4_nl_codes(raw: torch.Tensor) -> Parts:
    return _nibbles(raw[:, 2:]), _halves(raw, 1), None


def _iq4_xs_codes(raw: torch.Tensor) -> Parts:
    """Eight scales of six bits: the low four of each in bytes 4-7, the high two in bytes 2-3."""
    low = _bits(raw[:, 4:8], 4, 2).transpose(1, 2).flatten(1)
    high = _bits(raw[:, 2:4], 2, 4).transpose(1, 2).flatten(1)
    terms = (low | (high << 4)).to(torch.int8).sub_(32).unsqueeze(2)
    return _nibbles(raw[:, 8:].reshape(-1, 16)).view(len(raw), 256), terms, _halves(raw, 1)


def _form(bits: int, group: int, terms: str, offset: str, values: tuple[int, ...] | int) -> Form:
    """values: all of them, or the first of consecutive ones."""
    return Form(
        bits, group, terms, offset, linear(bits, values) if isinstance(values, int) else values
    )


# Name of a `checkpoint.gguf` format -> how its blocks are decoded.
BLOCKS: Mapping[str, BlockCodec] = {
    "Q4_0": BlockCodec(_q4_0, _form(4, 32, "half", "none", -8), _q4_0_codes),
    "Q4_1": BlockCodec(_q4_1, _form(4, 32, "half", "minimum", 0), _q4_1_codes),
    "Q5_0": BlockCodec(_q5_0, _form(5, 32, "half", "none", -16), _q5_0_codes),
    "Q5_1": BlockCodec(_q5_1, _form(5, 32, "half", "minimum", 0), _q5_1_codes),
    "Q8_0": BlockCodec(_q8_0, _form(8, 32, "half", "none", -128), _q8_0_codes),
    "Q2_K": BlockCodec(_q2_k, _form(4, 16, "super", "minimum", 0), _q2_k_codes),
    "Q3_K": BlockCodec(_q3_k, _form(4, 16, "super", "none", -4), _q3_k_codes),
    "Q4_K": BlockCodec(_q4_k, _form(4, 32, "super", "minimum", 0), _q4_k_codes),
    "Q5_K": BlockCodec(_q5_k, _form(5, 32, "super", "minimum", 0), _q5_k_codes),
    "Q6_K": BlockCodec(_q6_k, _form(6, 16, "super", "none", -32), _q6_k_codes),
    "IQ4_NL": BlockCodec(_iq4_nl, _form(4, 32, "half", "none", LEVELS), _iq4_nl_codes),
    "IQ4_XS": BlockCodec(_iq4_xs, _form(4, 32, "super", "none", LEVELS), _iq4_xs_codes),
}
