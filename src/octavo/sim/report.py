"""Figures of a simulation: as JSON with the keys of `octavo bench serve`, as text, as a chart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.bench.report import (
    METRICS,
    WIDTH,
    line,
    metric_lines,
    percentile_key,
    title_line,
)
from octavo.sim.record import Record
from octavo.utils.charts import Chart, Line, Lines

_Array = npt.NDArray[Any]
# Columns of a table of several simulations: title, key, form.
_COLUMNS = (
    ("req/s", "request_throughput", "{:.2f}"),
    ("tok/s", "output_throughput", "{:,.0f}"),
    ("TTFT P50", "p50_ttft_ms", "{:,.1f}"),
    ("TTFT P99", "p99_ttft_ms", "{:,.1f}"),
    ("ITL P50", "p50_itl_ms", "{:,.1f}"),
    ("ITL P99", "p99_itl_ms", "{:,.1f}"),
    ("E2EL P50", "p50_e2el_ms", "{:,.0f}"),
    ("E2EL P99", "p99_e2el_ms", "{:,.0f}"),
    ("running", "mean_concurrent_requests", "{:.1f}"),
    ("KV held", "mean_kv_held", "{:.0%}"),
    ("preempted", "preemptions", "{:,.0f}"),
    ("refused", "failed", "{:,.0f}"),
)
TABLE_PERCENTILES = (50.0, 99.0)  # that the columns need


def figures(
    record: Record, names: Sequence[str] = tuple(METRICS), percentiles: Sequence[float] = (99.0,)
) -> dict[str, Any]:
    """What a run gave. A metric without samples has none of its keys."""
    duration = record.ended_at - record.started_at
    completed, refused = len(record.latencies), sum(record.refused.values())
    tokens_in, tokens_out = record.prompt_tokens, record.output_tokens
    found: dict[str, Any] = {
        "duration": duration,
        "completed": completed,
        "failed": refused,
        "failures": dict(record.refused),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "cached_input_tokens": record.cached_tokens,
        "request_throughput": _per(completed, duration),
        "output_throughput": _per(tokens_out, duration),
        "total_token_throughput": _per(tokens_in + tokens_out, duration),
        "steps": record.steps,
        "busy": _per(record.busy, duration),
        "mean_concurrent_requests": _per(record.running, record.busy),
        "max_concurrent_requests": record.most_running,
        **_memory(record),
        "preemptions": record.recomputed + record.swapped,
        "preemptions_recomputed": record.recomputed,
        "preemptions_swapped": record.swapped,
        "displaced": record.displaced,
    }
    for name in names:
        found |= _metric(name, *_samples(record, name), percentiles)
    return found


def _memory(record: Record) -> dict[str, float]:
    """Shares of the KV cache: held by requests, and written by them."""
    total = record.total_slots
    held = _per(record.held, record.busy)
    return {
        "kv_tokens": total,
        "mean_kv_held": _per(held, total),
        "max_kv_held": _per(record.most_held, total),
        "mean_kv_written": _per(held - _per(record.unwritten, record.busy), total),
        "max_kv_written": _per(record.most_written, total),
        "kv_fragmentation": _per(record.unwritten, record.held),
    }


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0


def _samples(record: Record, name: str) -> tuple[_Array, _Array]:
    """(milliseconds, how often each)."""
    if name == "itl":
        return np.array(record.gaps) * 1e3, np.array(record.gap_counts, dtype=np.int64)
    found = {"ttft": record.firsts, "tpot": record.per_token, "e2el": record.latencies}[name]
    return np.array(found) * 1e3, np.ones(len(found), dtype=np.int64)


def _metric(
    name: str, values: _Array, counts: _Array, percentiles: Sequence[float]
) -> dict[str, float]:
    if not len(values):
        return {}
    mean = float(np.average(values, weights=counts))
    spread = math.sqrt(np.average((values - mean) ** 2, weights=counts))
    median, *others = _percentiles(values, counts, (50.0, *percentiles))
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": median,
        f"std_{name}_ms": spread,
        **{percentile_key(p, name): v for p, v in zip(percentiles, others, strict=True)},
    }


def _percentiles(values: _Array, counts: _Array, wanted: Sequence[float]) -> list[float]:
    """As np.percentile of the values, each as often as `counts` says."""
    order = np.argsort(values, kind="stable")
    values, ends = values[order], np.cumsum(counts[order])
    places = np.array(wanted) / 100 * (ends[-1] - 1)
    low = values[np.searchsorted(ends, np.floor(places), side="right")]
    high = values[np.searchsorted(ends, np.ceil(places), side="right")]
    return [float(v) for v in low + (high - low) * (places - np.floor(places))]


# Text.


def table(
    title: str, found: Mapping[str, Any], names: Sequence[str], percentiles: Sequence[float]
) -> str:
    """One simulation, as `octavo bench serve` prints a measurement."""
    lines = [
        title_line(f" {title} ", "="),
        line("Completed requests:", found["completed"]),
        line("Refused requests:", found["failed"]),
        *(line(f"  {reason}:", count) for reason, count in found["failures"].items()),
        line("Simulated time (s):", found["duration"]),
        line("Total input tokens:", found["total_input_tokens"]),
        line("  of them cached:", found["cached_input_tokens"]),
        line("Total generated tokens:", found["total_output_tokens"]),
        line("Request throughput (req/s):", found["request_throughput"]),
        line("Output token throughput (tok/s):", found["output_throughput"]),
        line("Total token throughput (tok/s):", found["total_token_throughput"]),
        line("Steps:", found["steps"]),
        line("Running requests, mean:", found["mean_concurrent_requests"]),
        line("Running requests, peak:", found["max_concurrent_requests"]),
        line("Preemptions, recomputed:", found["preemptions_recomputed"]),
        line("Preemptions, swapped:", found["preemptions_swapped"]),
        title_line("KV cache", "-"),
        line("Tokens that it holds:", found["kv_tokens"]),
        line("Held, mean (%):", 100 * found["mean_kv_held"]),
        line("Held, peak (%):", 100 * found["max_kv_held"]),
        line("Written, mean (%):", 100 * found["mean_kv_written"]),
        line("Written, peak (%):", 100 * found["max_kv_written"]),
        line("Held but not written (%):", 100 * found["kv_fragmentation"]),
        *metric_lines(found, names, percentiles),
    ]
    return "\n".join([*lines, "=" * WIDTH])


def sweep_table(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """One line for each simulation; latencies in milliseconds."""
    head = [name, *(title for title, _, _ in _COLUMNS)]
    body = [
        [value, *(form.format(found[key]) if key in found else "-" for _, key, form in _COLUMNS)]
        for value, found in rows
    ]
    widths = [max(len(cells[i]) for cells in (head, *body)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in (head, *body)
    )


def sweep_chart(
    name: str, rows: Sequence[tuple[str, Mapping[str, Any]]], title: str, command: str
) -> Chart:
    """Throughput and latencies over the values of a sweep: numbers, or their places in it."""
    values = [value for value, _ in rows]
    numbers = [_finite(value) for value in values]
    xs = [float(i + 1) if None in numbers else x or 0.0 for i, x in enumerate(numbers)]
    named = ", ".join(f"{i + 1}: {value}" for i, value in enumerate(values))
    x = name if None not in numbers else f"{name} ({named})"
    found = [row for _, row in rows]

    def lines(keys: Mapping[str, str]) -> list[Line]:
        drawn = []
        for label, key in keys.items():
            points = [(at, row[key]) for at, row in zip(xs, found, strict=True) if key in row]
            if points:
                drawn.append(Line(label, points))
        return drawn

    panels = (
        ("Throughput", "tokens/s", {"output tokens": "output_throughput"}),
        ("Time to first token", "ms", {"P50": "p50_ttft_ms", "P99": "p99_ttft_ms"}),
        ("Between tokens", "ms", {"P50": "p50_itl_ms", "P99": "p99_itl_ms"}),
        ("End to end", "ms", {"P50": "p50_e2el_ms", "P99": "p99_e2el_ms"}),
    )
    return Chart(
        title,
        f"Simulated, over {name}; one point for each of {len(rows)} values.",
        f"Throughput, time to first token, time between tokens and latency over {name}: "
        + "; ".join(f"{v}: {row['output_throughput']:.0f} tokens/s" for v, row in rows) + ".",
        f"Simulated by: {command}",
        [Lines(head, x, unit, lines(keys)) for head, unit, keys in panels if lines(keys)],
    )  # fmt: skip


def _finite(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
