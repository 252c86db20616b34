"""Owns the KV tensors: one per layer, block first, in the layout that the backend asks for."""

from collections.abc import Iterable, Sequence

import torch

from octavo.attention.base import AttentionBackend, AttentionSpec
from octavo.core.plan import BlockCopy


class KVCache:
    """The pool on the device and, with `num_host_blocks`, a second pool for swapped blocks.

    Memory is taken but not touched: on a CPU the system maps a page when it is first written.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        device: str,
        num_host_blocks: int = 0,
    ) -> None:
        def pool(blocks: int, where: str) -> list[torch.Tensor]:
            layouts = [backend.kv_layout(s, blocks, block_size, kv_dtype) for s in specs]
            return [torch.empty(shape, dtype=dtype, device=where) for shape, dtype in layouts]

        self.layers = pool(num_blocks, device)
        self.host = pool(num_host_blocks, "cpu") if num_host_blocks else []
        for layer in self.layers:
            layer[0].zero_()  # the null block is read as padding, so it must be finite

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Run a plan's block copies in order; runs of one kind go as one batched copy."""
        run: list[BlockCopy] = []
        for copy in copies:
            clash = run and (copy.kind != run[0].kind or copy.source in {c.target for c in run})
            if clash:
                self._copy_run(run)
                run = []
            run.append(copy)
        if run:
            self._copy_run(run)

    def _copy_run(self, run: list[BlockCopy]) -> None:
        sources = torch.tensor([c.source for c in run])
        targets = torch.tensor([c.target for c in run])
        kind = run[0].kind
        read = self.host if kind == "in" else self.layers
        write = self.host if kind == "out" else self.layers
        for source, target in zip(read, write, strict=True):
            target[targets] = source[sources].to(target.device)


def block_bytes(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    block_size: int,
    kv_dtype: torch.dtype,
) -> int:
    """Bytes that one block takes over all layers."""
    total = 0
    for spec in specs:
        shape, dtype = backend.kv_layout(spec, 1, block_size, kv_dtype)
        total += torch.Size(shape).numel() * dtype.itemsize
    return total
