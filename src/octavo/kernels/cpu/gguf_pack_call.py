"""The calls of the kernels that lay out GGUF's blocks for weight-only products. Free of Numba."""

from collections.abc import Sequence

import torch

from octavo.kernels.codes import StoredRows
from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.kernel import address, kernel
from octavo.kernels.cpu.weight_only_layout import Allocate, PackedCodes, interleaved_columns

_pack = abi.GGUF_PACK.packer()


def pack(
    parts: Sequence[StoredRows], interleaved: bool = False, allocate: Allocate | None = None
) -> PackedCodes:
    """Rows of one block type, as `weight_only_layout.pack` lays them out.

    interleaved: as `PackedCodes.interleaved` has them.
    """
    rows = torch.cat([_addresses(part) for part in parts])
    if interleaved:
        rows = interleaved_columns(rows)
    first = parts[0]
    packed = PackedCodes.empty(first.form, len(rows), first.columns, allocate)
    arguments = _pack(
        rows=len(rows), columns=first.columns, raw=address(rows), codes=address(packed.codes),
        terms=address(packed.terms),
        factors=0 if packed.factors is None else address(packed.factors),
    )  # fmt: skip
    kernel(abi.GGUF_PACK, first.name).run(arguments, openmp.threads())
    for part in parts:
        part.release()
    return packed


def _addresses(part: StoredRows) -> torch.Tensor:
    order = torch.arange(len(part.raw)) if part.order is None else part.order
    return order * part.raw.stride(0) + address(part.raw)
