"""Owns the KV tensors: one per layer, block first, in the layout that the backend asks for."""

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from octavo.attention.base import AttentionBackend, AttentionSpec
from octavo.core.plan import BlockCopy
from octavo.errors import ConfigError
from octavo.runner.device import Device


class KVCache:
    """The pool on the device and, with `num_host_blocks`, a second pool for swapped blocks.

    Memory comes from the device; of it only the null block is written here.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        specs: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        device: Device,
        num_host_blocks: int = 0,
        swap_path: str | None = None,
    ) -> None:
        def layouts(blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
            return [backend.kv_layout(spec, blocks, block_size, kv_dtype) for spec in specs]

        self.layers = [device.empty(s, d) for s, d in layouts(num_blocks)]
        self.host: list[torch.Tensor] = []
        if num_host_blocks and swap_path:
            self.host = [_on_disk(swap_path, s, d) for s, d in layouts(num_host_blocks)]
        elif num_host_blocks:
            self.host = [device.host_empty(s, d) for s, d in layouts(num_host_blocks)]
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


def _on_disk(folder: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file of `folder` that is gone when the process is, however it ends.

    Its whole size is taken at once, so that the disk cannot run out while requests are on it.
    Raises ConfigError when the folder cannot be written or the disk is too small.
    """
    size = torch.Size(shape).numel()
    try:
        handle, name = tempfile.mkstemp(prefix="octavo-swap-", dir=Path(folder).expanduser())
        try:
            os.posix_fallocate(handle, 0, size * dtype.itemsize)
            return torch.from_file(name, shared=True, size=size, dtype=dtype).view(shape)
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"swap_path {folder!r} cannot hold {size * dtype.itemsize} bytes of swapped KV for "
            f"one layer: {error.strerror}; give a writable folder with room for swap_space"
        ) from error
