"""The description of an opened model, and the only reader of Hugging Face configs.

Defaults and precedence follow transformers, whose configs leave out what equals the default of
the family's class. A value that is not understood is an error: it never falls back silently.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from octavo.attention.base import AttentionSpec
from octavo.checkpoint.base import Checkpoint, Naming
from octavo.checkpoint.json_file import read_json
from octavo.errors import CheckpointError, shown
from octavo.layers.mlp import Activation
from octavo.layers.norm import NormSpec
from octavo.layers.rope import ROPE_KINDS, QueryTemperature, RopeKind, RopeSpec, cos_sin_table
from octavo.models import gguf_config
from octavo.models.fields import MOST_LAYERS, Fields, is_number
from octavo.models.folder import CONFIG
from octavo.models.registry import BiasRule, Family, Wrapper, by_architecture, wrapper_of
from octavo.models.spec import LayerSpec, ModelSpec
from octavo.models.spellings import agree, check_rope_keys, one_of, rope_block
from octavo.quant import registry as quantizations
from octavo.quant.declared import FILES as QUANTIZATION_FILES
from octavo.quant.declared import declared

GENERATION = "generation_config.json"

# What generation_config.json may recommend: how to sample, not how long an answer is.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "use_sliding_window": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# What a wrapper's own config says for its text part, unless `text_config` says it, too.
_OF_WRAPPER = (
    "eos_token_id", "bos_token_id", "dtype", "torch_dtype", "quantization_config",
    "tie_word_embeddings",
)  # fmt: skip
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_IN_BLOCK_TOO = ("partial_rotary_factor", "original_max_position_embeddings")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def load_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The description of an opened model. Raises CheckpointError, naming file and field.

    In a GGUF a tensor's presence says whether embeddings are tied and biases exist.
    """
    spec = _READERS[checkpoint.container.naming](checkpoint)
    _check_ropes(checkpoint.root, spec)
    return spec


def _check_ropes(root: Path, spec: ModelSpec) -> None:
    """Raise CheckpointError for rotary embeddings whose fields, each right by itself, give none."""
    for rope, head_dim in {(layer.rope, layer.attention.head_dim) for layer in spec.layers}:
        if rope is None:
            continue
        try:
            table = cos_sin_table(rope, head_dim, 2)
            fine = bool(table.isfinite().all())
        except (ArithmeticError, ValueError, RuntimeError):
            fine = False
        if not fine:
            raise CheckpointError(
                f"{root}: the rotary embedding's fields give no finite frequencies: "
                f"{shown(rope, 400)}"
            )


def _from_folder(checkpoint: Checkpoint) -> ModelSpec:
    folder = checkpoint.root
    generation = folder / GENERATION
    return from_config(
        read_json(folder / CONFIG),
        read_json(generation) if generation.is_file() else {},
        str(folder / CONFIG),
        {n: read_json(folder / n) for n in QUANTIZATION_FILES if (folder / n).is_file()},
    )


def _from_gguf(checkpoint: Checkpoint) -> ModelSpec:
    return gguf_config.read(str(checkpoint.root), checkpoint.metadata, checkpoint.tensors)


_READERS: Mapping[Naming, Callable[[Checkpoint], ModelSpec]] = {
    "huggingface": _from_folder,
    "gguf": _from_gguf,
}


def from_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    source: str = CONFIG,
    quantization_files: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> ModelSpec:
    """The spec of a Hugging Face config (and generation config). Raises CheckpointError.

    quantization_files: the content of those of `quant.declared.FILES` that lie beside it.
    """
    wrapper = wrapper_of(_architecture(config, source))
    if wrapper is not None:
        config = _text_part(config, wrapper, source)
    try:
        family = by_architecture(_architecture(config, source))
    except CheckpointError as error:
        raise error if source in str(error) else CheckpointError(f"{source}: {error}") from error
    fields = Fields(source, config, {**_DEFAULTS, **family.defaults})
    if fields.get("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", True, "false: attention is causal")
    max_position = fields.integer("max_position_embeddings")
    norm = NormSpec(
        fields.number(family.norm_eps),
        family.norm,
        family.norm_offset,
        family.norm_bias,
        family.norm_cast_first,
    )
    hidden = fields.integer("hidden_size")
    extra = Fields(str(Path(source).with_name(GENERATION)), generation or {})
    quantized = declared(source, fields.get("quantization_config"), quantization_files)
    return ModelSpec(
        family=family,
        wrapper=wrapper,
        architecture=family.architecture if wrapper is None else wrapper.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        max_position=max_position,
        layers=_layers(family, fields, norm, max_position),
        final_norm=norm,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_bias(family.qkv_bias, fields.flag("attention_bias")),
        output_bias=_bias(family.output_bias, fields.flag("attention_bias")),
        mlp_bias=_bias(family.mlp_bias, fields.flag("mlp_bias")),
        embedding_scale=(
            fields.number("embedding_multiplier", 1.0)
            if family.multipliers
            else family.fixed_embedding_scale(hidden)
        ),
        logit_divisor=fields.number("logits_scaling", 1.0) if family.multipliers else 1.0,
        logit_soft_cap=_soft_cap(family, fields, "final_logit_softcapping"),
        eos_token_ids=tuple(dict.fromkeys(fields.ids("eos_token_id") + extra.ids("eos_token_id"))),
        bos_token_id=fields.optional("bos_token_id", 0),
        checkpoint_dtype=_dtype(fields),
        generation_defaults=_generation_defaults(extra),
        extra={name: fields.get(name) for name in family.extra_fields},
        quantization=None if quantized is None else quantizations.describe(quantized, source),
    )


def _architecture(config: Mapping[str, Any], source: str) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    if isinstance(config.get("model_type"), str):
        return str(config["model_type"])
    raise CheckpointError(f"{source} names no 'architectures' and no 'model_type'")


def _text_part(config: Mapping[str, Any], wrapper: Wrapper, source: str) -> Mapping[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(
            f"{source}: text_config is {shown(text)}; a {wrapper.architecture} needs an object "
            "there"
        )
    outer = {name: config[name] for name in _OF_WRAPPER if name in config}
    return {**outer, **text}


def _dtype(fields: Fields) -> str | None:
    for name in ("dtype", "torch_dtype"):
        fields.text(name)
    named: str | None = one_of(fields, "dtype", "torch_dtype")
    return named


def _bias(rule: BiasRule, configured: bool) -> bool:
    return rule == "always" or (rule == "config" and configured)


def _soft_cap(family: Family, fields: Fields, name: str) -> float | None:
    return fields.maybe_number(name) if family.soft_caps else None


def _layers(
    family: Family, fields: Fields, norm: NormSpec, max_position: int
) -> tuple[LayerSpec, ...]:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.optional("num_key_value_heads") or heads
    head_dim = fields.optional("head_dim") or hidden // heads
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if head_dim % 2 or not head_dim:
        raise fields.wrong("head_dim", head_dim, "even and above 0")
    scale = head_dim**-0.5
    if family.scale == "query_pre_attn_scalar":
        scale = fields.number("query_pre_attn_scalar") ** -0.5
    elif family.scale == "attention_multiplier":
        scale = fields.number("attention_multiplier")
    soft_cap = _soft_cap(family, fields, "attn_logit_softcapping")
    count = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    rotated = _rotated(family, fields, count)
    windows = _windows(family, fields, rotated)
    rope = _Ropes(family, fields, max_position, head_dim)
    activation = fields.choice(family.activation, ACTIVATIONS)
    return tuple(
        LayerSpec(
            AttentionSpec(heads, kv_heads, head_dim, scale, window, soft_cap),
            rope.of(window) if has_rope else None,
            norm,
            placement=family.placement,
            qk_norm=family.qk_norm,
            activation=activation,
            query_temperature=rope.temperature,
            residual_scale=fields.number("residual_multiplier", 1.0) if family.multipliers else 1.0,
        )
        for window, has_rope in zip(windows, rotated, strict=True)
    )


def _rotated(family: Family, fields: Fields, count: int) -> list[bool]:
    """Per layer, whether it has rotary embedding."""
    if family.rope != "interval":
        return [True] * count
    given = fields.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(count)]
    # transformers accepts a longer list.
    if not isinstance(given, list) or len(given) < count or not _all_in(given, (0, 1)):
        raise fields.wrong("no_rope_layers", given, f"at least {count} of 0 (no rotary) and 1")
    return [bool(value) for value in given[:count]]


def _all_in(items: list[Any], known: Collection[Any]) -> bool:
    """Whether each of `items`, which may be anything, is one of `known`."""
    return all(any(item == one for one in known) for item in items)


def _windows(family: Family, fields: Fields, rotated: list[bool]) -> list[int | None]:
    """Per layer, its window. `layer_types` goes before any rule."""
    count, rule = len(rotated), family.window
    if rule == "none":
        return [None] * count
    window = fields.optional("sliding_window")
    if rule == "if used" and not fields.flag("use_sliding_window"):
        window = None
    if rule in ("all", "if used"):
        return [window] * count
    if rule != "period" and not fields.flag("use_sliding_window"):
        window = None
    types = fields.get("layer_types")
    if types is None:
        has_window = _window_rule(family, fields, rotated)
        return [window if has_window(layer) else None for layer in range(count)]
    known = {_FULL: None, _SLIDING: window}
    if not isinstance(types, list) or len(types) != count or not _all_in(types, known):
        raise fields.wrong("layer_types", types, f"{count} of {sorted(known)}")
    return [known[kind] for kind in types]


def _window_rule(family: Family, fields: Fields, rotated: list[bool]) -> Callable[[int], bool]:
    """Which layers have a window where the config does not list them."""
    if family.window == "period":
        period = fields.optional("sliding_window_pattern") or family.window_period
        return lambda layer: (layer + 1) % period != 0
    if family.window == "no rope":
        return lambda layer: not rotated[layer]
    full = fields.integer("max_window_layers", 0)
    return lambda layer: layer >= full


class _Ropes:
    """The rotary embeddings of a config: `rope_scaling` of older ones and `rope_parameters` of
    transformers 5 alike, one for all layers or one for layers with a window."""

    def __init__(self, family: Family, fields: Fields, max_position: int, head_dim: int) -> None:
        self._fields, self._family = fields, family
        self._max_position, self._head_dim = max_position, head_dim
        given = rope_block(fields)
        nested = {name for name, value in given.items() if isinstance(value, Mapping)}
        if nested and (family.rope != "by window" or not nested <= {_FULL, _SLIDING}):
            raise fields.wrong("rope_parameters", sorted(nested), "one set for all layers")
        if nested and (flat := given.keys() - nested - {"rope_type"}):
            raise fields.wrong("rope_parameters", sorted(given), f"without {sorted(flat)}")
        theta = fields.get("rope_theta")
        full = given.get(_FULL) or {} if nested else given
        self._check_once(full, "rope_theta")
        self._full, self.temperature = self._read({"rope_theta": theta, **full})
        self._sliding = self._full
        if family.rope == "by window":
            local, sliding = fields.get("rope_local_base_freq") or theta, given.get(_SLIDING) or {}
            self._check_once(sliding, "rope_local_base_freq")
            self._sliding, _ = self._read({"rope_theta": local, **sliding})

    def _check_once(self, block: Mapping[str, Any], theta: str) -> None:
        """What stands in the config and in a block must agree. theta: its name in the config."""
        pairs = [(theta, "rope_theta"), *((name, name) for name in _IN_BLOCK_TOO)]
        for name, within in pairs:
            given = self._fields.given(name)
            agree(self._fields.source, (name, given), (f"rope: {within}", block.get(within)))

    def of(self, window: int | None) -> RopeSpec:
        return self._full if window is None else self._sliding

    def _read(self, values: Mapping[str, Any]) -> tuple[RopeSpec, QueryTemperature | None]:
        fields = self._fields
        rope = Fields(f"{fields.source}: rope", values)
        kinds = {kind: kind for kind in ROPE_KINDS}
        if self._family.longrope:
            kinds |= {"su": "longrope", "yarn": "longrope"}
        named = values.get("rope_type")
        named = "default" if named is None else named
        if not isinstance(named, str) or named not in kinds:
            raise rope.wrong("rope_type", named, f"one of {', '.join(kinds)}")
        kind = cast(RopeKind, kinds[named])
        theta = rope.number("rope_theta", 10000.0)
        fraction = self._fraction(rope)
        if kind == "default":
            return RopeSpec(theta, fraction=fraction), None
        check_rope_keys(rope, values)
        spec = self._scaled(kind, rope, theta, fraction)
        beta = rope.maybe_number("llama_4_scaling_beta") if self._family.temperature else None
        length = spec.original_max_position
        return spec, None if beta is None else QueryTemperature(beta, length)

    def _fraction(self, rope: Fields) -> float:
        """The part of a head that is rotated: a whole, even number of dimensions."""
        name = "partial_rotary_factor"
        value = rope.number(name, self._fields.number(name, 1.0))
        if value != 1 and not self._family.partial_rotary:
            raise rope.wrong(name, value, "1")
        if value > 1 or int(self._head_dim * value) % 2:
            right = f"at most 1, for an even part of the head size, {self._head_dim}"
            raise rope.wrong(name, value, right)
        return value

    def _scaled(self, kind: RopeKind, rope: Fields, theta: float, fraction: float) -> RopeSpec:
        fields, original = self._fields, self._max_position
        if kind in ("llama3", "yarn", "longrope"):  # the config's own field before the block's
            original = (
                fields.optional("original_max_position_embeddings")
                or rope.optional("original_max_position_embeddings")
                or self._max_position
            )
        if kind in ("yarn", "longrope") and rope.get("factor") is None:
            factor = self._max_position / original
        else:
            factor = rope.number("factor")
        llama3, longrope = kind == "llama3", kind == "longrope"
        pairs = int(self._head_dim * fraction) // 2
        return RopeSpec(
            theta,
            kind,
            factor,
            original,
            low_freq_factor=rope.number("low_freq_factor") if llama3 else 1.0,
            high_freq_factor=rope.number("high_freq_factor") if llama3 else 4.0,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.maybe_number("attention_factor"),
            mscale=rope.maybe_number("mscale"),
            mscale_all_dim=rope.maybe_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
            short_factors=rope.numbers("short_factor", pairs) if longrope else (),
            long_factors=rope.numbers("long_factor", pairs) if longrope else (),
            fraction=fraction,
        )


def _generation_defaults(fields: Fields) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _SAMPLING:
        value = fields.get(name)
        if value is None:
            continue
        if not is_number(value):
            raise fields.wrong(name, value, "a number")
        found[name] = value
    return found
