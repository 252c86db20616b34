"""What an engine measures when it has loaded a model, estimated from the model's description."""

import math
from dataclasses import dataclass

from octavo.attention.base import CacheLayout
from octavo.config import EngineConfig
from octavo.models.loader import Outline, position_bytes
from octavo.planner.target import PlannedDevice
from octavo.quant.base import FP8, HEAD, INT4, INT8, STORED, W4A8, W8A8
from octavo.runner import step_memory
from octavo.runner.kv_cache import KVLayout

# A tokenizer's table in memory, for each id: about that for vocabularies of 49k to 262k.
_TOKENIZER_ID = 1300
# What quantizing at load leaves in the heap of a CPU's process, for models of 0.1 to 0.5 billion.
_QUANTIZING = 180 * 2**20
# Bytes beside the codes: of each output (of w8a8, its scale and sum), and of each group of inputs:
# (inputs, bytes). Weights alone have groups in 8 bits on a CPU only.
_OUTPUT_TERMS, _GROUP_TERMS = 8, {INT4: (32, 4), W4A8: (32, 4)}
_CPU_GROUP_TERMS = {**_GROUP_TERMS, INT8: (64, 2)}
_HEAD_BITS = {INT8: 8, INT4: 4, FP8: 8, W8A8: 8, W4A8: 4}


@dataclass(frozen=True, slots=True)
class Estimates:
    """In bytes, of one rank. loaded: by part, all that a load takes; step: of a full step;
    captured: of captured steps."""

    loaded: dict[str, int]
    step: int
    captured: int


def estimate(
    outline: Outline,
    config: EngineConfig,
    device: PlannedDevice,
    layout: KVLayout,
    backend: CacheLayout,
) -> Estimates:
    """What the engine of `config` will measure, about."""
    loaded = {"weights": outline.weight_bytes}
    if scales := _scale_bytes(outline, device.shares_host_memory):
        loaded["scales"] = scales
        if device.shares_host_memory:
            loaded["left by quantizing"] = _QUANTIZING
    loaded["tables of positions"] = position_bytes(outline.spec) * outline.window
    if device.shares_host_memory:
        if outline.spec.tie_embeddings and outline.quantization.method(HEAD) != STORED:
            loaded["head (a copy of the embedding)"] = _head_bytes(outline)
        loaded["tokenizer"] = _TOKENIZER_ID * outline.spec.num_ids
    step = _step_bytes(outline, config)
    captured = 0
    if not device.shares_host_memory and not config.enforce_eager:
        captured = step_memory.captured_bytes(
            backend, layout.kinds(outline.attention_specs),
            device.capture_sizes(config.max_num_batched_tokens),
            config.max_model_len or outline.spec.max_position,
            step, config.max_num_batched_tokens,
        )  # fmt: skip
    return Estimates(loaded, step, captured)


def _step_bytes(outline: Outline, config: EngineConfig) -> int:
    each = step_memory.activation_bytes(
        outline.spec, outline.attention_specs, outline.dtype.itemsize, outline.group.size
    )
    logits = step_memory.logits_bytes(config.max_num_seqs, outline.spec.num_ids)
    return each * config.max_num_batched_tokens + logits


def _head_bytes(outline: Outline) -> int:
    """Of a head that is tied to the embedding, in the layout of products."""
    spec, method = outline.spec, outline.quantization.method(HEAD)
    bits = _HEAD_BITS.get(method, 8 * outline.dtype.itemsize)
    return spec.num_ids * spec.hidden_size * bits // 8 // outline.group.size


def _scale_bytes(outline: Outline, on_cpu: bool) -> int:
    """What weights that are quantized at load take beside their codes."""
    method = outline.quantization.default
    if outline.spec.quantization is not None or method not in _HEAD_BITS:
        return 0
    shapes = outline.architecture.parameter_shapes(outline.spec)
    terms = _CPU_GROUP_TERMS if on_cpu else _GROUP_TERMS
    group, each = terms.get(method, (1, 0))
    total = 0
    for name in outline.architecture.product_weights(outline.spec):
        *_, outputs, inputs = shapes[name]
        total += outputs * (_OUTPUT_TERMS + math.ceil(inputs / group) * each)
    return total // outline.group.size
