"""Rotary position embedding: the table of cosines and sines, for each kind of scaling.

It is applied by a kernel (`kernels.dispatch`, op `rope`). The tables follow what
transformers computes, in fp32 and in the same order of operations, so that far positions agree.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The frequencies of a rotary embedding. Lengths in tokens; unused fields are ignored.

    original_max_position: the length the model was first trained for (all kinds but linear).
    attention_factor: multiplier of cosine and sine (yarn, longrope); None: derived.
    freq_factors: divisors of each frequency, one per pair (GGUF's `rope_freqs` tensor).
    short_factors, long_factors: the same for longrope, up to the original length and beyond it.
    fraction: of head_dim that is rotated; the other dimensions are unchanged.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    fraction: float = 1.0

    def dims(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_dim * self.fraction)


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries at position p are multiplied by 1 + beta ln(1 + floor(p / length)) (Ministral 3)."""

    beta: float
    length: int


def cos_sin_table(spec: RopeSpec, head_dim: int, length: int) -> torch.Tensor:
    """fp32 [length, rotated dimensions]: the cosines of each pair's angle, then the sines.

    `length` is the longest sequence the engine admits. Dynamic scaling and longrope depend on a
    sequence's length in the original; here every position uses the frequencies of `length`, so
    that a row's result does not change as its or another sequence grows.
    """
    dims = spec.dims(head_dim)
    frequency = _SCALING[spec.kind](spec, _plain(spec.theta, dims), dims, length)
    if spec.freq_factors:
        frequency = frequency / torch.tensor(spec.freq_factors, dtype=torch.float32)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    scale = attention_scale(spec)
    return torch.cat((angle.cos(), angle.sin()), dim=1).mul_(scale)


def query_cos_sin_table(
    spec: RopeSpec | None, temperature: QueryTemperature, head_dim: int, length: int
) -> torch.Tensor:
    """The table of queries that have a temperature: cosines and sines times its factor."""
    if spec is None:
        table = torch.cat(
            (torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2)), 1
        )
    elif spec.dims(head_dim) == head_dim:
        table = cos_sin_table(spec, head_dim, length)
    else:
        raise ValueError("a query temperature needs all dimensions of a head to be rotated")
    steps = torch.floor(torch.arange(length, dtype=torch.float32) / temperature.length)
    return table.mul_(1 + temperature.beta * torch.log(1 + steps)[:, None])


def attention_scale(spec: RopeSpec) -> float:
    """What yarn and longrope multiply cosine and sine by; 1 for the other kinds."""
    if spec.kind not in ("yarn", "longrope"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope":
        if spec.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))
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
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    original, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / spec.factor + smooth * plain
    stretched = torch.where(wavelength > original / low, plain / spec.factor, between)
    return torch.where(wavelength < original / high, plain, stretched)


def _yarn(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a ramp over the pairs from kept to scaled frequencies."""

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


def _longrope(spec: RopeSpec, plain: torch.Tensor, head_dim: int, length: int) -> torch.Tensor:
    """LongRoPE (arXiv 2402.13753): a divisor for each frequency, by the longest sequence."""
    long = length > spec.original_max_position
    factors = torch.tensor(spec.long_factors if long else spec.short_factors)
    return 1.0 / (factors * spec.theta ** _exponents(head_dim))


_SCALING = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
