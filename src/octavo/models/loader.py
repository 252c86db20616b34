"""From a configuration to a loaded model: find, describe, check, then fill.

Strict both ways, before any weight is read: every tensor of the checkpoint must be a parameter
and every parameter must be there in the right shape.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from octavo.attention import registry as attention_registry
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.kernels.dispatch import Ops
from octavo.layers.linear import Products
from octavo.log import get_logger
from octavo.models import registry
from octavo.models.architecture import Architecture, GgufTensor
from octavo.models.config import load_spec
from octavo.models.decoder import Decoder
from octavo.models.files import ModelFiles, resolve
from octavo.models.gguf_config import METADATA_TENSORS
from octavo.models.spec import ModelSpec
from octavo.models.weights import Checkpoint, StoredTensor, name_list, open_checkpoint
from octavo.quant.base import INT4, Codes, Recipe, recipe
from octavo.quant.stored import check_agrees

logger = get_logger(__name__)

_WHOLE = (".qweight", ".qzeros", ".g_idx")  # stored tensors of integers


class LoadingDevice(Protocol):
    """What a model is loaded onto and built with. `torch_device`: as torch calls it."""

    @property
    def torch_device(self) -> str: ...

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
        """As `quant.gguf.BlockDecoder`: a fast decoder of GGUF blocks, where there is one."""
        ...


def load_model(config: EngineConfig, device: LoadingDevice, dtype: torch.dtype) -> Decoder:
    """Load the model that `config` names, its weights in `dtype` on `device`.

    Raises ModelNotFoundError, CheckpointError or ConfigError before any weight is read when
    something is missing, damaged or unknown.
    """
    checkpoint = open_checkpoint(resolve(config.model, config.revision))
    spec = load_spec(checkpoint)
    architecture = registry.decoder_class(spec.family)
    how = _recipe(config, spec, architecture.components(spec))
    window = _window(config, spec)
    backend = attention_registry.create(
        config.attention_impl, device.torch_device, dtype, architecture.describe_attention(spec),
        config.block_size, kv_dtype(config, dtype), device.attention_order,
    )  # fmt: skip
    logger.info(
        "loading %s (%s) from %s", config.model, spec.architecture, _described(checkpoint.files)
    )
    products = device.products(dtype, config.max_num_batched_tokens, config.deterministic)
    weights = Weights(spec, architecture, checkpoint, device, dtype, config.load_progress)
    with weights.progress():
        model: Decoder = architecture(
            spec,
            weights,
            ops=device.ops(dtype),
            products=products,
            backend=backend,
            window=window,
            head_rows=config.max_num_seqs,
            recipe=how,
        )
    logger.info("products: %s", products.explain())
    if products.unstable:
        logger.warning(
            "GEMM shapes %s are not batch-invariant: last bits may change with the rows of a step; "
            "deterministic=True makes them independent of it and long prompts slower",
            ", ".join(products.unstable),
        )
    return model


def _recipe(config: EngineConfig, spec: ModelSpec, components: Sequence[str]) -> Recipe:
    """What the options and the checkpoint ask for. Raises ConfigError where they disagree."""
    check_agrees(config.quantization, spec.stored)
    computed = None if spec.stored is None else spec.stored.computed_as
    how = recipe(config.quantization, config.quantization_override, computed)
    how.check(components)
    if spec.stored is not None:
        logger.info("weights: %s", spec.stored.explain())
    return how


def kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of the KV cache of a model in `dtype`."""
    name = config.kv_cache_dtype
    return dtype if name == "auto" else attention_registry.KV_DTYPES[name]


def _described(files: ModelFiles) -> str:
    return ", ".join(str(path) for path in files.weights)


def _window(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence that positions are prepared for."""
    if config.max_model_len is None:
        return spec.max_position
    if config.max_model_len > spec.longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}; the model was made for at most "
            f"{spec.longest} tokens"
        )
    return config.max_model_len


@dataclass(frozen=True, slots=True)
class Source:
    """A parameter's stored tensor; heads, shift: as in `GgufTensor`."""

    tensor: StoredTensor
    heads: int = 0
    shift: float = 0.0


def _renamed(
    spec: ModelSpec, architecture: type[Architecture], checkpoint: Checkpoint
) -> dict[str, Source]:
    """Stored tensors by the parameter they hold, without those that are not needed or empty."""
    kept = {name: t for name, t in checkpoint.tensors.items() if t.num_bytes}
    if not checkpoint.files.is_gguf:
        names = {name: architecture.parameter_name(spec, name) for name in kept}
        return {n: Source(kept[stored]) for stored, n in names.items() if n is not None}
    table = architecture.gguf_tensors(spec)
    found: dict[str, Source] = {}
    for name, tensor in kept.items():
        if name in METADATA_TENSORS:
            continue
        known = table.get(name, GgufTensor(name))
        found[known.parameter] = Source(tensor, known.heads, known.shift)
    return found


class Weights:
    """The parameters of one model, checked, and handed out once each.

    Raises CheckpointError at once for a tensor missing, unexpected or of another shape.
    """

    def __init__(
        self,
        spec: ModelSpec,
        architecture: type[Architecture],
        checkpoint: Checkpoint,
        device: LoadingDevice,
        dtype: torch.dtype,
        show_progress: bool = False,
    ) -> None:
        sources = _renamed(spec, architecture, checkpoint)
        self._sources = _settle_head(spec, architecture, sources)
        self._shapes = architecture.parameter_shapes(spec)
        self._product_weights = architecture.product_weights(spec)
        self._stored = spec.stored
        self._device, self._dtype = device.torch_device, dtype
        self._decoder = device.decode_blocks
        self._show_progress = show_progress
        self._bar: Any = None
        self._check()

    def take(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Parameters.take; the result is a new tensor."""
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=dtype or self._dtype)
        begin = 0
        for name, shape in zip(names, shapes, strict=True):
            self._fill(self._sources.pop(name), out[begin : begin + shape[0]])
            begin += shape[0]
        return out.to(self._device)

    def matrix(self, method: str, *names: str) -> torch.Tensor | Codes:
        """The matrices `names` one under the other: codes if AWQ or GPTQ or (where `method` is
        int4) blocks of 4 bits hold all of them in equal groups, else values."""
        kinds = [self._sources[name].tensor.format for name in names if name in self._sources]
        packed = len(kinds) < len(names)
        if packed or (method == INT4 and all(kind and kind.codes for kind in kinds)):
            return self._stacked([self._codes(name) for name in names])
        return self.take(*names)

    def _codes(self, name: str) -> torch.Tensor | Codes:
        """One matrix as it is stored."""
        source = self._sources.pop(name, None)
        if source is None:
            return self._unpacked(name.removesuffix("weight"))
        codes = source.tensor.codes()
        if codes is None:
            self._sources[name] = source
            return self.take(name)
        self._read(source)
        if not source.heads:
            return codes
        return codes.map(lambda rows: _plain_order(rows, source.heads))

    def _unpacked(self, at: str) -> torch.Tensor | Codes:
        """An AWQ or GPTQ product, of the tensors whose names begin with `at`."""
        assert self._stored is not None
        parts = {}
        for part in self._stored.parts(1, 1):
            source = self._sources.pop(at + part)
            kind = torch.float32 if part == "scales" else torch.int32
            parts[part] = torch.empty(source.tensor.shape, dtype=kind)
            source.tensor.read_into(parts[part])
            self._read(source)
        try:
            return self._stored.codes(parts)
        except CheckpointError as error:
            raise CheckpointError(f"{at}: {error}") from error

    def _stacked(self, parts: list[torch.Tensor | Codes]) -> torch.Tensor | Codes:
        codes = [part for part in parts if isinstance(part, Codes)]
        if len(codes) == len(parts) and len({(part.group, part.bits) for part in codes}) == 1:
            return Codes.stacked(codes)
        values = [part.values() if isinstance(part, Codes) else part for part in parts]
        return torch.cat([part.to(self._dtype) for part in values]).to(self._device)

    def progress(self) -> Any:
        """The progress bar, in bytes of the files; closed at the end of a `with`."""
        total = sum(source.tensor.num_bytes for source in self._sources.values())
        self._bar = tqdm(
            total=total, unit="B", unit_scale=True, desc="loading weights", leave=False,
            disable=not self._show_progress, delay=0.5,
        )  # fmt: skip
        return self._bar

    def _fill(self, source: Source, out: torch.Tensor) -> None:
        if source.heads:
            stored = torch.empty_like(out)
            source.tensor.read_into(stored, self._decoder)
            out.copy_(_plain_order(stored, source.heads))
        else:
            source.tensor.read_into(out, self._decoder)
        if source.shift:
            out.add_(source.shift)
        self._read(source)

    def _read(self, source: Source) -> None:
        if self._bar is not None:
            self._bar.update(source.tensor.num_bytes)

    def _stored_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What the checkpoint should hold: every parameter, but for a product in a quantized
        format, whose weight is absent, the tensors of that format."""
        if self._stored is None:
            return self._shapes
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self._shapes.items():
            if name in self._product_weights and name not in self._sources:
                at = name.removesuffix("weight")
                parts = self._stored.parts(shape[0], shape[1])
                found |= {at + part: dims for part, dims in parts.items()}
            else:
                found[name] = shape
        return found

    def _check(self) -> None:
        held, wanted = self._sources, self._stored_shapes()
        problems = list(_shape_problems(held, wanted))
        if missing := sorted(wanted.keys() - held.keys()):
            problems.append(f"missing: {name_list(missing)}")
        if extra := sorted(held.keys() - wanted.keys()):
            problems.append(f"unexpected: {name_list(extra)}")
        for name, source in held.items():
            whole = name.endswith(_WHOLE) and name in wanted
            if source.tensor.format is None or source.tensor.format.is_float == whole:
                problems.append(f"{name!r} has the type {source.tensor.type_name}")
        if problems:
            file = next((s.tensor.file for s in held.values()), "no tensors at all")
            raise CheckpointError(
                f"the weights do not fit the model's config ({file}): {'; '.join(problems[:8])}"
            )


def _plain_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of GGUF's order, the two of each rotary pair side by side, in Hugging Face's."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


def _shape_problems(
    held: Mapping[str, Source], wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    for name in sorted(wanted.keys() & held.keys()):
        if held[name].tensor.shape != wanted[name]:
            yield f"{name!r} has the shape {held[name].tensor.shape}, not {wanted[name]}"


def _settle_head(
    spec: ModelSpec, architecture: type[Architecture], sources: dict[str, Source]
) -> dict[str, Source]:
    """A tied model uses the embedding as its head, as transformers does, whatever else is stored.

    Untied and without a head is an error, which the strict check reports with its remedy.
    """
    name = architecture.HEAD
    if not spec.tie_embeddings:
        if name not in sources:
            raise CheckpointError(
                f"the checkpoint holds no {name!r} and its config says tie_word_embeddings=false; "
                "add the tensor, or set tie_word_embeddings to true if the embedding is the head"
            )
        return sources
    head, embed = sources.pop(name, None), sources.get(architecture.EMBEDDING)
    if head is not None and embed is not None and not _same_values(head.tensor, embed.tensor):
        logger.warning(
            "%s differs from the embedding, but the config ties them: the embedding is used", name
        )
    return sources


def _same_values(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.shape, a.type_name) != (b.shape, b.type_name):
        return False
    return a.data[a.offset : a.offset + a.num_bytes] == b.data[b.offset : b.offset + b.num_bytes]
