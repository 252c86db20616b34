"""The compiled decoders against their torch twins, bit for bit."""

import pytest
import torch

from octavo.checkpoint.base import TensorFormat
from octavo.checkpoint.gguf import FORMATS
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.kernel import address, kernel
from octavo.quant.gguf import BLOCKS

KINDS = {form.name: form for form in FORMATS.values() if form.dtype is None}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def stored(kind: TensorFormat, count: int) -> torch.Tensor:
    """Random bytes; scales of every size that a float16 has, subnormal ones and zeros too."""
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count, kind.block_bytes), dtype=torch.uint8, generator=generator)
    at = {"Q6_K": 208, "Q2_K": 80, "Q3_K": 108}.get(kind.name, 0)
    count_halves = 2 if kind.name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") else 1
    bits = torch.randint(0, 0x7C00, (count, count_halves), generator=generator)
    bits[:2] = torch.tensor([0, 1])[:, None]
    bits += 0x8000 * torch.randint(0, 2, bits.shape, generator=generator)
    halves = bits.to(torch.int32).to(torch.uint16)
    raw[:, at : at + 2 * count_halves] = halves.view(torch.uint8).view(count, -1)
    return raw


def run(name: str, dtype: str, raw: torch.Tensor, chunk: int, threads: int = 1) -> torch.Tensor:
    kind = KINDS[name]
    out = torch.full((len(raw), kind.block_values), torch.nan, dtype=DTYPES[dtype])
    pack = abi.GGUF_DECODE.packer(chunk=chunk)
    call = pack(blocks=len(raw), raw=address(raw), out=address(out))
    kernel(abi.GGUF_DECODE, f"{name}-{dtype}").run(call, threads)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_values_equal_the_twin(name: str, dtype: str) -> None:
    raw = stored(KINDS[name], 333)
    wanted = BLOCKS[name].decode(raw).to(DTYPES[dtype])
    assert torch.equal(run(name, dtype, raw, len(raw)), wanted)
    assert not torch.equal(run(name, dtype, raw.flip(0), len(raw)), wanted)


@pytest.mark.parametrize(("chunk", "threads"), [(1, 1), (7, 2), (1000, 2)])
def test_any_split_gives_the_same(chunk: int, threads: int) -> None:
    raw = stored(KINDS["Q4_1"], 100)
    whole = run("Q4_1", "bfloat16", raw, 100)
    assert torch.equal(run("Q4_1", "bfloat16", raw, chunk, threads), whole)
