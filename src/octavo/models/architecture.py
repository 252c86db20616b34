"""What a decoder class says of its models: parameters, names in files, products, attention.

The loader asks the class that `Family.decoder` names and knows nothing of any architecture
itself, so a family with another block works from its own file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from octavo.attention.base import AttentionBackend, AttentionMetadata, AttentionSpec
from octavo.kernels.codes import StoredMatrix
from octavo.models.sharding import Cut
from octavo.models.spec import ModelSpec
from octavo.quant import base as quant


class Parameters(Protocol):
    """Where a model's parameters come from, one module at a time and each once."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    def take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Their values stacked along the first dimension, in `dtype` (None: the model's)."""
        ...

    def matrix(self, method: str, *names: str) -> "torch.Tensor | quant.Codes":
        """The same of the weights of a product, in the stored type where the device takes it, or
        their codes where `method`, by which the product is computed, can use the stored ones."""
        ...

    def stored(self, *names: str) -> StoredMatrix | None:
        """Their rows where the file has them, if all of them are stored in blocks, for STORED."""
        ...


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The parameter that a GGUF tensor holds.

    heads: above 0, its rows are stored in the order of interleaved rotary pairs, head by head.
    shift: added to the stored values (norm weights that are stored as 1 + w).
    """

    parameter: str
    heads: int = 0
    shift: float = 0.0


class Architecture(Protocol):
    """A decoder class: what it says of its models, and what a loaded one does.

    It is built as `cls(spec, parameters, ops=..., products=..., backend=..., window=...,
    head_rows=..., quantization=...)`; see `models.decoder.Decoder`, which a class with another
    block may also extend. For tensor parallelism there is a further argument, `group`; a class
    without `parameter_cuts` is refused there.
    """

    EMBEDDING: ClassVar[str]  # the parameter of token embeddings
    HEAD: ClassVar[str]  # the parameter of the output head, which may be tied to it

    @classmethod
    def parameter_shapes(cls, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter. A tied head is no parameter."""
        ...

    @classmethod
    def parameter_cuts(cls, spec: ModelSpec) -> Mapping[str, Cut]:
        """How tensor parallelism divides each parameter. Only asked where there are several ranks.

        `Parameters` then gives the rank's part of each, and `describe_attention` is divided by
        heads.
        """
        ...

    @classmethod
    def product_weights(cls, spec: ModelSpec) -> frozenset[str]:
        """The parameters that a quantized checkpoint may store in its own format."""
        ...

    @classmethod
    def components(cls, spec: ModelSpec) -> list[str]:
        """The products of a model, by the names that `quantization_override` matches."""
        ...

    @classmethod
    def describe_attention(cls, spec: ModelSpec) -> list[AttentionSpec]:
        """The attention of each layer."""
        ...

    @classmethod
    def parameter_name(cls, spec: ModelSpec, stored: str) -> str | None:
        """The parameter stored as `stored` in safetensors; None for one that is not needed.

        An unknown name is returned as it is, and the loader reports it.
        """
        ...

    @classmethod
    def gguf_tensors(cls, spec: ModelSpec) -> Mapping[str, GgufTensor]:
        """The parameter that each tensor of a GGUF file holds, by the tensor's name there."""
        ...

    spec: ModelSpec
    backend: AttentionBackend
    attention_specs: list[AttentionSpec]
    embed: Callable[..., torch.Tensor]  # as layers.embedding.Embedding.forward

    def forward(
        self,
        token_ids: torch.Tensor,
        metas: Sequence[AttentionMetadata],
        caches: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """int64 [T] -> hidden states [T, H] after the final norm.

        metas, caches: one per layer; layers of one KV group have the same metadata.
        """
        ...

    def layers(
        self, x: torch.Tensor, metas: Sequence[AttentionMetadata], caches: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """From embedded tokens [T, H], which are overwritten, to what `forward` gives."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] -> [R, spec.num_ids], in the model's dtype: ids without a token are left out."""
        ...

    def explain(self) -> dict[str, str]:
        """For each op, what serves it and why."""
        ...
