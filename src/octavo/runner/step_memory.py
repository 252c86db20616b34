"""Memory that steps need beside weights and KV: what is derived from a measured step, and an
estimate where none was run.

The runner measures (`runner.model_runner`); a plan for a device that is not here cannot.
"""

import math
from collections.abc import Iterable, Sequence

from octavo.attention.base import AttentionSpec, HoldsStaticMemory
from octavo.models.spec import ModelSpec

# Logits are fp32: this bounds the logits computed at once to 128 MiB.
LOGITS_AT_ONCE = 2**25
# Where a full step takes long, one of fewer tokens is measured: at most so many, and no more than
# the multiplications of a seventh of a second, 3.5 * 10^10 on two cores of 2023.
PROBE_TOKENS, _LEAST_PROBE = 256, 16
_PROBE_WORK = 2**35
_NOISE = 3  # a measured step touches memory in huge pages, or memory that is there already


def logits_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What drawing from the logits of a full step takes: they and copies of them."""
    return 4 * 4 * min(LOGITS_AT_ONCE, max_num_seqs * vocab_size)


def probe_tokens(values: int) -> int:
    """Tokens of the step that is measured, of a model with so many weights."""
    return max(_LEAST_PROBE, min(PROBE_TOKENS, _PROBE_WORK // max(1, values)))


def full_peak(measured: int, probe: int, tokens: int, each: int) -> int:
    """The peak of a step of `tokens` tokens, of that of one of `probe` tokens.

    each: the activations of a token, estimated; where the measured step says more, up to `_NOISE`
    times that.
    """
    more = max(each, min(measured // probe, _NOISE * each))
    return measured + more * max(0, tokens - probe)


def captured_bytes(
    backend: object,
    kinds: Iterable[AttentionSpec],
    sizes: Sequence[int],
    longest: int,
    peak: int,
    most_tokens: int,
) -> int:
    """What captured steps hold on a device with memory of its own: of activations, the share that
    their largest one has in a full step of `most_tokens`, and what the attention backend holds.

    kinds: the attention of each kind of layer in each KV group; sizes: of the steps, rising;
    longest: the tokens of a sequence; peak: of a full step.
    """
    if not sizes:
        return 0
    held = [
        backend.static_bytes(spec, sizes[-1], longest)
        for spec in kinds
        if isinstance(backend, HoldsStaticMemory)
    ]
    return peak * sizes[-1] // most_tokens + sum(held)


def activation_bytes(
    spec: ModelSpec, attention: Sequence[AttentionSpec], itemsize: int, ranks: int = 1
) -> int:
    """An estimate of the activations of one token at their highest.

    The hidden state and the residual, and the wider of a layer's two halves: queries, keys, values
    and attention's output, or gate, up and their product. attention: of one rank of `ranks`.
    """
    heads = max((2 * part.num_heads + 2 * part.num_kv_heads) * part.head_dim for part in attention)
    inner = 3 * math.ceil(_inner(spec) / ranks)
    return (2 * spec.hidden_size + max(heads, inner)) * itemsize


def _inner(spec: ModelSpec) -> int:
    """The width of what a token passes in an MLP: of a mixture, in all experts of its choice."""
    choices, width = spec.extra.get("num_experts_per_tok"), spec.extra.get("moe_intermediate_size")
    if not isinstance(choices, int):
        return spec.intermediate_size
    return choices * (width if isinstance(width, int) else spec.intermediate_size)
