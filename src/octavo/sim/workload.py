"""Workloads: the benchmark's W1 to W4, and random lengths and arrivals.

Only lengths, times and what is shared: a simulation needs no tokenizer and no text. Names and
meanings are those of `bench.datasets` and `bench.arrivals`. Files are read by `sim.traces`.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from octavo.bench.arrivals import arrival_times, generator
from octavo.errors import ConfigError
from octavo.sim.requests import Job
from octavo.sim.traces import LATEST

Distribution = Literal["uniform", "lognormal", "exponential"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)
_SIGMA = 1.0  # of the logarithm: conversations have 0.9 to 1.3, for prompts and for answers
_MOST_TOKENS = 2**31  # no model has a window of as many
_MOST_REQUESTS = 10**8  # each takes memory
_Lengths = tuple[int, int]  # of a prompt and its answer


@dataclass(frozen=True, slots=True)
class Traffic:
    """When requests come: see `bench.arrivals`; the rate infinity is all at once."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """How long prompts and answers are, and what they share.

    input_len, output_len: means. distribution: uniform in length x (1 - range_ratio) to length x
    (1 + range_ratio); lognormal, with a long tail, and exponential are cut at `most`. prefix_len:
    tokens before each prompt that it shares with others: with every num_prefixes-th request.
    """

    input_len: int = 1024
    output_len: int = 128
    distribution: Distribution = "uniform"
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1
    most: int = 2**20

    def __post_init__(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0),
                            ("num_prefixes", 1)):  # fmt: skip
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
            if getattr(self, name) > _MOST_TOKENS:
                raise ConfigError(
                    f"{name} must be at most {_MOST_TOKENS}, not {getattr(self, name):g}"
                )
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"range_ratio must be in [0, 1), not {self.range_ratio}")
        if self.distribution != "uniform" and self.range_ratio:
            raise ConfigError(
                f"range_ratio is for uniform lengths, not for {self.distribution} ones"
            )


def random_jobs(count: int, shape: Shape, traffic: Traffic) -> list[Job]:
    """`count` requests of random lengths. Raises ConfigError."""
    if count < 1:
        raise ConfigError(f"num_prompts must be at least 1, not {count}")
    if count > _MOST_REQUESTS:
        raise ConfigError(f"num_prompts must be at most {_MOST_REQUESTS}, not {count:g}")
    rng = generator(traffic.seed)
    inputs = _lengths(rng, shape.input_len, shape, count)
    outputs = _lengths(rng, shape.output_len, shape, count)
    times = _times(count, traffic)
    prefix = shape.prefix_len
    return [
        Job(time, prefix + prompt, output, 0, 1 + i % shape.num_prefixes if prefix else 0, prefix)
        for i, (time, prompt, output) in enumerate(zip(times, inputs, outputs, strict=True))
    ]


def _lengths(rng: np.random.Generator, mean: int, shape: Shape, count: int) -> list[int]:
    if shape.distribution == "uniform":
        low = max(1, math.floor(mean * (1 - shape.range_ratio)))
        high = max(low, math.ceil(mean * (1 + shape.range_ratio)))
        return [int(length) for length in rng.integers(low, high + 1, count)]
    if shape.distribution == "lognormal":
        found = rng.lognormal(math.log(mean) - _SIGMA**2 / 2, _SIGMA, count)
    else:
        found = rng.exponential(mean, count)
    lengths: list[int] = np.clip(np.rint(found), 1, shape.most).astype(int).tolist()
    return lengths


def _times(count: int, traffic: Traffic) -> list[float]:
    times = arrival_times(count, traffic.request_rate, traffic.burstiness, traffic.seed)
    if times[-1] > LATEST:
        raise ConfigError(
            f"request_rate is {traffic.request_rate:g}, so that the last request comes after "
            f"{times[-1]:g} seconds; it must be at most {LATEST:g}"
        )
    return times


def named_jobs(name: str, traffic: Traffic) -> list[Job]:
    """W1 to W4, with the lengths that the benchmark has (docs/performance.md)."""
    lengths, shared = NAMED[name]
    pairs = lengths()
    times = _times(len(pairs), traffic)
    return [
        Job(time, prompt, output, 0, 1 if shared else 0, shared)
        for time, (prompt, output) in zip(times, pairs, strict=True)
    ]


def _mixed() -> list[_Lengths]:
    draw = random.Random(0)
    found = []
    for _ in range(64):
        prompt = draw.randint(32, 480)
        for _ in range(prompt):  # its tokens, which the benchmark draws in between
            draw.randrange(300, 49_000)
        found.append((prompt, draw.randint(16, 240)))
    return found


NAMED: Mapping[str, tuple[Callable[[], list[_Lengths]], int]] = MappingProxyType(
    {
        "W1": (_mixed, 0),
        "W2": (lambda: [(32, 128)], 0),
        "W3": (lambda: [(544, 64)] * 32, 512),
        "W4": (lambda: [(3500, 128)] * 8, 0),
    }
)
