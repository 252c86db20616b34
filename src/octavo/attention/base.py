"""The contract of an attention backend, and the metadata of a step.

A backend owns the layout of its KV cache: only it reads or writes a cache tensor. It is chosen
by name in `attention.registry`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import FULL, CacheSpec


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer.

    window: tokens attended to, the current one included; None: all. sinks: whether each query head
    has a learned logit that takes part in the softmax and has no value (gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def cache(self) -> CacheSpec:
        """What the layer caches of a sequence."""
        return FULL if self.window is None else CacheSpec("window", self.window)


@dataclass(frozen=True, slots=True)
class HostLengths:
    """What a step's work is planned from, in host memory: reading it waits for no device."""

    query_starts: NDArray[np.int32]  # [rows + 1]
    seq_lens: NDArray[np.int32]  # [rows]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Maps query tokens to rows, and rows to the blocks of their keys and values.

    Row r owns query tokens query_starts[r] .. query_starts[r+1]-1, which are the last ones of
    its sequence of seq_lens[r] tokens. All tensors are on the device; lengths are also given
    in host memory, so that a backend can choose a code path without reading from the device.

    Layers of one KV group have the same metadata; block_tables and slots differ from group to
    group. Blocks behind the window of a group are the null block 0. It holds finite zeros, so a
    backend may read it, and must mask what it reads.
    """

    query_starts: torch.Tensor  # int32 [rows + 1]
    seq_lens: torch.Tensor  # int32 [rows]; keys of each row after this step's write
    block_tables: torch.Tensor  # int32 [rows, most blocks]; unused entries are 0
    slots: torch.Tensor  # int64 [tokens]; block * block_size + offset, for this step's tokens
    positions: torch.Tensor  # int64 [tokens]
    num_tokens: int
    num_rows: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    group: int = 0
    max_blocks: int = 0  # the most that a row of any step can have
    captured: bool = False  # of a captured run, which is replayed for other steps
    host: HostLengths | None = None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of query and key, by weights [head_dim], before a rotary embedding."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    cast_first: bool


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. An empty tuple of sizes means any.

    padding_slot: of the tokens that pad a captured step; -1 if `write` stores nothing there,
    else 0, in the null block. block_strides: whether the blocks of a layer's cache may lie apart,
    with those of other layers between them.
    """

    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]
    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()
    window: bool = True
    soft_cap: bool = True
    graph_safe: bool = False
    padding_slot: int = 0
    block_strides: bool = False
    sinks: bool = False


@runtime_checkable
class CaptureSafe(Protocol):
    """Interface of a backend whose calls can be captured once and replayed for other steps.

    Its captured calls read everything that changes between steps from fixed addresses.
    """

    def prepare_replay(
        self,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        dtype: torch.dtype,
        captured_tokens: int,
    ) -> bool:
        """Fill that memory for the step of `meta`, for all layers of `spec`, before a replay.

        dtype: the queries'. captured_tokens: how many tokens the calls were captured with, at
        least those of `meta`; the first call has the most that any has. The memory stays valid
        until the next step is prepared. Returns False, and the step must not be replayed, if it
        needs more memory than there is.
        """
        ...


@runtime_checkable
class HoldsStaticMemory(Protocol):
    """Optional interface of a `CaptureSafe` backend: how large the memory is that it fills."""

    def static_bytes(self, spec: AttentionSpec, tokens: int, longest: int) -> int:
        """For layers of `spec`, steps of `tokens` tokens, and sequences of `longest` tokens."""
        ...


class CacheLayout(Protocol):
    """The part of a backend that says what memory its cache takes."""

    name: str
    capabilities: Capabilities

    def kv_layout(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of one layer's cache tensor, block as its first dimension."""
        ...


class AttentionBackend(CacheLayout, Protocol):
    """One implementation. Instances hold scratch space only, never a request's state."""

    def write(
        self, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        """Store key and value [tokens, kv_heads, head_dim] at meta.slots of `cache`."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        meta: AttentionMetadata,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """Causal attention of query [tokens, heads, head_dim] over `cache`, after `write`.

        Returns [tokens, heads * head_dim] in the query's dtype. A row's result must not depend
        on the other rows. Layers with `spec.sinks` pass one more argument, `sinks` [heads], to
        backends whose capabilities have `sinks`.
        """
        ...
