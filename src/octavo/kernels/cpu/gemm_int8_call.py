"""Quantized weights laid out for `gemm_int8`, and the calls of its products."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from octavo.kernels import reference
from octavo.kernels.cpu import abi, openmp, target
from octavo.kernels.cpu.arguments import Address
from octavo.kernels.cpu.kernel import FLOAT_NAMES, address, empty, is_recording, kernel

_PANEL, _STEP, _PAIR = 16, 64, 32
_PARALLEL_FROM = 1 << 15  # weights; below, one thread finishes before a second has started


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_size, in_size] as `gemm_int8` reads it. factors: None for int8."""

    in_size: int
    out_size: int
    weights: torch.Tensor
    scales: torch.Tensor
    added: torch.Tensor
    factors: torch.Tensor | None = None
    group: int = 0

    @property
    def num_bytes(self) -> int:
        parts = (self.weights, self.scales, self.added, self.factors)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def interleaved(self) -> "PackedWeight":
        """Panels alternately from the first half of the columns and from the second."""

        def permuted(values: torch.Tensor) -> torch.Tensor:
            return _interleaved(values.view(len(self.scales), -1)).view(values.shape)

        return replace(
            self, weights=permuted(self.weights), scales=permuted(self.scales),
            added=permuted(self.added),
            factors=None if self.factors is None else permuted(self.factors),
        )  # fmt: skip


def pack_int8(weight: torch.Tensor, scale: torch.Tensor) -> PackedWeight:
    """From int8 [N, K] and float32 [N]."""
    n, k = weight.shape
    padded = _padded(weight)
    panels = padded.view(-1, _PANEL, padded.shape[1] // _STEP, _STEP // 4, 4)
    laid = panels.permute(0, 2, 3, 1, 4).contiguous().view(-1)
    return PackedWeight(k, n, laid, *_column_terms(weight, scale))


def pack_int4(
    codes: torch.Tensor, m: torch.Tensor, o: torch.Tensor, scale: torch.Tensor, group: int
) -> PackedWeight:
    """From codes uint8 [N, K] of 0 to 15, m and o int32 [N, groups of `group` k], float32 [N].

    group: a multiple of 32; the last one may be shorter. w = (c * m + o) >> 8 must fit int8.
    """
    n, k = codes.shape
    terms = _column_terms(reference.int4_weights(codes, m, o, group), scale)
    padded = _padded(codes)
    parts = padded.view(-1, _PANEL, padded.shape[1] // 32, 4, 2, 2, 2)
    pairs = parts[..., 0] | (parts[..., 1] << 4)  # panel, column, 32 k, quarter, half, two k
    laid = pairs.permute(0, 2, 3, 1, 5, 4).contiguous().view(-1)
    both = (m & 0xFFFF) | ((o & 0xFFFF) << 16)
    groups = -(-padded.shape[1] // group)
    both = F.pad(both, (0, groups - m.shape[1], 0, -n % _PAIR)).view(-1, _PANEL, groups)
    return PackedWeight(k, n, laid, *terms, both.transpose(1, 2).contiguous(), group // 32)


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Columns in pairs of panels, k in whole steps; padding has the weight 0."""
    n, k = values.shape
    return F.pad(values, (0, -k % _STEP, 0, -n % _PAIR))


def _column_terms(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    more = (0, -len(scale) % _PAIR)
    return F.pad(scale.float(), more), F.pad(-128 * weight.sum(1, dtype=torch.int32), more)


class Workspace:
    """Scratch for rows in another form and unpacked panels, shared by the products of a model."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, rows: int, stride: int, scratch: int) -> tuple[Address, Address, Address]:
        """Addresses of q [rows up to whole tiles, stride], of s and of the threads' scratch."""
        tall = -(-rows // 32) * 32
        begin = self.memory(tall * (stride + 4) + scratch)
        return begin, Address(begin + tall * stride), Address(begin + tall * (stride + 4))

    def memory(self, size: int) -> Address:
        """Of `size` bytes, until the next product."""
        if is_recording():  # each recorded call gets its own memory
            return address(empty((size,), torch.uint8))
        if self._bytes.numel() < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return address(self._bytes)


class QuantizedWeight:
    """The product with a packed weight and a bias [N]: x [rows, K] -> [rows, N], in `dtype`."""

    __slots__ = (
        "_bias",
        "_dtype",
        "_kernel",
        "_pack",
        "_sizes",
        "_threads",
        "_weight",
        "_width",
        "_workspace",
    )  # fmt: skip

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        workspace: Workspace,
        activation: str = "",
    ) -> None:
        """activation: of a weight whose panels alternate between gate and up (see `gated`)."""
        more = (0, -weight.out_size % _PAIR)
        self._weight, self._dtype, self._workspace = weight, dtype, workspace
        self._bias = None if bias is None else F.pad(bias.float(), more)
        bits = "int8" if weight.factors is None else "int4"
        kind = activation or "plain"
        variant = f"{bits}-{FLOAT_NAMES[dtype]}-{target.int8_unit()}-{kind}"
        self._kernel = kernel(abi.GEMM_INT8, variant)
        depth = -(-weight.in_size // _STEP) * _STEP
        stride = depth if depth // 64 % 2 else depth + 64  # rows on different sets of the cache
        self._sizes = stride, 4096 + (_PAIR * depth if bits == "int4" else 0)
        self._threads = 1 if weight.in_size * weight.out_size < _PARALLEL_FROM else 1 << 16
        self._width = weight.out_size // 2 if activation else weight.out_size
        factors = weight.factors
        self._pack = abi.GEMM_INT8.packer(
            in_size=weight.in_size, out_size=weight.out_size, weights=address(weight.weights),
            scales=address(weight.scales), added=address(weight.added),
            bias=0 if self._bias is None else address(self._bias),
            factors=0 if factors is None else address(factors),
            num_groups=0 if factors is None else factors.shape[1], group=weight.group,
            q_stride=stride, scratch_size=self._sizes[1],
        )  # fmt: skip

    def gated(self, activation: str) -> "QuantizedWeight | None":
        """The product activation(gate) * up [rows, N / 2] of a weight of gate over up.

        It replaces this one. None for an activation that the kernel does not have, and if the
        halves are not whole panels.
        """
        if activation not in abi.ACTIVATIONS or self._weight.out_size % _PAIR:
            return None
        return QuantizedWeight(
            self._weight.interleaved(),
            None if self._bias is None else _interleaved(self._bias),
            self._dtype, self._workspace, activation=activation,
        )  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class; x may have gaps between its rows."""
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, (stride, scratch) = x.shape[0], self._sizes
        out, threads = empty((rows, self._width), self._dtype), openmp.threads()
        q, s, spare = self._workspace.reserve(rows, stride, scratch * threads)
        arguments = self._pack(
            rows=rows, x=address(x), x_stride=x.stride(0) * x.element_size(), out=address(out),
            q=q, s=s, scratch=spare,
        )  # fmt: skip
        self._kernel.run(arguments, min(threads, self._threads))
        return out


def _interleaved(values: torch.Tensor) -> torch.Tensor:
    """Panels of 16 columns (the first dimension), alternately from both halves."""
    return values.view(2, -1, _PANEL, *values.shape[1:]).transpose(0, 1).reshape(values.shape)
