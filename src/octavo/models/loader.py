"""From a configuration to a loaded model: find, describe, check, then fill.

Each step is another file's: `models.files` finds, `checkpoint` opens, `models.config` describes,
`models.weights` checks and reads, and the architecture builds.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from octavo.attention import registry as attention_registry
from octavo.attention.base import AttentionBackend, AttentionSpec
from octavo.checkpoint.base import Checkpoint
from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.kernels.dispatch import Ops
from octavo.layers.linear import Products
from octavo.log import get_logger
from octavo.models import registry
from octavo.models.config import load_spec
from octavo.models.decoder import Decoder
from octavo.models.files import memory_note, resolve, resolve_tokenizer
from octavo.models.spec import ModelSpec
from octavo.models.weights import Weights
from octavo.quant.base import FP8, INT4, INT8, NONE, QuantConfig, quant_config
from octavo.quant.registry import check_agrees
from octavo.text.loading import num_ids

logger = get_logger(__name__)

# Tables of positions that any model may have, however small its weights are.
_TABLE_BYTES = 2**30
_BITS = {INT8: 8, INT4: 4, FP8: 8}  # at least, of a value of a product's weight


class LoadingDevice(Protocol):
    """What a model is loaded onto and built with."""

    @property
    def name(self) -> str:
        """As `octavo.devices` knows it."""
        ...

    @property
    def torch_device(self) -> str:
        """As torch knows it."""
        ...

    @property
    def quantization(self) -> Collection[str]:
        """Methods (`quant.base.METHODS`) in which `products` multiplies quantized weights."""
        ...

    @property
    def attention_order(self) -> Sequence[str]:
        """Attention backends that `attention_impl="auto"` tries, the best first."""
        ...

    def ops(self, dtype: torch.dtype) -> Ops:
        """The ops between products; never fails: what has no kernel runs the reference."""
        ...

    def products(self, dtype: torch.dtype, max_rows: int, deterministic: bool) -> Products:
        """A maker of a model's products. max_rows: the largest step; deterministic: all of them
        batch-invariant, even where that is slow."""
        ...

    def decode_blocks(self, name: str, count: int, raw: torch.Tensor, out: torch.Tensor) -> bool:
        """As `quant.tensors.BlockDecoder`: a fast decoder of GGUF blocks, where there is one."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model of which everything is known and checked but its weights.

    window: the longest sequence that positions are prepared for.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    window: int
    architecture: type[Decoder]
    quantization: QuantConfig
    backend: AttentionBackend
    dtype: torch.dtype

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """One per layer."""
        return list(self.architecture.describe_attention(self.spec))

    @property
    def weight_bytes(self) -> int:
        """The least that the weights take once they are loaded."""
        if self.spec.quantization is not None and self.quantization.default != NONE:
            return sum(tensor.num_bytes for tensor in self.checkpoint.tensors.values())
        products = self.architecture.product_weights(self.spec)
        bits = min(_BITS.get(method, self._bits) for method in self.quantization.methods)
        shapes = self.architecture.parameter_shapes(self.spec).items()
        return sum(
            math.prod(shape) * (bits if name in products else self._bits) // 8
            for name, shape in shapes
        )

    @property
    def can_keep_codes(self) -> bool:
        """Whether the file holds codes of few bits that are dequantized, which int4 would keep."""
        stored = sum(tensor.num_bytes for tensor in self.checkpoint.tensors.values())
        self_contained = self.checkpoint.container.self_contained
        return (
            self_contained
            and self.quantization.default == NONE
            and (2 * stored < self.weight_bytes)
        )

    @property
    def _bits(self) -> int:
        return 8 * self.dtype.itemsize


def prepare(config: EngineConfig, device: LoadingDevice, dtype: torch.dtype) -> Prepared:
    """What `load` loads: the model that `config` names, its weights in `dtype` on `device`.

    Raises ModelNotFoundError, CheckpointError or ConfigError when something is missing, damaged or
    unknown.
    """
    checkpoint, spec, window = describe(config)
    architecture = registry.decoder_class(spec.family)
    quantization = _quantization(config, spec, architecture.components(spec), device)
    backend = attention_registry.create(
        config.attention_impl, device.torch_device, dtype, architecture.describe_attention(spec),
        config.block_size, kv_dtype(config, dtype), device.attention_order,
    )  # fmt: skip
    return Prepared(checkpoint, spec, window, architecture, quantization, backend, dtype)


def load_model(config: EngineConfig, device: LoadingDevice, dtype: torch.dtype) -> Decoder:
    """`prepare`, then `load`."""
    return load(prepare(config, device, dtype), config, device)


def load(prepared: Prepared, config: EngineConfig, device: LoadingDevice) -> Decoder:
    """Read the weights of a prepared model. Raises CheckpointError."""
    checkpoint, spec, dtype = prepared.checkpoint, prepared.spec, prepared.dtype
    architecture = prepared.architecture
    logger.info(
        "loading %s (%s) from %s",
        config.model,
        spec.architecture,
        ", ".join(map(str, checkpoint.paths)),
    )
    if not prepared.quantization.methods - {NONE} and (note := memory_note(checkpoint)) is not None:
        logger.info("%s", note)
    products = device.products(dtype, config.max_num_batched_tokens, config.deterministic)
    weights = Weights(
        spec, architecture, checkpoint, device.torch_device, dtype, device.decode_blocks,
    )  # fmt: skip
    with weights.progress():
        model: Decoder = architecture(
            spec,
            weights,
            ops=device.ops(dtype),
            products=products,
            backend=prepared.backend,
            window=prepared.window,
            head_rows=config.max_num_seqs,
            quantization=prepared.quantization,
        )
    logger.info("products: %s", products.explain())
    if products.unstable:
        logger.warning(
            "GEMM shapes %s are not batch-invariant: last bits may change with the rows of a step; "
            "deterministic=True makes them independent of it and long prompts slower",
            ", ".join(products.unstable),
        )
    return model


def describe(config: EngineConfig) -> tuple[Checkpoint, ModelSpec, int]:
    """The opened model that `config` names, what it is, and the longest sequence that positions
    are prepared for. No weight is read, and nothing is made whose size only a file vouches for.
    """
    checkpoint = resolve(config.model, config.revision).open()
    spec = _with_ids(config, checkpoint, load_spec(checkpoint))
    return checkpoint, spec, _window(config, spec, checkpoint)


def _with_ids(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> ModelSpec:
    """`spec` with only those ids that tokens of the tokenizer stand for."""
    if config.tokenizer is None:
        count = num_ids(checkpoint.root, checkpoint.metadata or None)
    else:
        count = num_ids(resolve_tokenizer(config.model, config.revision, config.tokenizer))
    if count is None or count >= spec.vocab_size:
        if count is not None and count > spec.vocab_size:
            logger.warning(
                "the tokenizer has ids up to %d, the model %d rows", count - 1, spec.vocab_size
            )
        return spec
    logger.info(
        "vocabulary: %d ids; %d rows beyond them are padding and never drawn",
        count, spec.vocab_size - count,
    )  # fmt: skip
    ends = tuple(token for token in spec.eos_token_ids if token < count)
    return replace(spec, num_tokens=count, eos_token_ids=ends)


def _quantization(
    config: EngineConfig, spec: ModelSpec, components: Sequence[str], device: LoadingDevice
) -> QuantConfig:
    """What the options and the checkpoint ask for. Raises ConfigError where they disagree, or ask
    for what the device does not have."""
    stored = spec.quantization
    check_agrees(config.quantization, stored)
    computed = None if stored is None else stored.computed_as
    if computed not in (None, NONE, *device.quantization):
        logger.info("device %r has no %s products: weights are dequantized", device.name, computed)
        computed = NONE
    found = quant_config(config.quantization, config.quantization_override, computed)
    found.check(components)
    if lacking := sorted(found.methods - {NONE, *device.quantization}):
        known = ", ".join(device.quantization) or "none"
        raise ConfigError(
            f"quantization: device {device.name!r} has no {', '.join(lacking)} products "
            f"(it has: {known}); leave the option out or choose another device"
        )
    if stored is not None:
        logger.info("weights: %s", stored.explain())
    return found


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of the KV cache of a model in `dtype`."""
    name = config.kv_cache_dtype
    return dtype if name == "auto" else attention_registry.KV_DTYPES[name]


def _window(config: EngineConfig, spec: ModelSpec, checkpoint: Checkpoint) -> int:
    """The longest sequence that positions are prepared for.

    Raises ConfigError where it is longer than the model's, NotEnoughMemoryError where its tables
    would be out of all proportion to the weights: then the file's own window is not to be believed.
    """
    longest = spec.max_position if config.max_model_len is None else config.max_model_len
    tables = {
        (layer.rope, temperature, layer.attention.head_dim)
        for layer in spec.layers
        for temperature in {None, layer.query_temperature}
        if layer.rope is not None or temperature is not None
    }
    position_bytes = sum(head_dim * 4 for *_, head_dim in tables)
    most = max(_TABLE_BYTES, sum(tensor.num_bytes for tensor in checkpoint.tensors.values()))
    if longest * position_bytes > most:
        raise NotEnoughMemoryError(
            f"{checkpoint.root}: tables of {longest} positions take "
            f"{longest * position_bytes / 2**30:.1f} GiB, more than the weights; set max_model_len "
            f"to at most {most // position_bytes}"
        )
    if config.max_model_len is None:
        return longest
    if config.max_model_len > spec.longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for at most "
            f"{spec.longest} tokens"
        )
    return config.max_model_len
