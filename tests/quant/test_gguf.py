"""Block decoding against the gguf package, format by format."""

import gguf
import numpy as np
import pytest
import torch

from octavo.checkpoint.gguf import FORMATS
from octavo.kernels.cpu import gguf_call
from octavo.quant.gguf import BLOCKS
from octavo.quant.tensors import decode_into

BLOCKED = [number for number, form in FORMATS.items() if form.dtype is None]


def _blocks(number: int, count: int) -> np.ndarray:
    """Random bytes with finite scales: every bit pattern of the packed integers occurs."""
    form = FORMATS[number]
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (count, form.block_bytes), dtype=np.uint8)
    scale = rng.normal(0, 0.05, (count, 2)).astype(np.float16).view(np.uint8)
    at = 208 if form.name == "Q6_K" else 0
    width = 2 if form.name in ("Q4_0", "Q5_0", "Q8_0", "Q6_K") else 4
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


@pytest.mark.parametrize("name", [name for name, codec in BLOCKS.items() if codec.codes])
def test_codes_are_the_values_before_they_are_multiplied(name: str) -> None:
    number = next(number for number, form in FORMATS.items() if form.name == name)
    raw, codec = torch.from_numpy(_blocks(number, 40)), BLOCKS[name]
    assert codec.codes is not None
    codes, scale, minimum = codec.codes(raw)
    codes, scale, minimum = codes.view(-1, 32), scale.reshape(-1, 1), minimum.reshape(-1, 1)
    assert int(codes.max()) <= 15
    values = codec.decode(raw).view(-1, 32)
    torch.testing.assert_close(codes * scale + minimum, values, rtol=1e-5, atol=1e-5)
