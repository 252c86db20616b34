"""Urgent requests under saturation: their time to a first token against that of an idle engine.

    octavo bench priority [--seconds 24] [--save]

Urgent prompts (700 to 1,000 tokens) come at random moments to an engine that is otherwise idle.
Then the same ones come at the same moments while more low-priority requests wait than can run:
with `PriorityScheduler`, and with FIFO to compare. All low-priority ones must end. The last line
is JSON.
"""

import random
import sys
from typing import Any

from benchmarks.charts import Bar, Bars, Chart
from benchmarks.experiments.common import (
    Answer,
    Arrival,
    arguments,
    drive,
    one_run,
    open_llm,
    report,
    source,
    tokens,
)
from benchmarks.rows import percentile, table
from benchmarks.workloads import Job
from octavo.schedulers import FIFOScheduler, Policy, PriorityScheduler

RUNNING = 16  # places
EVERY = 1.3  # mean seconds between urgent ones; 1 at least, so that none waits for another


def main() -> int:
    args = arguments(__doc__, seconds={"type": float, "default": 24.0})
    draw = random.Random(11)
    urgent = [Job(tokens(draw, draw.randint(700, 1000)), 8)
              for _ in range(round(args.seconds / EVERY))]  # fmt: skip
    work = _load(draw, urgent, args.seconds)
    alone = [arrival for arrival in work if arrival.priority == 0]
    idle = _run(args.model, FIFOScheduler(), alone, "idle")
    runs = {
        "priority": _run(args.model, PriorityScheduler(max_wait=3600), work, "priority"),
        "fifo": _run(args.model, FIFOScheduler(), work, "fifo"),
    }
    found = {"idle": _firsts(idle), **{name: _firsts(answers) for name, answers in runs.items()}}
    wall = {name: max(a.times[-1] for a in answers) for name, answers in runs.items()}
    low = {name: sum(a.priority > 0 for a in answers) for name, answers in runs.items()}
    values: dict[str, Any] = {
        "ttft_s": {name: {p: round(percentile(firsts, share), 4) for p, share in
                   (("p50", 0.5), ("p99", 0.99))} for name, firsts in found.items()},
        "p99_over_idle": round(percentile(found["priority"], 0.99)
                               / percentile(found["idle"], 0.99), 3),
        "urgent": len(urgent),
        "low_ended": low,
        "wall_s": {name: round(seconds, 2) for name, seconds in wall.items()},
        "places": RUNNING,
    }  # fmt: skip
    lines = [[name, *(f"{1e3 * t:.0f}" for t in values["ttft_s"][name].values()),
              low.get(name, ""), f"{wall[name]:.1f}" if name in wall else ""]
             for name in found]  # fmt: skip
    header = ("engine", "urgent TTFT P50, ms", "P99, ms", "low ones ended", "seconds")
    return report("priority", values, table(header, lines), chart, args.save)


def _load(draw: random.Random, urgent: list[Job], seconds: float) -> list[Arrival]:
    """Low-priority work for longer than `seconds`, all there from the start, and the urgent."""
    low = [Job(tokens(draw, draw.randint(50, 300)), draw.randint(50, 200))
           for _ in range(round(3.5 * seconds))]  # fmt: skip
    work = [Arrival(job, 0.0, 5) for job in low]
    at = 3.0
    for job in urgent:
        at += draw.uniform(1.0, 2 * EVERY - 1.0)
        work.append(Arrival(job, at, 0))
    return work


def _run(model: str, policy: Policy, work: list[Arrival], label: str) -> list[Answer]:
    llm = open_llm(model, scheduler=policy, max_num_seqs=RUNNING, max_model_len=4096,
                   kv_cache_memory_bytes=1 << 29, swap_space=1)  # fmt: skip
    drive(llm.engine, [Arrival(Job([5] * n, 4)) for n in (1, 64, 400)], "warm-up")
    answers = drive(llm.engine, work, label)
    llm.close()
    return answers


def _firsts(answers: list[Answer]) -> list[float]:
    return [answer.ttft for answer in answers if answer.priority == 0]


def chart(rows: list[dict[str, Any]]) -> Chart:
    run = one_run(rows)
    made = run[-1]
    found, count = made["ttft_s"], made["urgent"]
    names = {
        "idle": "idle engine",
        "priority": "saturated, priority scheduler",
        "fifo": "saturated, FIFO",
    }
    panels = [
        Bars(title, [Bar(names[name], 1e3 * found[name][key], ours=name == "priority")
                     for name in names], "{:,.0f} ms")
        for title, key in ((f"Median of {count} urgent requests", "p50"),
                           (f"Slowest of {count} urgent requests", "p99"))
    ]  # fmt: skip
    return Chart(
        "Urgent requests on a saturated engine: time to their first token",
        f"{made['places']} requests run at once, and more low-priority ones wait throughout. "
        "Urgent prompts have 700 to 1,000 tokens. Shorter is better.",
        "Bars: with the priority scheduler an urgent request waits about as long as on an idle "
        "engine; with FIFO, seconds.",
        source(run, "SmolLM2-135M, bf16."),
        panels,
    )


if __name__ == "__main__":
    sys.exit(main())
