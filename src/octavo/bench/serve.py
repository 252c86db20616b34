"""`octavo bench serve`: one measurement of a server, from its options to the saved figures."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from octavo.bench.answer import Outcome
from octavo.bench.arrivals import arrival_times
from octavo.bench.datasets import Sample
from octavo.bench.http import Address, Connect, Endpoint
from octavo.bench.load import Run, Target, first_model, wait_until_ready
from octavo.bench.report import details, goodput, metric_figures, summary, table
from octavo.errors import ConfigError


@dataclass(frozen=True)
class Traffic:
    """How requests are sent. Raises ConfigError."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    ready_seconds: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        arrival_times(0, self.request_rate, self.burstiness, 0)
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, not {self.max_concurrency}")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups must be at least 0, not {self.num_warmups}")


@dataclass(frozen=True)
class Reporting:
    """What is reported of a run."""

    metrics: Sequence[str] = ("ttft", "tpot", "itl", "e2el")
    percentiles: Sequence[float] = (99.0,)
    goals: Mapping[str, float] = field(default_factory=dict)


def find_model(address: Address, headers: Mapping[str, str]) -> str:
    """The first model that the server lists. Raises ConfigError."""

    async def ask() -> str:
        endpoint = Endpoint(address, headers)
        try:
            return await first_model(endpoint)
        finally:
            endpoint.close()

    return asyncio.run(ask())


async def measure(
    address: Address,
    headers: Mapping[str, str],
    target: Target,
    samples: Sequence[Sample],
    traffic: Traffic,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = False,
    connect: Connect = asyncio.open_connection,
) -> tuple[list[Outcome], float]:
    """Warm up, then send every sample. Returns the outcomes and the seconds they took."""
    endpoint = Endpoint(address, headers, connect)
    try:
        if traffic.ready_seconds:
            await wait_until_ready(Run(endpoint, target), samples[0], traffic.ready_seconds)
        warm = [samples[i % len(samples)] for i in range(traffic.num_warmups)]
        if warm:
            first = Run(endpoint, target, traffic.max_concurrency)
            await first.all(warm, [0.0] * len(warm))
        times = arrival_times(len(samples), traffic.request_rate, traffic.burstiness, traffic.seed)
        with tqdm(total=len(samples), unit="req", disable=not progress, file=sys.stderr) as bar:
            run = Run(
                endpoint, target, traffic.max_concurrency, clock, lambda outcome: bar.update()
            )
            return await run.all(samples, times)
    finally:
        endpoint.close()


def figures_of(
    outcomes: Sequence[Outcome], duration: float, traffic: Traffic, reporting: Reporting
) -> dict[str, Any]:
    """All figures of a run, in vLLM's keys where it has them."""
    rate = traffic.request_rate
    return {
        "num_prompts": len(outcomes),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        **summary(outcomes, duration),
        "request_goodput": goodput(outcomes, duration, reporting.goals)
        if reporting.goals
        else None,
        **metric_figures(outcomes, reporting.metrics, reporting.percentiles),
    }


def bench(
    address: Address,
    headers: Mapping[str, str],
    target: Target,
    samples: Sequence[Sample],
    traffic: Traffic,
    reporting: Reporting,
    progress: bool = False,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Measure, print the table, return the figures and the outcomes."""
    cpu = time.process_time()
    outcomes, duration = asyncio.run(
        measure(address, headers, target, samples, traffic, progress=progress)
    )
    figures = figures_of(outcomes, duration, traffic, reporting)
    figures["client_cpu_s"] = time.process_time() - cpu
    print(table(figures, reporting.metrics, reporting.percentiles))
    for kind, message in {o.failure: o.error for o in outcomes if not o.ok}.items():
        print(f"octavo: {kind}: {message}", file=sys.stderr)
    return figures, outcomes


def result_name(label: str, model: str, traffic: Traffic, now: datetime) -> str:
    """vLLM's name of a result file."""
    concurrency = f"-concurrency{traffic.max_concurrency}" if traffic.max_concurrency else ""
    base = model.rstrip("/").split("/")[-1]
    rate = f"{traffic.request_rate}qps"
    return f"{label}-{rate}{concurrency}-{base}-{now:%Y%m%d-%H%M%S}.json"


def save(
    path: Path,
    figures: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    detailed: bool,
    append: bool,
) -> None:
    """One JSON object; with `append` on a line of its own after what is there."""
    values = {**figures, **(details(outcomes) if detailed else {})}
    try:
        with path.open("a" if append else "w") as file:
            if append and file.tell():
                file.write("\n")
            json.dump(values, file)
    except OSError as error:
        raise ConfigError(f"the result cannot be saved: {error}") from error
