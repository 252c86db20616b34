"""Stored tensors as values, or as the codes that they hold."""

from collections.abc import Callable

import torch

from octavo.checkpoint.base import StoredTensor, TensorFormat
from octavo.errors import CheckpointError
from octavo.quant.base import Codes
from octavo.quant.registry import BLOCKS

_BLOCKS_AT_ONCE = 4096
# (name of a format, number of blocks, the stored blocks, contiguous output) -> whether it wrote
# the values; if not, the plain form does.
BlockDecoder = Callable[[str, int, torch.Tensor, torch.Tensor], bool]


def dtype_of(form: TensorFormat) -> torch.dtype | None:
    """The type of the values: float32 for blocks; None for a format that cannot be read."""
    if form.dtype is not None:
        dtype: torch.dtype = getattr(torch, form.dtype)
        return dtype
    return torch.float32 if form.name in BLOCKS else None


def holds_codes(tensor: StoredTensor) -> bool:
    """Whether `read_codes` gives something."""
    codec = BLOCKS.get(tensor.format.name)
    return codec is not None and codec.codes is not None


def read_into(tensor: StoredTensor, out: torch.Tensor, decoder: BlockDecoder | None = None) -> None:
    """Decode into contiguous `out` of the same number of values, rounding to its dtype.

    decoder: of a device, tried first for blocks.
    """
    if dtype_of(tensor.format) is None:
        raise CheckpointError(f"{tensor.file}: no way to read tensors of type {tensor.format.name}")
    if tensor.num_bytes:
        decode_into(tensor.format, read_bytes(tensor), out, decoder)


def read_codes(tensor: StoredTensor) -> Codes | None:
    """The 4-bit codes of a tensor [..., K] of blocks, as [N, K] in groups of 32; None for any
    other format."""
    codec = BLOCKS.get(tensor.format.name)
    if codec is None or codec.codes is None:
        return None
    codes, scale, minimum = codec.codes(read_bytes(tensor).view(-1, tensor.format.block_bytes))
    size = tensor.shape[-1]
    rows = codes.numel() // size
    return Codes(
        codes.reshape(rows, size), scale.reshape(rows, -1), minimum.reshape(rows, -1), 32, 4
    )


def same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors are stored alike."""
    if (a.shape, a.format) != (b.shape, b.format):
        return False
    return not a.num_bytes or torch.equal(read_bytes(a), read_bytes(b))


def read_bytes(tensor: StoredTensor) -> torch.Tensor:
    """The stored bytes, uint8 [num_bytes]: a view of the mapped file, not to be written."""
    data = tensor.load()
    if isinstance(data, torch.Tensor):
        return data.reshape(-1).view(torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)


def decode_into(
    form: TensorFormat, raw: torch.Tensor, out: torch.Tensor, decoder: BlockDecoder | None = None
) -> None:
    """Write the values of `raw` (uint8 on the CPU, whole blocks in order) to contiguous `out`."""
    flat = out.view(-1)
    if form.dtype is not None:
        flat.copy_(raw.view(getattr(torch, form.dtype)))
        return
    count = raw.numel() // form.block_bytes
    if decoder is not None and decoder(form.name, count, raw, flat):
        return
    decode, blocks = BLOCKS[form.name].decode, raw.view(count, form.block_bytes)
    target = flat.view(count, form.block_values)
    for begin in range(0, count, _BLOCKS_AT_ONCE):
        span = slice(begin, begin + _BLOCKS_AT_ONCE)
        target[span].copy_(decode(blocks[span]))
