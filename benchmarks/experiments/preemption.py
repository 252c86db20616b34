"""Swap against recompute on the same overload, and whether `auto` finds the better one.

    octavo bench preemption [--workloads short-prompts,long-prompts] [--reps 3] [--save]

All requests arrive at once, for a pool that holds 40% of what they need. Each mode runs the same
work in turn, without earlier measurements; then a large pool runs it without preemption, and all
answers must equal its answers. The last line is JSON.
"""

import random
import statistics
import sys
from typing import Any

from benchmarks.charts import Bar, Bars, Chart
from benchmarks.experiments.common import (
    Arrival,
    arguments,
    drive,
    one_run,
    open_llm,
    report,
    reset,
    source,
    tokens,
    words,
)
from benchmarks.rows import table
from benchmarks.workloads import Job
from octavo import LLM
from octavo.schedulers import FIFOScheduler

MODES = ("swap", "recompute", "auto")
SHARE, BLOCK = 0.4, 16
# Requests, prompt tokens, output tokens: each drawn within a quarter of it.
WORKLOADS = {
    "short-prompts": (32, 32, 160),
    "long-prompts": (20, 320, 120),
    "long-outputs": (16, 64, 360),
}


def main() -> int:
    args = arguments(
        __doc__,
        workloads={"type": words, "default": list(WORKLOADS)},
        reps={"type": int, "default": 3},
    )
    for name in args.workloads:
        values = _measure(args.model, name, args.reps)
        lines = [
            [name, mode, *(f"{values[part][mode]}" for part in ("seconds", "preemptions")),
             values["swapped_blocks"][mode], f"{values['seconds'][mode] / values['best']:.3f}"]
            for mode in MODES
        ]  # fmt: skip
        lines.append([name, "large pool", values["unloaded_s"], 0, 0, ""])
        header = ("workload", "mode", "seconds", "preemptions", "blocks out", "/ better")
        report("preemption", values, table(header, lines), chart, args.save)
    return 0


def _jobs(name: str) -> list[Job]:
    draw = random.Random(name)
    count, prompt, output = WORKLOADS[name]

    def near(mean: int) -> int:
        return draw.randint(mean * 3 // 4, mean * 5 // 4)

    return [Job(tokens(draw, near(prompt)), near(output)) for _ in range(count)]


def _measure(model: str, name: str, reps: int) -> dict[str, Any]:
    work = _jobs(name)
    need = sum(-(-(len(job.prompt) + job.max_tokens) // BLOCK) for job in work)
    small, large = _open(model, int(SHARE * need)), _open(model, need + 64)
    unloaded = _run(large, work, f"{name}, large pool")
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(reps):
        for mode in MODES:
            small.engine.scheduler.queues.preemption_mode = mode  # type: ignore[assignment]
            runs[mode].append(_run(small, work, f"{name}, {mode}"))
    same = all(run["answers"] == unloaded["answers"] for found in runs.values() for run in found)
    if not same or unloaded["preemptions"]:
        raise SystemExit(f"{name}: the answers are not those of an unloaded run")
    small.close()
    large.close()
    middle = {mode: statistics.median(run["s"] for run in runs[mode]) for mode in MODES}
    best = min(middle["swap"], middle["recompute"])
    return {
        "workload": name,
        "shape": WORKLOADS[name],
        "share": SHARE,
        "seconds": middle,
        "all_seconds": {mode: [run["s"] for run in runs[mode]] for mode in MODES},
        "best": best,
        "auto_over_best": round(middle["auto"] / best, 3),
        "preemptions": {mode: runs[mode][-1]["preemptions"] for mode in MODES},
        "swapped_blocks": {mode: runs[mode][-1]["out"] for mode in MODES},
        "block_ms": round(1e3 * (runs["auto"][-1]["block_s"] or 0), 4),
        "token_ms": round(1e3 * (runs["auto"][-1]["token_s"] or 0), 4),
        "unloaded_s": unloaded["s"],
        "same_tokens": same,
    }


def _open(model: str, blocks: int) -> LLM:
    return open_llm(
        model,
        max_model_len=1024,
        num_gpu_blocks_override=max(blocks, 1024 // BLOCK) + 1,
        swap_space=1,
        max_num_seqs=64,
        scheduler=FIFOScheduler(max_stretch=None),
    )


def _run(llm: LLM, work: list[Job], label: str) -> dict[str, Any]:
    scheduler = llm.engine.scheduler
    reset(llm.engine)
    before, out = scheduler.num_preemptions, scheduler.kv.usage().swapped_out_blocks
    answers = drive(llm.engine, [Arrival(job) for job in work], label)
    return {
        "s": round(max(answer.times[-1] for answer in answers), 3),
        "answers": [answer.token_ids for answer in answers],
        "preemptions": scheduler.num_preemptions - before,
        "out": scheduler.kv.usage().swapped_out_blocks - out,
        "block_s": scheduler.rates.block_seconds,
        "token_s": scheduler.rates.token_seconds,
    }


def chart(rows: list[dict[str, Any]]) -> Chart:
    run = one_run(rows)
    names = {"swap": "swap to host memory", "recompute": "recompute", "auto": "auto (default)"}
    panels = []
    for made in run:
        count, prompt, output = made["shape"]
        bars = [
            Bar(names[mode], made["seconds"][mode], min(made["all_seconds"][mode]),
                max(made["all_seconds"][mode]), ours=mode == "auto")
            for mode in MODES
        ]  # fmt: skip
        bars.append(Bar("no preemption (large pool)", made["unloaded_s"]))
        title = f"{count} requests, about {prompt} tokens of prompt and {output} of output"
        panels.append(Bars(title, bars, "{:.1f} s"))
    repetitions = len(run[0]["all_seconds"]["auto"])
    return Chart(
        "Preemption: the same work in 40% of the KV cache that it needs",
        f"Seconds until all requests are answered: medians of {repetitions} alternating runs, with "
        "minimum and maximum. Shorter is better. Every answer equals the one without preemption.",
        "Bars: swapping, recomputing and the automatic choice take about the same time; a pool "
        "that needs no preemption is faster.",
        source(run, "SmolLM2-135M, bf16."),
        panels,
    )


if __name__ == "__main__":
    sys.exit(main())
