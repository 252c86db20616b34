"""Owns the KV tensors, block first, in the layout that the backend requires.

Layers with equal `CacheSpec` are divided into KV groups of equal size, and layer j of every group
uses tensor j. So a block id is a page in each tensor, used by one group at a time: a block has the
same size whichever group holds it, and the groups share memory in any proportion. A model whose
layers have one `CacheSpec` is one group, with a tensor for each layer.

               tensor 0   tensor 1   tensor 2
    group 0    layer 0    layer 1    layer 2      window
    group 1    layer 3    layer 4    layer 6      window
    group 2    layer 5    layer 11   layer 17     full
"""

import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from octavo.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    CacheLayout,
)
from octavo.core.plan import FULL, BlockCopy, CacheSpec
from octavo.errors import ConfigError
from octavo.runner.device import Accelerator, Device
from octavo.runner.memory import shown

# A group may have fewer layers, whose pages are unused: at most this fraction of its kind.
_MOST_PADDING = 1 / 8

Page = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The group and the tensor of each layer's KV.

    groups: what the layers of each group cache. places: of each layer, its group and its
    tensor. pages: of each tensor, the shape and dtype of one block.
    """

    groups: tuple[CacheSpec, ...]
    places: tuple[tuple[int, int], ...]
    pages: tuple[Page, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all tensors."""
        return sum([math.prod(shape) * dtype.itemsize for shape, dtype in self.pages])

    def kinds(self, specs: Sequence[AttentionSpec]) -> list[AttentionSpec]:
        """The attention of each kind of layer in each group; specs: of each layer."""
        groups = [group for group, _ in self.places]
        return [spec for _, spec in dict.fromkeys(zip(groups, specs, strict=True))]


def kv_layout(
    backend: CacheLayout,
    specs: Sequence[AttentionSpec],
    block_size: int,
    kv_dtype: torch.dtype,
) -> KVLayout:
    """Divide the layers of `specs` into groups.

    Groups can only share tensors if all layers have pages of one shape; else every layer caches
    all keys, and its window is only a mask.
    """
    pages = [backend.kv_layout(spec, 1, block_size, kv_dtype) for spec in specs]
    kinds: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec.cache, []).append(layer)
    if len(kinds) > 1 and len(set(pages)) > 1:
        kinds = {FULL: list(range(len(specs)))}
    size = _group_size([len(layers) for layers in kinds.values()])
    groups: list[CacheSpec] = []
    places = [(0, 0)] * len(specs)
    for cache, layers in kinds.items():
        for begin in range(0, len(layers), size):
            for tensor, layer in enumerate(layers[begin : begin + size]):
                places[layer] = (len(groups), tensor)
            groups.append(cache)
    return KVLayout(tuple(groups), tuple(places), tuple(pages[:size]))


def _group_size(counts: Sequence[int]) -> int:
    """The largest group size, for `counts` layers of each kind, with little padding."""
    for size in range(max(counts), 1, -1):
        if all(-count % size <= count * _MOST_PADDING for count in counts):
            return size
    return 1


class KVCache:
    """The pool on the device and, with `num_host_blocks`, a second pool for swapped blocks.

    tensors: the pool, one per place in a group. layers: of each layer, its tensor. Memory comes
    from the device; of it only the null block is written here. On an accelerator the tensors are
    views of one, [blocks, places, ...], if their pages are equal and the backend takes strides: a
    block is then copied at once.
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
        self.layout = kv_layout(backend, specs, block_size, kv_dtype)
        self._accelerator = device if isinstance(device, Accelerator) else None
        pages = [(shape[1:], dtype) for shape, dtype in self.layout.pages]
        apart = self._accelerator and backend.capabilities.block_strides
        if apart and len(pages) > 1 and len(set(pages)) == 1:
            pages = [((len(pages), *pages[0][0]), pages[0][1])]

        def shapes(blocks: int) -> list[Page]:
            return [((blocks, *shape), dtype) for shape, dtype in pages]

        self._pool = [device.empty(s, d) for s, d in shapes(num_blocks)]
        joined = len(pages) < len(self.layout.pages)
        self.tensors = list(self._pool[0].unbind(1)) if joined else self._pool
        self.layers = [self.tensors[tensor] for _, tensor in self.layout.places]
        self.host: list[torch.Tensor] = []
        if num_host_blocks and swap_path:
            self.host = [_on_disk(swap_path, s, d) for s, d in shapes(num_host_blocks)]
        elif num_host_blocks:
            self.host = [device.host_empty(s, d) for s, d in shapes(num_host_blocks)]
        for tensor in self.tensors:
            # The null block is read as padding and behind windows, so it must be finite.
            tensor[0].zero_()

    def per_layer(self, metas: Sequence[AttentionMetadata]) -> list[AttentionMetadata]:
        """Of each layer, the metadata of its group; metas: one per group."""
        return [metas[group] for group, _ in self.layout.places]

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
        kind = run[0].kind
        read = self.host if kind == "in" else self._pool
        write = self.host if kind == "out" else self._pool
        if self._accelerator:
            self._accelerator.copy_blocks([(c.source, c.target) for c in run], read, write)
            return
        sources = torch.tensor([c.source for c in run])
        targets = torch.tensor([c.target for c in run])
        for source, target in zip(read, write, strict=True):
            target[targets] = source[sources].to(target.device)


def _on_disk(folder: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file of `folder` that does not outlive the process, however it ends.

    Its whole size is allocated at once, so that the disk cannot run out while it is in use.
    Raises ConfigError when the folder cannot be written or the disk is too small.
    """
    size = torch.Size(shape).numel()
    try:
        handle, name = tempfile.mkstemp(prefix="octavo-swap-", dir=os.path.expanduser(folder))
        try:
            os.posix_fallocate(handle, 0, size * dtype.itemsize)
            return torch.from_file(name, shared=True, size=size, dtype=dtype).view(shape)
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise ConfigError(
            f"swap_path {folder!r} cannot hold {shown(size * dtype.itemsize)} of swapped KV for "
            f"one tensor: {error.strerror}; give a writable folder with enough space for swap_space"
        ) from error
