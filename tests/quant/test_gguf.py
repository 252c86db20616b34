"""Block decoding against the gguf package, format by format."""

import gguf
import numpy as np
import pytest
import torch

from octavo.checkpoint.gguf import FORMATS
from octavo.kernels.cpu import gguf_call
from octavo.kernels.cpu.weight_only_layout import pack, unpack
from octavo.quant.gguf import BLOCKS
from octavo.quant.tensors import decode_into, grouped_codes

# Where a block has its float16 factors, and their bytes, if not 2 at its start.
FACTORS = {
    "Q4_1": (0, 4), "Q5_1": (0, 4), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q2_K": (80, 4),
    "Q3_K": (108, 2), "Q6_K": (208, 2),
}  # fmt: skip
BLOCKED = [number for number, form in FORMATS.items() if form.dtype is None]


def _blocks(number: int, count: int) -> np.ndarray:
    """Random bytes with finite scales: every bit pattern of the packed integers occurs."""
    form = FORMATS[number]
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (count, form.block_bytes), dtype=np.uint8)
    scale = rng.normal(0, 0.05, (count, 2)).astype(np.float16).view(np.uint8)
    at, width = FACTORS.get(form.name, (0, 2))
    raw[:, at : at + width] = scale[:, :width]
    return raw


@pytest.mark.parametrize("number", BLOCKED, ids=lambda n: FORMATS[n].name)
def test_every_block_format_equals_the_gguf_package(number: int) -> None:
    form = FORMATS[number]
    raw = _blocks(number, 300)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(number))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        out = torch.full((300, form.block_values), torch.nan, dtype=dtype)
        want = torch.from_numpy(expected).to(dtype).view(300, form.block_values)
        for decoder in (None, gguf_call.decode):
            decode_into(form, torch.from_numpy(raw).flatten(), out.fill_(torch.nan), decoder)
            assert torch.equal(out, want), (form.name, dtype, decoder)


def test_every_format_of_the_container_is_decoded_and_no_other() -> None:
    assert {FORMATS[number].name for number in BLOCKED} == set(BLOCKS)


@pytest.mark.parametrize("number", BLOCKED, ids=lambda n: FORMATS[n].name)
def test_packed_codes_stand_for_the_same_values_to_the_bit(number: int) -> None:
    raw, codec = torch.from_numpy(_blocks(number, 300)), BLOCKS[FORMATS[number].name]
    packed = unpack(pack(grouped_codes(codec, raw.view(100, 3, -1))))
    assert packed.form == codec.form
    assert int(packed.codes.max()) < 2**codec.form.bits
    assert torch.equal(packed.dequantized().view(300, -1), codec.decode(raw))
