"""The frozen description of a model, and the only reader of Hugging Face and GGUF configs.

Defaults and precedence follow transformers, whose configs leave out what equals the default of
the family's class. A value that is not understood is an error: it never falls back silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from octavo.errors import CheckpointError
from octavo.layers.rope import ROPE_KINDS, RopeKind, RopeSpec, attention_scale
from octavo.models.files import CONFIG, read_json
from octavo.models.registry import BiasRule, Family, by_architecture
from octavo.models.weights import Checkpoint, StoredTensor
from octavo.quant.stored import StoredFormat, stored_format

GENERATION = "generation_config.json"

# What generation_config.json may recommend: how to sample, not how long an answer is.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "use_sliding_window": False, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model is. Sizes in values, lengths in tokens.

    max_position: the model's window. windows: per layer, tokens that its attention sees (the
        current one included); None: all. eos_token_ids: every id that ends a text.
    generation_defaults: sampling fields of `SamplingParams` that the checkpoint recommends.
    """

    family: Family
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    stored: StoredFormat | None = None  # how an AWQ or GPTQ checkpoint holds its products

    @property
    def longest(self) -> int:
        """The most tokens that `max_model_len` may ask for: scaling reaches past the window."""
        scaled = 0
        if self.rope.kind in ("dynamic", "yarn", "linear"):
            scaled = int(self.rope.original_max_position * self.rope.factor)
        return max(self.max_position, scaled)


def load_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The description of an opened model. Raises CheckpointError, naming file and field.

    In a GGUF a tensor's presence says whether embeddings are tied and biases exist.
    """
    files = checkpoint.files
    if files.is_gguf:
        return _from_gguf(str(files.root), checkpoint.metadata, checkpoint.tensors)
    generation = files.root / GENERATION
    return from_config(
        read_json(files.root / CONFIG),
        read_json(generation) if generation.is_file() else {},
        str(files.root / CONFIG),
    )


class _Fields:
    """A config with its family's defaults. Each getter checks type and range."""

    def __init__(self, source: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.source = source
        self._values = values
        self._defaults = defaults

    def get(self, name: str) -> Any:
        return self._values.get(name, self._defaults.get(name))

    def integer(self, name: str, low: int = 1) -> int:
        value = self.optional(name, low)
        if value is None:
            raise CheckpointError(f"{self.source} lacks {name!r}")
        return value

    def optional(self, name: str, low: int = 1) -> int | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.wrong(name, value, f"an integer of at least {low}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def maybe_number(self, name: str) -> float | None:
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            raise self.wrong(name, value, "a token id or a list of them")
        return tuple(i for i in items if i >= 0)

    def wrong(self, name: str, value: object, right: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {name} is {value!r}; it must be {right}")


def from_config(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, source: str = CONFIG
) -> ModelSpec:
    """The spec of a Hugging Face config (and generation config). Raises CheckpointError."""
    family = by_architecture(_architecture(config, source))
    fields = _Fields(source, config, {**_DEFAULTS, **family.defaults})
    _refuse_unsupported(fields)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    kv_heads = fields.optional("num_key_value_heads") or heads
    head_dim = fields.optional("head_dim") or hidden // heads
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if head_dim % 2:
        raise fields.wrong("head_dim", head_dim, "even")
    layers = fields.integer("num_hidden_layers")
    max_position = fields.integer("max_position_embeddings")
    extra = _Fields(GENERATION, generation or {}, {})
    quantized = fields.get("quantization_config")
    return ModelSpec(
        family=family,
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_position=max_position,
        rms_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=_bias(family.qkv_bias, fields.flag("attention_bias")),
        output_bias=_bias(family.output_bias, fields.flag("attention_bias")),
        mlp_bias=_bias(family.mlp_bias, fields.flag("mlp_bias")),
        qk_norm=family.qk_norm,
        windows=_windows(family, fields, layers),
        eos_token_ids=tuple(dict.fromkeys(fields.ids("eos_token_id") + extra.ids("eos_token_id"))),
        bos_token_id=fields.optional("bos_token_id", 0),
        checkpoint_dtype=fields.get("dtype") or fields.get("torch_dtype"),
        generation_defaults=_generation_defaults(extra),
        stored=None if quantized is None else stored_format(quantized, source),
    )


def _architecture(config: Mapping[str, Any], source: str) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    if isinstance(config.get("model_type"), str):
        return str(config["model_type"])
    raise CheckpointError(f"{source} names no 'architectures' and no 'model_type'")


def _refuse_unsupported(fields: _Fields) -> None:
    if fields.get("hidden_act") != "silu":
        raise fields.wrong("hidden_act", fields.get("hidden_act"), "'silu'")


def _bias(rule: BiasRule, configured: bool) -> bool:
    return rule == "always" or (rule == "config" and configured)


def _windows(family: Family, fields: _Fields, layers: int) -> tuple[int | None, ...]:
    """Per layer, its window. `layer_types` goes before `max_window_layers`."""
    if family.window == "none":
        return (None,) * layers
    window = fields.optional("sliding_window")
    if family.window == "all":
        return (window,) * layers
    if not fields.flag("use_sliding_window"):
        window = None
    types = fields.get("layer_types")
    if types is None:
        full = fields.integer("max_window_layers", 0)
        return tuple(window if layer >= full else None for layer in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or not set(types) <= set(known):
        raise fields.wrong("layer_types", types, f"{layers} of {sorted(known)}")
    return tuple(known[kind] for kind in types)


def _rope(fields: _Fields, max_position: int) -> RopeSpec:
    """`rope_scaling` of older configs and `rope_parameters` of transformers 5 alike."""
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise fields.wrong("rope_parameters", given, "an object")
    values = {"rope_theta": fields.get("rope_theta"), **given}
    rope = _Fields(f"{fields.source}: rope", values, {})
    if nested := [name for name, value in given.items() if isinstance(value, Mapping)]:
        raise rope.wrong("rope_parameters", nested, "one set for all layers")
    if (rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1) != 1:
        raise rope.wrong("partial_rotary_factor", rope.get("partial_rotary_factor"), "1")
    kind = given.get("rope_type", given.get("type")) or "default"
    if kind not in ROPE_KINDS:
        raise rope.wrong("rope_type", kind, f"one of {', '.join(ROPE_KINDS)}")
    theta = rope.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeSpec(theta)
    return _scaled_rope(cast(RopeKind, kind), rope, theta, fields, max_position)


def _scaled_rope(
    kind: RopeKind, rope: _Fields, theta: float, fields: _Fields, max_position: int
) -> RopeSpec:
    original = max_position
    if kind in ("llama3", "yarn"):  # a config's own field goes before the one in the block
        original = (
            fields.optional("original_max_position_embeddings")
            or rope.optional("original_max_position_embeddings")
            or max_position
        )
    if kind == "yarn" and rope.get("factor") is None:
        factor = max_position / original
    else:
        factor = rope.number("factor")
    llama3 = kind == "llama3"
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
    )


def _generation_defaults(fields: _Fields) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _SAMPLING:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise fields.wrong(name, value, "a number")
        found[name] = value
    return found


def _from_gguf(
    path: str, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> ModelSpec:
    """The spec in a GGUF file's metadata; its keys begin with the architecture's name."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{path} names no general.architecture")
    family = by_architecture(name)
    own = {k.removeprefix(f"{name}."): v for k, v in metadata.items() if k.startswith(f"{name}.")}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    fields = _Fields(path, own, {"vocab_size": len(tokens)})
    heads, hidden = fields.integer("attention.head_count"), fields.integer("embedding_length")
    kv_heads = fields.optional("attention.head_count_kv") or heads
    head_dim = fields.optional("attention.key_length") or hidden // heads
    if heads % kv_heads:
        raise fields.wrong("attention.head_count_kv", kv_heads, f"a divisor of {heads} heads")
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.get(key) not in (None, head_dim):
            raise fields.wrong(key, fields.get(key), f"the head size, {head_dim}")
    layers = fields.integer("block_count")
    max_position = fields.integer("context_length")
    window = fields.optional("attention.sliding_window")
    general = _Fields(path, metadata, {})
    return ModelSpec(
        family=family,
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("feed_forward_length"),
        max_position=max_position,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(fields, max_position, tensors.get("rope_freqs.weight"), head_dim // 2),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=family.qk_norm,
        windows=(window,) * layers,
        eos_token_ids=tuple(
            dict.fromkeys(
                general.ids("tokenizer.ggml.eos_token_id")
                + general.ids("tokenizer.ggml.eot_token_id")
            )
        ),
        bos_token_id=general.optional("tokenizer.ggml.bos_token_id", 0),
        checkpoint_dtype=None,
    )


def _gguf_rope(
    fields: _Fields, max_position: int, divisors: StoredTensor | None, pairs: int
) -> RopeSpec:
    """Scaling from metadata, or (Llama 3's kind) from the tensor of frequency divisors."""
    theta = fields.number("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn"):
        raise fields.wrong("rope.scaling.type", kind, "none, linear or yarn")
    factors: tuple[float, ...] = ()
    if divisors is not None:
        if divisors.shape != (pairs,):
            raise fields.wrong("rope_freqs.weight", divisors.shape, f"of shape ({pairs},)")
        values = torch.empty(pairs)
        divisors.read_into(values)
        factors = tuple(values.tolist())
    if kind == "none":
        return RopeSpec(theta, freq_factors=factors)
    factor = fields.number("rope.scaling.factor")
    spec = RopeSpec(
        theta,
        cast(RopeKind, kind),
        factor,
        fields.optional("rope.scaling.original_context_length") or max_position,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        freq_factors=factors,
    )
    # ggml multiplies yarn's own factor by this one.
    extra = fields.number("rope.scaling.attn_factor", 1.0)
    return replace(spec, attention_factor=extra * attention_scale(spec)) if extra != 1 else spec
