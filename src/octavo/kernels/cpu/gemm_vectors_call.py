"""Weights of floats in the layout of `gemm_vectors`, and their products. Imports no Numba."""

import numpy as np
import torch
import torch.nn.functional as F

from octavo.kernels.cpu import abi, openmp, target
from octavo.kernels.cpu.arguments import Address
from octavo.kernels.cpu.kernel import FLOAT_NAMES, address, empty, kernel
from octavo.kernels.cpu.weight_only_call import unit
from octavo.kernels.cpu.weight_only_layout import Allocate, interleaved_columns

_PANEL = 32  # columns
_NAMES = {**FLOAT_NAMES, torch.float16: "float16"}
_PARALLEL_FROM = 1 << 15  # weights; below, one thread finishes before a second has started
_ITEM_BYTES = 512 << 10  # of rows of a work item, of one chunk: they stay in a core's L2
_CHUNK = 2048  # k of a chunk
_pack_panels = abi.PACK_VECTORS.packer()


class VectorWeight:
    """The product with a weight [N, K] and a bias [N]: x [rows, K] -> x W^T + b [rows, N]."""

    __slots__ = (
        "_bias", "_columns", "_depth", "_dtype", "_kernel", "_pack", "_panels", "_threads",
        "_width",
    )  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        allocate: Allocate | None = None,
    ) -> None:
        """dtype: of x and of the result; allocate: memory for what is laid out, None: torch's."""
        assert fits(weight.dtype, dtype), "a weight of a type without a kernel"
        columns, depth = weight.shape
        if bias is not None:
            bias = F.pad(bias.float(), (0, -columns % _PANEL))
        self._set(_laid_out(weight, allocate), bias, dtype, columns, depth)

    def _set(
        self,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        columns: int,
        depth: int,
        activation: str = "",
    ) -> None:
        self._panels, self._bias, self._dtype = panels, bias, dtype
        self._columns, self._depth = columns, depth
        self._width = columns // 2 if activation else columns
        self._kernel = kernel(abi.GEMM_VECTORS, f"{_NAMES[panels.dtype]}-{_NAMES[dtype]}")
        self._threads = 1 if columns * depth < _PARALLEL_FROM else 1 << 16
        tall, most = abi.GEMM_VECTORS_TALL, abi.GEMM_VECTORS_ROWS
        fitting = _ITEM_BYTES // (dtype.itemsize * min(_CHUNK, depth)) // tall * tall
        self._pack = abi.GEMM_VECTORS.packer(
            weights=address(panels), bias=0 if bias is None else address(bias),
            steps=panels.shape[1], panels=panels.shape[0], item_rows=min(most, max(tall, fitting)),
            activation=abi.ACTIVATIONS.index(activation) + 1 if activation else 0,
            out_size=self._width,
        )  # fmt: skip

    def gated(self, activation: str) -> "VectorWeight | None":
        """The product activation(gate) * up [rows, N / 2] of a weight of gate over up.

        It replaces this one. None for an activation that the kernel does not have, and if the
        halves are not whole halves of panels.
        """
        if activation not in abi.ACTIVATIONS or self._columns % _PANEL:
            return None
        panels, steps, lines, _ = self._panels.shape
        halves = self._panels.view(panels, steps, lines, 2, -1).movedim(3, 1).flatten(0, 1)
        turns = halves.view(2, panels, *halves.shape[1:]).permute(1, 2, 3, 0, 4)
        bias = None if self._bias is None else interleaved_columns(self._bias)
        self._panels.copy_(turns.reshape(self._panels.shape))  # in the memory that was asked for
        fused = VectorWeight.__new__(VectorWeight)
        fused._set(self._panels, bias, self._dtype, self._columns, self._depth, activation)
        return fused

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class; x may have gaps between its rows."""
        if self._depth % 2:
            x = F.pad(x, (0, 1))
        elif x.stride(1) != 1:
            x = x.contiguous()
        out = empty((x.shape[0], self._width), self._dtype)
        arguments = self._pack(
            x=address(x), x_stride=x.stride(0) * x.element_size(), out=address(out),
            out_stride=self._width * out.element_size(), rows=x.shape[0],
        )  # fmt: skip
        self._kernel.run(arguments, min(openmp.threads(), self._threads))
        return out


def fits(weight: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for weights of a type and activations in `dtype`."""
    if weight == torch.bfloat16:
        return dtype in FLOAT_NAMES
    return weight in _NAMES and dtype == torch.float32


def kept(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Other types of weights that are multiplied as they are with activations in `dtype`."""
    if not target.has_fma():
        return ()
    return tuple(kind for kind in _NAMES if kind != dtype and fits(kind, dtype))


def described(weight: torch.dtype, dtype: torch.dtype) -> str:
    """How they are multiplied, in words."""
    rows = "" if weight == dtype else f" x {_NAMES[dtype]} rows"
    return f"{_NAMES[weight]} weights{rows} on {unit(dtype)}"


def _laid_out(weight: torch.Tensor, allocate: Allocate | None) -> torch.Tensor:
    """[panels, steps, vectors, 32 or 64] of the weight's type: see `gemm_vectors`."""
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    columns, depth = weight.shape
    panels, steps = -(-columns // _PANEL), -(-depth // 2)
    lines = 1 if weight.dtype == torch.bfloat16 else 2
    shape = (panels, steps, lines, 2 * _PANEL // lines)
    make = allocate or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
    out = make(shape, weight.dtype)
    rows = np.zeros(panels * _PANEL, np.int64)
    stride = weight.stride(0) * weight.element_size()
    rows[:columns] = address(weight) + stride * np.arange(columns)
    arguments = _pack_panels(
        panels=panels, depth=depth, raw=Address(rows.ctypes.data), out=address(out)
    )
    threads = 1 if columns * depth < _PARALLEL_FROM else openmp.threads()
    kernel(abi.PACK_VECTORS, _NAMES[weight.dtype]).run(arguments, threads)
    return out
