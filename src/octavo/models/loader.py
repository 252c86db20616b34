"""From a configuration to a loaded model: find, describe, check, then fill.

Each step is another file's: `models.files` finds, `checkpoint` opens, `models.config` describes,
`models.weights` checks and reads, and the architecture builds.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch

from octavo.attention import registry as attention_registry
from octavo.attention.base import AttentionBackend, AttentionSpec
from octavo.checkpoint.base import Checkpoint
from octavo.config import EngineConfig
from octavo.dist.base import SINGLE, Group
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.kernels.codes import GROUP
from octavo.kernels.dispatch import Ops
from octavo.layers.linear import Products
from octavo.log import get_logger
from octavo.models import registry
from octavo.models.config import load_spec
from octavo.models.decoder import Decoder
from octavo.models.files import memory_note, resolve, resolve_tokenizer
from octavo.models.sharding import (
    WHOLE,
    Requirement,
    Shard,
    aligned,
    check_size,
    even,
    local_attention,
    local_shape,
    most_ranks,
)
from octavo.models.spec import ModelSpec
from octavo.models.weights import Upload, Weights
from octavo.quant.base import (
    FP8,
    GGUF,
    HEAD,
    INT4,
    INT8,
    NONE,
    STORED,
    W4A8,
    W8A8,
    QuantConfig,
    quant_config,
)
from octavo.quant.registry import check_agrees
from octavo.quant.tensors import dtype_of, form_of
from octavo.text.loading import num_ids

logger = get_logger(__name__)

# Tables of positions that any model may have, however small its weights are.
_TABLE_BYTES = 2**30
# All experts of a layer are one component.
_EXPERT = re.compile(r"\.experts\.\d+\.")
_BITS = {INT8: 8, INT4: 4, FP8: 8, W8A8: 8, W4A8: 4}  # at least, of a value of a product's weight


# The opened model, what it is, and the longest sequence that positions are prepared for.
Description = tuple[Checkpoint, ModelSpec, int]


class QuantizingDevice(Protocol):
    """What a model's outline depends on."""

    @property
    def name(self) -> str:
        """As `octavo.devices` knows it."""
        ...

    @property
    def quantization(self) -> Collection[str]:
        """Methods (`quant.base.METHODS`) in which `products` multiplies quantized weights."""
        ...

    @property
    def keeps_blocks(self) -> bool:
        """Whether a file in blocks is computed on as stored where `quantization` is not given."""
        ...


class LoadingDevice(QuantizingDevice, Protocol):
    """What a model is loaded onto and built with."""

    @property
    def torch_device(self) -> str:
        """As torch knows it."""
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


@runtime_checkable
class KeepingDevice(Protocol):
    """Optional interface of a device whose products take weights of other types than theirs."""

    def kept_dtypes(self, dtype: torch.dtype) -> Collection[torch.dtype]:
        """Types of weights that products in `dtype` read as they are stored."""
        ...


@runtime_checkable
class UploadingDevice(Protocol):
    """Optional interface of a device that takes weights piece by piece from host memory."""

    def uploads(self) -> Upload:
        """For the weights of one load."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a model's description tells of it, on a kind of device.

    window: the longest sequence that positions are prepared for. group: the ranks that compute it
    together; sizes are those of this one's part. checkpoint: without tensors where only a
    description is there.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    window: int
    architecture: type[Decoder]
    quantization: QuantConfig
    dtype: torch.dtype
    group: Group = SINGLE
    kept: Collection[torch.dtype] = ()  # other types that weights may stay in

    @property
    def attention_specs(self) -> list[AttentionSpec]:
        """One per layer."""
        return local_attention(self.architecture.describe_attention(self.spec), self.group.size)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each parameter, as this rank has it."""
        return self._shapes(Shard.of(self.group))

    @property
    def weight_bytes(self) -> int:
        """The least that the weights take once they are loaded."""
        return sum(self.parameter_bytes().values())

    def parameter_bytes(self, shard: Shard | None = None) -> dict[str, int]:
        """The same of each parameter; of a quantized checkpoint, by the names of stored tensors.

        shard: None: of this rank.
        """
        shapes = self._shapes(Shard.of(self.group) if shard is None else shard)
        if self.quantization.default == STORED:
            return self._bytes_of_blocks(shapes)
        if self.spec.quantization is not None and self.quantization.default != NONE:
            return self._stored_bytes(shapes)
        products = self.architecture.product_weights(self.spec)
        bits = min(_BITS.get(method, self._bits) for method in self.quantization.methods)
        kept = self._kept_bits() if self.quantization.methods == {NONE} else {}
        return {
            name: math.prod(shape) * kept.get(name, bits if name in products else self._bits) // 8
            for name, shape in shapes.items()
        }

    def _kept_bits(self) -> dict[str, int]:
        """Of the parameters that stay in the type in which they are stored."""
        architecture, spec = self.architecture, self.spec
        can_stay = {*architecture.product_weights(spec), architecture.EMBEDDING}
        table = architecture.gguf_tensors(spec)
        found: dict[str, int] = {}
        for stored, tensor in self.checkpoint.tensors.items():
            known = table.get(stored)
            name = architecture.parameter_name(spec, stored) if known is None else known.parameter
            kind = dtype_of(tensor.format)
            if name in can_stay and kind is not None and kind in self.kept:
                found[name] = 8 * kind.itemsize
        return found

    def _bytes_of_blocks(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Of parameters of these shapes, those in blocks as they are computed on."""
        architecture = self.architecture
        table = architecture.gguf_tensors(self.spec)
        forms = {
            table[name].parameter: form_of(tensor.format)
            for name, tensor in self.checkpoint.tensors.items()
            if name in table
        }
        products = architecture.product_weights(self.spec)
        if not self.spec.tie_embeddings or self.quantization.method(HEAD) == STORED:
            products |= {architecture.EMBEDDING}
        found: dict[str, int] = {}
        for name, shape in shapes.items():
            form = forms.get(name) if name in products else None
            plain = math.prod(shape) * self._bits // 8
            found[name] = plain if form is None else form.num_bytes(*shape)
        return found

    def _stored_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Of parameters of these shapes, as they are stored, in whatever parts."""
        if not self.checkpoint.tensors:
            return self._bytes_in_parts(shapes)
        whole = self.architecture.parameter_shapes(self.spec)
        found: dict[str, int] = {}
        for stored, tensor in self.checkpoint.tensors.items():
            name = self.architecture.parameter_name(self.spec, stored) or ""
            parameter = name if name in shapes else f"{name.rpartition('.')[0]}.weight"
            of, all_of = (math.prod(s.get(parameter, ())) for s in (shapes, whole))
            found[stored] = tensor.num_bytes * of // max(1, all_of)
        return found

    def _bytes_in_parts(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The same by the checkpoint's format alone, with scales as they are once read."""
        form, products = self.spec.quantization, self.architecture.product_weights(self.spec)
        head = self.architecture.HEAD  # which quantizers leave as it is
        found: dict[str, int] = {}
        for name, shape in shapes.items():
            if form is None or name not in products or name == head:
                found[name] = math.prod(shape) * self._bits // 8
                continue
            parts = form.parts(shape).values()
            found[name] = sum(
                math.prod(part.shape) * part.dtype.itemsize for part in parts if part.needed
            )
        return found

    def _shapes(self, shard: Shard) -> dict[str, tuple[int, ...]]:
        shapes = self.architecture.parameter_shapes(self.spec)
        if shard.size == 1:
            return shapes
        cuts = self.architecture.parameter_cuts(self.spec)
        return {name: local_shape(shape, cuts[name], shard) for name, shape in shapes.items()}

    @property
    def can_keep_codes(self) -> bool:
        """Whether the file holds codes of few bits that are dequantized, which int4 would keep."""
        stored = sum(tensor.num_bytes for tensor in self.checkpoint.tensors.values())
        self_contained = self.checkpoint.container.self_contained
        return (
            self_contained
            and self.quantization.default == NONE
            and (2 * stored < sum(self.parameter_bytes(WHOLE).values()))
        )

    @property
    def _bits(self) -> int:
        return 8 * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Outline):
    """A model of which everything is known and checked but its weights."""

    backend: AttentionBackend


def prepare(
    config: EngineConfig, device: LoadingDevice, dtype: torch.dtype, group: Group = SINGLE
) -> Prepared:
    """What `load` loads: the model that `config` names, its weights in `dtype` on `device`, of
    which this process computes the part of its rank in `group`.

    Raises ModelNotFoundError, CheckpointError or ConfigError when something is missing, damaged or
    unknown, or the size of `group` does not divide the model. Nothing is communicated here.
    """
    found = outline(describe(config), config, device, dtype, group)
    backend = attention_registry.create(
        config.attention_impl, device.torch_device, dtype, found.attention_specs,
        config.block_size, kv_dtype(config, dtype), device.attention_order,
    )  # fmt: skip
    known = {item.name: getattr(found, item.name) for item in fields(found)}
    return Prepared(**known, backend=backend)


def outline(
    description: Description,
    config: EngineConfig,
    device: QuantizingDevice,
    dtype: torch.dtype,
    group: Group = SINGLE,
) -> Outline:
    """What is known of a model that `describe` has found. Raises as `prepare`."""
    checkpoint, spec, window = description
    architecture = registry.decoder_class(spec.family)
    quantization = _quantization(config, checkpoint, spec, architecture.components(spec), device)
    if group.size > 1:
        _check_size(config.model, checkpoint, spec, architecture, quantization, group.size)
    return Outline(
        checkpoint=checkpoint, spec=spec, window=window, architecture=architecture,
        quantization=quantization, dtype=dtype, group=group,
        kept=device.kept_dtypes(dtype) if isinstance(device, KeepingDevice) else (),
    )  # fmt: skip


def load_model(
    config: EngineConfig, device: LoadingDevice, dtype: torch.dtype, group: Group = SINGLE
) -> Decoder:
    """`prepare`, then `load`."""
    return load(prepare(config, device, dtype, group), config, device)


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
        ranks = prepared.group.size
        logger.info("%s%s", note, f", divided among {ranks} ranks" if ranks > 1 else "")
    products = device.products(dtype, config.max_num_batched_tokens, config.deterministic)
    weights = Weights(
        spec, architecture, checkpoint, device.torch_device, dtype, device.decode_blocks,
        Shard.of(prepared.group), device.uploads() if isinstance(device, UploadingDevice) else None,
        prepared.kept,
    )  # fmt: skip
    divided = {"group": prepared.group} if prepared.group.size > 1 else {}
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
            **divided,
        )
    logger.info("products: %s", products.explain())
    if products.unstable:
        logger.warning(
            "GEMM shapes %s are not batch-invariant: last bits may change with the rows of a step; "
            "deterministic=True makes them independent of it and long prompts slower",
            ", ".join(products.unstable),
        )
    return model


def describe(config: EngineConfig) -> Description:
    """The opened model that `config` names, what it is, and the longest sequence that positions
    are prepared for. No weight is read, and nothing is made whose size only a file vouches for.
    """
    checkpoint = resolve(config.model, config.revision).open()
    return described(config, checkpoint, load_spec(checkpoint))


def described(config: EngineConfig, checkpoint: Checkpoint, spec: ModelSpec) -> Description:
    """`spec` with what `config` says of the model, and the window."""
    spec = _with_ids(config, checkpoint, spec)
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
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    components: Sequence[str],
    device: QuantizingDevice,
) -> QuantConfig:
    """What the options and the checkpoint ask for. Raises ConfigError where they disagree, or ask
    for what the device does not have."""
    stored = spec.quantization
    check_agrees(config.quantization, stored)
    computed = None if stored is None else stored.computed_as
    if computed not in (None, NONE, *device.quantization):
        logger.info("device %r has no %s products: weights are dequantized", device.name, computed)
        computed = NONE
    if config.quantization == NONE:
        computed = None if stored is None else NONE
    elif config.quantization == GGUF:
        if not _holds_blocks(checkpoint):
            raise ConfigError(
                f"quantization {GGUF!r} is for GGUF files with quantized tensors; "
                f"{config.model} has none; leave the option out"
            )
        computed = STORED
    elif stored is None and config.quantization is None and _holds_blocks(checkpoint):
        computed = STORED if device.keeps_blocks and STORED in device.quantization else None
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


def _holds_blocks(checkpoint: Checkpoint) -> bool:
    return any(form_of(tensor.format) is not None for tensor in checkpoint.tensors.values())


def _check_size(
    model: str,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    architecture: type[Decoder],
    quantization: QuantConfig,
    size: int,
) -> None:
    """Raise ConfigError where so many ranks cannot divide the model, before a weight is read."""
    if not hasattr(architecture, "parameter_cuts"):
        raise ConfigError(
            f"tensor_parallel_size={size}: {architecture.__name__} ({spec.architecture}) does not "
            "say how its parameters are divided (parameter_cuts); possible: 1"
        )
    cuts = architecture.parameter_cuts(spec)
    whole = [*even(cuts), *_groups(checkpoint, spec, architecture, quantization)]
    check_size(size, model, whole, most_ranks(cuts))


def _groups(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    architecture: type[Decoder],
    quantization: QuantConfig,
) -> Iterator[Requirement]:
    """Quantized weights are cut between groups: values that share a scale, or are packed into one
    number."""
    shapes, cuts = architecture.parameter_shapes(spec), architecture.parameter_cuts(spec)
    stored = {architecture.parameter_name(spec, name) for name in checkpoint.tensors}
    for name in sorted(architecture.product_weights(spec)):
        cut, component = cuts[name], name.removeprefix("model.").removesuffix(".weight")
        component = _EXPERT.sub(".experts.", component)
        if cut.kind not in ("row", "column"):
            continue
        form = spec.quantization
        parts = {} if form is None else form.parts(shapes[name])
        # One of a format's parts may itself be called "weight".
        further = {name.removesuffix("weight") + ending for ending in parts.keys() - {"weight"}}
        if checkpoint.tensors and stored.isdisjoint(further):
            parts = {}  # stored as floats, which any cut may divide
        for part in parts.values():
            _, each = (part.inputs if cut.kind == "row" else part.outputs) or (0, 1)
            each = math.lcm(each, part.together if cut.kind == "row" else 1)
            if form is not None and each > 1:
                yield aligned(name, cut, each, form.METHOD)
        method = quantization.method(component)
        if cut.kind == "row" and method in (INT4, W4A8):
            yield aligned(name, cut, GROUP, method)


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
    each = position_bytes(spec)
    most = max(_TABLE_BYTES, sum(tensor.num_bytes for tensor in checkpoint.tensors.values()))
    if longest * each > most:
        raise NotEnoughMemoryError(
            f"{checkpoint.root}: tables of {longest} positions take "
            f"{longest * each / 2**30:.1f} GiB, more than the weights; set max_model_len "
            f"to at most {most // each}"
        )
    if config.max_model_len is None:
        return longest
    if config.max_model_len > spec.longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for at most "
            f"{spec.longest} tokens"
        )
    return config.max_model_len


def position_bytes(spec: ModelSpec) -> int:
    """What tables of rotary embeddings take for each position of the window."""
    tables = {
        (layer.rope, temperature, layer.attention.head_dim)
        for layer in spec.layers
        for temperature in {None, layer.query_temperature}
        if layer.rope is not None or temperature is not None
    }
    return sum(head_dim * 4 for *_, head_dim in tables)
