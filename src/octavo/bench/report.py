"""Figures of a run against a server: vLLM's keys as JSON, and its table for people."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.bench.answer import Outcome
from octavo.errors import ConfigError, nearest

# Key -> (title of its part of the table, its name there).
METRICS = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}
WIDTH = 50


def metric_names(text: str) -> tuple[str, ...]:
    """`ttft,tpot` as names. Raises ConfigError for an unknown one."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"percentile-metrics: unknown {name!r}{nearest(name, METRICS)}; "
                              f"there are {', '.join(METRICS)}")  # fmt: skip
    return names


def percentile_list(text: str) -> tuple[float, ...]:
    """`50,99` as numbers. Raises ConfigError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= p <= 100 for p in found):
        raise ConfigError(f"metric-percentiles must be such as 50,90,99, not {text!r}")
    return found


def goodput_goals(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 e2el:3000` (milliseconds) as a mapping. Raises ConfigError."""
    goals = {}
    for pair in pairs:
        name, _, amount = pair.partition(":")
        try:
            value = float(amount)
        except ValueError:
            value = -1.0
        if name not in ("ttft", "tpot", "e2el") or not value >= 0:
            raise ConfigError(
                f"goodput must be pairs of ttft, tpot or e2el and milliseconds, such as ttft:200, "
                f"not {pair!r}"
            )
        goals[name] = value
    return goals


def summary(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """What does not depend on the choice of metrics. Rates count successes only."""
    good = [o for o in outcomes if o.ok]
    tokens_in, tokens_out = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    peak_tokens, peak_requests = _peaks(good)
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "failures": dict(Counter(o.failure for o in outcomes if not o.ok)),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(good) / duration,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": peak_tokens,
        "max_concurrent_requests": peak_requests,
    }


def goodput(outcomes: Sequence[Outcome], duration: float, goals: Mapping[str, float]) -> float:
    """Requests per second that met every goal (milliseconds)."""
    met = sum(
        all(_seconds(o, name) * 1000 <= goal for name, goal in goals.items())
        for o in outcomes
        if o.ok
    )
    return met / duration


def _seconds(outcome: Outcome, name: str) -> float:
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return values[name]


def _samples(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """Milliseconds, of the successes."""
    good = [o for o in outcomes if o.ok]
    if name == "itl":
        return [gap * 1000 for o in good for gap in o.itl]
    if name == "tpot":
        good = [o for o in good if o.output_len > 1]
    return [_seconds(o, name) * 1000 for o in good]


def metric_figures(
    outcomes: Sequence[Outcome], names: Sequence[str], percentiles: Sequence[float]
) -> dict[str, float]:
    """`mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms` and so on.

    A metric without samples has none of its keys: a 0 would look like a good result.
    """
    found: dict[str, float] = {}
    for name in names:
        samples = _samples(outcomes, name)
        if not samples:
            continue
        found[f"mean_{name}_ms"] = float(np.mean(samples))
        found[f"median_{name}_ms"] = float(np.median(samples))
        found[f"std_{name}_ms"] = float(np.std(samples))
        for p in percentiles:
            found[percentile_key(p, name)] = float(np.percentile(samples, p))
    return found


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """What `--save-detailed` adds: one entry per request, failures included."""
    return {
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "start_times": [o.sent for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
    }


def _peaks(good: Sequence[Outcome]) -> tuple[float, int]:
    """(most tokens that came within a second of the run, most requests in flight)."""
    seconds: dict[int, float] = {}
    changes: list[tuple[float, int]] = []
    for o in good:
        times = np.cumsum([o.sent + o.ttft, *o.itl])
        share = o.output_len / len(times)  # a piece of text may be several tokens
        for time in times:
            seconds[int(time)] = seconds.get(int(time), 0.0) + share
        changes += [(o.sent, 1), (o.sent + o.latency, -1)]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return max(seconds.values(), default=0.0), most


def table(figures: Mapping[str, Any], names: Sequence[str], percentiles: Sequence[float]) -> str:
    """The printed result."""
    lines = [title_line(" Serving Benchmark Result ", "=")]
    lines += [line("Successful requests:", figures["completed"])]
    lines += [line("Failed requests:", figures["failed"])]
    lines += [line(f"  {kind}:", count) for kind, count in figures["failures"].items()]
    if figures.get("max_concurrency"):
        lines += [line("Maximum request concurrency:", figures["max_concurrency"])]
    if figures.get("request_rate") not in (None, "inf"):
        lines += [line("Request rate configured (RPS):", figures["request_rate"])]
    lines += [
        line("Benchmark duration (s):", figures["duration"]),
        line("Total input tokens:", figures["total_input_tokens"]),
        line("Total generated tokens:", figures["total_output_tokens"]),
        line("Request throughput (req/s):", figures["request_throughput"]),
    ]
    if figures.get("request_goodput") is not None:
        lines += [line("Request goodput (req/s):", figures["request_goodput"])]
    lines += [
        line("Output token throughput (tok/s):", figures["output_throughput"]),
        line("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        line("Peak concurrent requests:", figures["max_concurrent_requests"]),
        line("Total token throughput (tok/s):", figures["total_token_throughput"]),
        line("Processor time of this client (s):", figures["client_cpu_s"]),
    ]
    return "\n".join([*lines, *metric_lines(figures, names, percentiles), "=" * WIDTH])


def metric_lines(
    figures: Mapping[str, Any], names: Sequence[str], percentiles: Sequence[float]
) -> list[str]:
    """The part of the table for each metric."""
    lines = []
    for name in names:
        title, short = METRICS[name]
        lines += [title_line(title, "-")]
        keys = [("Mean", f"mean_{name}_ms"), ("Median", f"median_{name}_ms")]
        keys += [(f"P{_short(p)}", percentile_key(p, name)) for p in percentiles]
        lines += [line(f"{label} {short} (ms):", figures.get(key, "-")) for label, key in keys]
    return lines


def percentile_key(percentile: float, name: str) -> str:
    """Of a metric's percentile among the figures."""
    return f"p{_short(percentile)}_{name}_ms"


def title_line(text: str, rule: str) -> str:
    """A line of the table that begins a part."""
    return f"{text:{rule}^{WIDTH}}"


def line(label: str, value: object) -> str:
    """A line of the table."""
    shown = f"{value:.2f}" if isinstance(value, float) and math.isfinite(value) else str(value)
    return f"{label:<40} {shown:<9}".rstrip()


def _short(number: float) -> str:
    """99.0 as 99, 99.9 as 99.9."""
    return str(int(number)) if number == int(number) else str(number)
