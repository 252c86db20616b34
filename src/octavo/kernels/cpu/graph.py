"""A recorded list of kernel calls, replayed as one for any number of rows. Free of Numba.

A recording keeps every tensor that was written, so each address in the arguments of its calls
says which tensor is meant. Tensors whose uses do not overlap then share one arena, which stays
in the processor's caches, and replaying is: write the numbers of this step into the arguments
of all calls, and run the list (`program`).
"""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.arguments import Kind
from octavo.kernels.cpu.kernel import Kernel, Recording, kernel

_pack = abi.PROGRAM.packer()
_ALIGN = 64
_FEW = 8  # rows that one thread takes before another has started

Words = NDArray[np.int64]


def program() -> Kernel:
    """The kernel that calls the others."""
    return kernel(abi.PROGRAM)


class Graph:
    """The calls of `recording`, in which `rows` rows went from `given` to `result` [rows, H].

    What else changes from step to step lies in memory that the calls read, at the addresses that
    they were recorded with. Raises ValueError if a call is of a kernel of undeclared arguments.
    """

    def __init__(self, recording: Recording, given: torch.Tensor, result: torch.Tensor) -> None:
        self._kernel = program()
        self._threads = openmp.threads()
        self.rows = given.shape[0]
        buffers = [given, *recording.buffers]
        calls = [np.frombuffer(arguments, np.int64) for _, arguments in recording.calls]
        self._template = np.concatenate(calls)
        begins = np.cumsum([0, *map(len, calls)])
        self._find_fields([called for called, _ in recording.calls], begins)
        self._place(buffers, begins, result)
        self._work = np.empty_like(self._template)
        addresses = self._work.ctypes.data + 8 * begins[:-1]
        entries = [called.address for called, _ in recording.calls]
        self._kernels = np.stack([np.array(entries, np.int64), addresses], axis=1)
        libc = ctypes.CDLL(None)
        self._yield = ctypes.cast(libc.sched_yield, ctypes.c_void_p).value or 0

    def replay(self, rows: int) -> torch.Tensor:
        """Run on the first `rows` rows of `given`; their results, valid until the next replay."""
        words = self._work
        words[:] = self._template
        words[self._rows] = rows
        shared = self._threads > 1 and rows > _FEW
        words[self._chunks] = max(1, rows // (4 * self._threads)) if shared else rows
        arguments = _pack(
            team=self._threads, count=len(self._kernels), kernels=self._kernels.ctypes.data,
            sched_yield=self._yield,
        )  # fmt: skip
        self._kernel.run(arguments, self._threads)
        return self.result[:rows]

    def _find_fields(self, kernels: list[Kernel], begins: Words) -> None:
        """The words of all arguments that hold rows, rows at a time, or an address."""
        found: dict[Kind, list[int]] = {Kind.ROWS: [], Kind.CHUNK: [], Kind.POINTER: []}
        for called, begin in zip(kernels, begins.tolist(), strict=False):
            if called.arguments is None:
                raise ValueError(f"{called.where} has no declared arguments")
            for kind, words in found.items():
                words += [begin + word for word in called.arguments.words_of(kind)]
        self._rows, self._chunks, self._pointers = (np.array(w, np.int64) for w in found.values())
        if not (self._template[self._rows] == self.rows).all():
            raise ValueError("the recorded calls have different numbers of rows")

    def _place(self, buffers: list[torch.Tensor], begins: Words, result: torch.Tensor) -> None:
        """Give the buffers places in one arena, and the arguments the new addresses."""
        order = sorted(buffers, key=lambda buffer: buffer.data_ptr())
        starts = np.array([buffer.data_ptr() for buffer in order])
        sizes = np.array([buffer.numel() * buffer.element_size() for buffer in order])
        addresses = self._template[self._pointers]
        which = np.searchsorted(starts, addresses, side="right") - 1
        inside = (which >= 0) & (addresses < (starts + sizes)[which])
        places, owner = self._pointers[inside], which[inside]
        call = np.searchsorted(begins, places, side="right") - 1
        first = np.full(len(order), len(begins))
        last = np.full(len(order), -1)
        np.minimum.at(first, owner, call)
        np.maximum.at(last, owner, call)
        index = {buffer.data_ptr(): i for i, buffer in enumerate(order)}
        came, left = index[buffers[0].data_ptr()], index[result.data_ptr()]
        first[came], last[left] = -1, len(begins)
        offsets, total = _share(first, last, sizes)
        self._arena = torch.zeros(total + _ALIGN, dtype=torch.uint8)
        base = -(-self._arena.data_ptr() // _ALIGN) * _ALIGN
        self._template[places] += base + offsets[owner] - starts[owner]
        self.given = self._view(base + int(offsets[came]), buffers[0])
        self.result = self._view(base + int(offsets[left]), result)

    def _view(self, address: int, like: torch.Tensor) -> torch.Tensor:
        begin = address - self._arena.data_ptr()
        part = self._arena[begin : begin + like.numel() * like.element_size()]
        return part.view(like.dtype).view(like.shape)


def _share(first: Words, last: Words, sizes: Words) -> tuple[Words, int]:
    """Offsets of buffers used from call `first` to call `last`, and the bytes of all of them."""
    offsets = np.zeros(len(sizes), np.int64)
    held: list[tuple[int, int, int]] = []  # last use, offset, bytes
    free: list[tuple[int, int]] = []  # bytes, offset
    total = 0
    for i in np.argsort(first, kind="stable").tolist():
        free += [(size, offset) for end, offset, size in held if end < first[i]]
        held = [entry for entry in held if entry[0] >= first[i]]
        size = -(-int(sizes[i]) // _ALIGN) * _ALIGN
        fitting = min((entry for entry in free if entry[0] >= size), default=None)
        if fitting is None:
            fitting = (size, total)
            total += size
        else:
            free.remove(fitting)
        offsets[i] = fitting[1]
        held.append((int(last[i]), fitting[1], fitting[0]))
    return offsets, total
