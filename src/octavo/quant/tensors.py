"""Stored tensors as values, or as the codes that they hold."""

from collections.abc import Callable

import torch

from octavo.checkpoint.base import StoredTensor, TensorFormat
from octavo.errors import CheckpointError
from octavo.kernels.codes import Form, GroupedCodes, StoredRows
from octavo.quant.base import BlockCodec, Codes, Region
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


def form_of(form: TensorFormat) -> Form | None:
    """The codes that blocks of a format hold; None for plain numbers."""
    codec = BLOCKS.get(form.name)
    return None if codec is None else codec.form


def holds_codes(tensor: StoredTensor) -> bool:
    """Whether `read_codes` gives something."""
    codec = BLOCKS.get(tensor.format.name)
    return codec is not None and codec.is_int4


def read_into(
    tensor: StoredTensor,
    out: torch.Tensor,
    decoder: BlockDecoder | None = None,
    region: Region | None = None,
) -> None:
    """Decode into contiguous `out` of the same number of values, rounding to its dtype.

    decoder: of a device, tried first for blocks. region: the part that is read; None: all.
    """
    if dtype_of(tensor.format) is None:
        raise CheckpointError(f"{tensor.file}: no way to read tensors of type {tensor.format.name}")
    if not out.numel():
        return
    if region is None:
        decode_into(tensor.format, read_bytes(tensor), out, decoder)
    elif tensor.format.dtype is not None:
        values = read_bytes(tensor).view(getattr(torch, tensor.format.dtype)).view(tensor.shape)
        out.view([end - begin for begin, end in region]).copy_(values[_slices(region)])
    else:
        _read_blocks(tensor, out, decoder, region)


def _read_blocks(
    tensor: StoredTensor, out: torch.Tensor, decoder: BlockDecoder | None, region: Region
) -> None:
    form, (begin, end) = tensor.format, region[-1]
    raw, start = _blocks(tensor, region)
    target = out.view(len(raw), end - begin)
    if (begin, end) == (0, tensor.shape[-1]) and raw.is_contiguous():
        decode_into(form, raw.reshape(-1), target, decoder)
        return
    rows = max(1, _BLOCKS_AT_ONCE // raw.shape[1])
    for at in range(0, len(raw), rows):
        some = raw[at : at + rows]
        values = torch.empty((len(some), raw.shape[1] * form.block_values), dtype=out.dtype)
        decode_into(form, some.reshape(-1), values, decoder)
        target[at : at + rows].copy_(values[:, begin - start : end - start])


def _blocks(tensor: StoredTensor, region: Region) -> tuple[torch.Tensor, int]:
    """The whole blocks around a region, uint8 [rows, blocks of a row, bytes of a block], and the
    column at which they start."""
    form, (begin, end) = tensor.format, region[-1]
    first, last = begin // form.block_values, -(-end // form.block_values)
    raw = read_bytes(tensor).view(*tensor.shape[:-1], -1, form.block_bytes)
    part = raw[_slices(region[:-1])][..., first:last, :]
    return part.reshape(-1, *part.shape[-2:]), first * form.block_values


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in region)


def region_bytes(tensor: StoredTensor, region: Region | None) -> int:
    """The stored bytes that are read for a region."""
    if region is None:
        return tensor.num_bytes
    *lead, (begin, end) = region
    size = tensor.format.block_values
    columns = (-(-end // size) - begin // size) * size if end > begin else 0
    return tensor.format.num_bytes((*(stop - start for start, stop in lead), columns))


def read_codes(tensor: StoredTensor, region: Region | None = None) -> Codes | None:
    """The 4-bit codes of a tensor [..., K] of blocks, as [N, K] in groups of 32; None for any
    other format. region: the part that is read, which tears no group; None: all."""
    codec = BLOCKS.get(tensor.format.name)
    if codec is None or not codec.is_int4:
        return None
    region = region or tuple((0, size) for size in tensor.shape)
    raw, start = _blocks(tensor, region)
    begin, end = region[-1]
    grouped = grouped_codes(codec, raw)
    scale, *offset = grouped.wide_terms().unbind(2)
    minimum = scale * codec.form.values[0]
    whole = Codes(grouped.codes, scale, minimum + offset[0] if offset else minimum, 32, 4)
    return whole.columns(begin - start, end - start)


def stored_rows(
    tensor: StoredTensor,
    region: Region | None,
    order: torch.Tensor | None,
    decode: Callable[[torch.Tensor], None],
    release: Callable[[], None],
) -> StoredRows | None:
    """Rows of a matrix of blocks, where they lie; None for another format, or a region that tears
    blocks. order, decode, release: as of `StoredRows`."""
    codec, form = BLOCKS.get(tensor.format.name), tensor.format
    if codec is None or len(tensor.shape) != 2:
        return None
    rows, columns = region or tuple((0, size) for size in tensor.shape)
    if any(border % form.block_values for border in columns):
        return None
    first, last = (border // form.block_values * form.block_bytes for border in columns)
    raw = read_bytes(tensor).view(tensor.shape[0], -1)[slice(*rows), first:last]
    return StoredRows(
        form.name, codec.form, raw, columns[1] - columns[0], order, decode, release
    )  # fmt: skip


def grouped_codes(codec: BlockCodec, raw: torch.Tensor) -> GroupedCodes:
    """Blocks [N, blocks of a row, bytes of a block] as codes [N, K]."""
    rows = len(raw)
    codes, terms, factors = codec.codes(raw.reshape(-1, raw.shape[-1]))
    each = codec.form.num_terms
    return GroupedCodes(
        codec.form, codes.reshape(rows, -1), terms.reshape(rows, -1, each),
        None if factors is None else factors.reshape(rows, -1, each),
    )  # fmt: skip


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
