"""Rotary position embedding: the table of cosines and sines, for each kind of scaling.

Applying it is a kernel's work (`kernels.dispatch`, op `rope`). The tables follow what
transformers computes, in fp32 and in the same order of operations, so that far positions agree.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Positions' frequencies. Lengths in tokens; a field that the kind does not use is ignored.

    original_max_position: the length the model was first trained for (llama3, yarn, dynamic).
    attention_factor: yarn's multiplier of cosine and sine; None: derived from factor and mscale.
    freq_factors: divisors of each frequency, one per pair (GGUF's `rope_freqs` tensor).
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] = ()


def cos_sin_table(spec: RopeSpec, head_dim: int, length: int) -> torch.Tensor:
    """fp32 [length, head_dim]: the cosines of each pair's angle, then the sines.

    `length` is the longest sequence the engine admits. Dynamic scaling depends on a sequence's
    length in the original; here every position uses the frequencies of `length`, so that a
    row's result does not change as its sequence, or its neighbours', grow.
    """
    frequency = _SCALING[spec.kind](spec, _plain(spec.theta, head_dim), head_dim, length)
    if spec.freq_factors:
        frequency = frequency / torch.tensor(spec.freq_factors, dtype=torch.float32)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    scale = attention_scale(spec)
    return torch.cat((angle.cos(), angle.sin()), dim=1).mul_(scale)


def attention_scale(spec: RopeSpec) -> float:
    """What yarn multiplies cosine and sine by; 1 for the other kinds."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / (theta ** _exponents(head_dim))


def _default(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    return plain


def _linear(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    return plain / spec.factor


def _dynamic(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    """NTK-aware scaling: the base grows once sequences pass the original length."""
    original = spec.original_max_position
    if length <= original:
        return plain
    growth = spec.factor * length / original - (spec.factor - 1)
    return _plain(spec.theta * growth ** (head_dim / (head_dim - 2)), head_dim)


def _llama3(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between interpolated."""
    original, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / spec.factor + smooth * plain
    stretched = torch.where(wavelength > original / low, plain / spec.factor, between)
    return torch.where(wavelength < original / high, plain, stretched)


def _yarn(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the pairs from kept to stretched frequencies."""

    def pair_with(rotations: float) -> float:
        waves = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(spec.theta))

    first, last = pair_with(spec.beta_fast), pair_with(spec.beta_slow)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    stretched = 1.0 / (spec.factor * spec.theta ** _exponents(head_dim))
    return stretched * (1 - kept) + plain * kept


_SCALING = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
