"""How many requests run at once in the same KV memory: contiguous reservations against blocks.

    octavo bench concurrency [--gib 1,2,4] [--save]

A service in its steady state: the first requests are anywhere in their answers (of those in
flight at a moment, long answers are the more likely, in proportion to their length), new ones
wait without end. Lengths are like ShareGPT's. Once memory is full, the requests that run are
counted after each step; the median is what the memory holds. Contiguous layouts hold as many as
there are reservations: of the model's window (8,192 tokens), or of 2,048, the longest that comes.
The last line is JSON.
"""

import random
import statistics
import sys
from typing import Any

from benchmarks.charts import Bar, Bars, Chart
from benchmarks.experiments.common import (
    LENGTHS,
    LONGEST,
    Arrival,
    arguments,
    drive,
    numbers,
    one_run,
    open_llm,
    report,
    share_gpt,
    source,
    tokens,
)
from benchmarks.rows import table
from benchmarks.workloads import Job
from octavo.schedulers import FIFOScheduler

STEPS = 40  # counted, from when memory is full
WINDOW = 8192


def main() -> int:
    args = arguments(__doc__, gib={"type": numbers, "default": [1, 2, 4]})
    for gib in args.gib:
        values = _measure(args.model, gib)
        names = ("contiguous_window", "contiguous_2048", "paged")
        line = [f"{gib} GiB", *(values[name] for name in names), f"{values['times_window']:.1f}x",
                f"{values['times_2048']:.1f}x", values["preemptions"]]  # fmt: skip
        header = ("KV memory", "contiguous, 8192", "contiguous, 2048", "paged", "paged / 8192",
                  "paged / 2048", "preemptions")  # fmt: skip
        report("concurrency", values, table(header, [line]), chart, args.save)
    return 0


def _measure(model: str, gib: int) -> dict[str, Any]:
    llm = open_llm(
        model,
        kv_cache_memory_bytes=gib << 30,
        max_num_seqs=2048,
        max_num_batched_tokens=4096,
        scheduler=FIFOScheduler(max_stretch=None),
    )
    engine = llm.engine
    counts: list[int] = []
    waits: list[int] = []
    slots = engine.limits.kv_tokens

    def count(now: float) -> bool:
        usage = engine.scheduler.kv.usage()
        # A block for the next token of each running request stays free: some 3% of all.
        if usage.held_slots > 0.93 * slots or counts:
            counts.append(engine.scheduler.num_running)
            waits.append(engine.scheduler.num_waiting)
        return len(counts) == STEPS

    work = _service(slots // 150)
    drive(engine, [Arrival(job) for job in work], f"{gib} GiB", each=count)
    paged = round(statistics.median(counts))
    values = {
        "gib": gib,
        "slots": slots,
        "paged": paged,
        "paged_least": min(counts),
        "paged_most": max(counts),
        "waiting_least": min(waits),
        "contiguous_window": slots // WINDOW,
        "contiguous_2048": slots // LONGEST,
        "times_window": round(paged / (slots // WINDOW), 2),
        "times_2048": round(paged / (slots // LONGEST), 2),
        "preemptions": engine.scheduler.num_preemptions,
        "swap_outs": engine.scheduler.num_swap_outs,
        "steps": STEPS,
        "lengths": LENGTHS,
    }
    llm.close()
    return values


def _service(count: int) -> list[Job]:
    """`count` requests: half of them caught in the middle of their answers, half new."""
    draw = random.Random(3)
    pool = [share_gpt(draw) for _ in range(20_000)]
    caught = draw.choices(pool, [output for _, output in pool], k=count // 2)
    work = []
    for prompt, output in caught:
        done = draw.randrange(output)
        work.append(Job(tokens(draw, prompt + done), output - done))
    return work + [Job(tokens(draw, p), o) for p, o in draw.choices(pool, k=count - len(work))]


def chart(rows: list[dict[str, Any]]) -> Chart:
    run = sorted(one_run(rows), key=lambda made: made["gib"])
    panels = []
    for made in run:
        bars = [
            Bar("contiguous, 8,192 tokens reserved each", made["contiguous_window"]),
            Bar("contiguous, 2,048 tokens reserved each", made["contiguous_2048"]),
            Bar("paged (Octavo)", made["paged"], made["paged_least"], made["paged_most"],
                ours=True),
        ]  # fmt: skip
        panels.append(Bars(f"{made['gib']} GiB of KV cache", bars, "{:,.0f} requests"))
    return Chart(
        "Requests that run at once in the same memory",
        "Paged: median of 40 steps with memory full, with minimum and maximum. Contiguous: as many "
        "reservations as fit, of the model's window or of the longest request that comes.",
        "Bars: paged memory runs about 15 times as many requests as reservations of the window, "
        "and almost 4 times as many as reservations of 2,048 tokens.",
        source(run, "SmolLM2-135M; lengths as in ShareGPT."),
        panels,
    )


if __name__ == "__main__":
    sys.exit(main())
