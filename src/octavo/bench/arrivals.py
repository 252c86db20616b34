"""When requests arrive: at once, or as a random process of a given rate."""

import math

import numpy as np

from octavo.errors import ConfigError


def generator(seed: int) -> np.random.Generator:
    """Random numbers of this seed. Raises ConfigError."""
    if seed < 0:
        raise ConfigError(f"seed must be at least 0, not {seed}")
    return np.random.default_rng(seed)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` requests is sent, the first at 0.

    rate: requests per second; infinity sends all at once. burstiness: shape of the gamma
    distribution of the gaps; 1 is a Poisson process, less is burstier, more is more even. As in
    vLLM, the gaps are scaled so that the last request comes when the rate says.
    """
    if not rate > 0:
        raise ConfigError(f"request_rate must be above 0 (inf: all at once), not {rate}")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"burstiness must be above 0, not {burstiness}")
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    gaps = generator(seed).gamma(burstiness, 1 / (rate * burstiness), count - 1)
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    if times[-1] > 0:
        times *= ((count - 1) / rate) / times[-1]
    return [float(t) for t in times]
