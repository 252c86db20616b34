"""Stored tensors as values and as codes, whatever stores them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.checkpoint.base import StoredTensor, TensorFormat
from octavo.checkpoint.gguf import FORMATS
from octavo.errors import CheckpointError
from octavo.quant.tensors import (
    decode_into,
    dtype_of,
    holds_codes,
    read_bytes,
    read_codes,
    read_into,
    same_bytes,
)

Q4_1 = FORMATS[3]


def stored(form: TensorFormat, shape: tuple[int, ...], load: Callable[[], Any]) -> StoredTensor:
    return StoredTensor(Path("a file"), shape, form, load)


def blocks(shape: tuple[int, ...], seed: int = 0) -> StoredTensor:
    """Q4_1 with random codes, and scales and minima of 1 to 2."""
    raw = torch.randint(
        0, 256, (Q4_1.num_bytes(shape) // 20, 20), dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    raw[:, 1], raw[:, 3] = 0x3C, 0x3C
    return stored(Q4_1, shape, lambda: bytearray(raw.numpy().tobytes()))


def test_parts_of_a_tensor_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = read_bytes(blocks((100, 32)))
    whole, cut = (torch.empty(100, 32, dtype=torch.float64) for _ in range(2))
    decode_into(Q4_1, raw, whole)
    monkeypatch.setattr("octavo.quant.tensors._BLOCKS_AT_ONCE", 7)
    decode_into(Q4_1, raw, cut)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("number", [0, 1, 30])
def test_plain_numbers_are_rounded(number: int) -> None:
    form = FORMATS[number]
    values = torch.randn(64).to(dtype_of(form))
    out = torch.empty(8, 8)
    read_into(stored(form, (8, 8), lambda: values), out)
    assert torch.equal(out.flatten(), values.float())
    assert dtype_of(form) == values.dtype


def test_a_decoder_of_the_device_is_tried_first() -> None:
    def decoder(name: str, count: int, raw: torch.Tensor, out: torch.Tensor) -> bool:
        assert (name, count, raw.numel()) == ("Q4_1", 8, 160)
        out.fill_(7)
        return not refuse

    out, plain = torch.empty(4, 64), torch.empty(4, 64)
    refuse = False
    read_into(blocks((4, 64)), out, decoder)
    assert bool((out == 7).all())
    refuse = True
    read_into(blocks((4, 64)), out, decoder)
    read_into(blocks((4, 64)), plain)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64), (64,)])
def test_codes_of_a_matrix_and_of_a_stack_of_them(shape: tuple[int, ...]) -> None:
    tensor, values = blocks(shape), torch.empty(shape)
    assert holds_codes(tensor)
    codes = read_codes(tensor)
    assert codes is not None
    read_into(tensor, values)
    assert (codes.group, codes.bits) == (32, 4)
    torch.testing.assert_close(codes.values(), values.view(-1, 64), rtol=1e-5, atol=1e-5)


def test_only_blocks_of_four_bits_hold_codes() -> None:
    for form in (FORMATS[0], FORMATS[8]):
        tensor = stored(form, (32,), lambda: bytearray(1000))
        assert not holds_codes(tensor)
        assert read_codes(tensor) is None


def test_a_format_that_cannot_be_read_is_named() -> None:
    tensor = stored(TensorFormat("F8_E4M3", 1, 1), (8,), lambda: bytearray(8))
    assert dtype_of(tensor.format) is None
    with pytest.raises(CheckpointError, match=r"a file: no way to read .* F8_E4M3"):
        read_into(tensor, torch.empty(8))


def test_tensors_are_compared_by_what_is_stored() -> None:
    first = blocks((4, 64))
    assert same_bytes(first, blocks((4, 64)))
    assert not same_bytes(first, blocks((4, 64), seed=1))
    assert not same_bytes(first, blocks((2, 128)))
    nan = torch.full((8,), torch.nan)
    one = stored(FORMATS[0], (8,), lambda: nan)
    assert same_bytes(one, one)
    assert not same_bytes(one, stored(TensorFormat("I32", 1, 4, "int32"), (8,), lambda: nan))
