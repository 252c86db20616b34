"""Block decoding against the gguf package, format by format."""

import gguf
import numpy as np
import pytest
import torch

from octavo.kernels.cpu import gguf_call
from octavo.quant.gguf import FORMATS, decode_into

BLOCKED = [number for number, kind in FORMATS.items() if kind.decode is not None]


def _blocks(number: int, count: int) -> np.ndarray:
    """Random bytes with finite scales: every bit pattern of the packed integers occurs."""
    kind = FORMATS[number]
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    scale = rng.normal(0, 0.05, (count, 2)).astype(np.float16).view(np.uint8)
    at = 208 if kind.name == "Q6_K" else 0
    width = 2 if kind.name in ("Q4_0", "Q5_0", "Q8_0", "Q6_K") else 4
    raw[:, at : at + width] = scale[:, :width]
    return raw


@pytest.mark.parametrize("number", BLOCKED, ids=lambda n: FORMATS[n].name)
def test_every_block_format_equals_the_gguf_package(number: int) -> None:
    kind = FORMATS[number]
    raw = _blocks(number, 300)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(number))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        out = torch.full((300, kind.block_values), torch.nan, dtype=dtype)
        want = torch.from_numpy(expected).to(dtype).view(300, kind.block_values)
        for decoder in (None, gguf_call.decode):
            decode_into(kind, torch.from_numpy(raw).flatten(), out.fill_(torch.nan), decoder)
            assert torch.equal(out, want), (kind.name, dtype, decoder)


def test_sizes_equal_the_gguf_package() -> None:
    for number, kind in FORMATS.items():
        quant = gguf.GGMLQuantizationType(number)
        assert quant.name == kind.name
        assert gguf.GGML_QUANT_SIZES[quant] == (kind.block_values, kind.block_bytes)


def test_pieces_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(_blocks(3, 100)).flatten()
    whole, pieces = (torch.empty(100, 32, dtype=torch.float64) for _ in range(2))
    decode_into(FORMATS[3], raw, whole)
    monkeypatch.setattr("octavo.quant.gguf._BLOCKS_AT_ONCE", 7)
    decode_into(FORMATS[3], raw, pieces)
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("number", [0, 1, 30])
def test_plain_numbers_are_copied(number: int) -> None:
    kind = FORMATS[number]
    values = torch.randn(64).to(kind.dtype)
    out = torch.empty(8, 8)
    decode_into(kind, values.view(torch.uint8), out)
    assert torch.equal(out.flatten(), values.float())
