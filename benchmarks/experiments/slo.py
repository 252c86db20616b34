"""A ramp of arrivals to 150% of capacity and back: FIFO, priority, and a policy with a target.

    octavo bench slo [--policies fifo,slo] [--seconds 45] [--target-ms 200] [--save]

Poisson arrivals, the rate from 30% of capacity to 150% in the middle and back. Capacity is what
FIFO completes per second of 48 of these requests given at once. Each policy meets the same
arrivals. At each second: the P99 of the time between a request's tokens, over the last 20 s; it is
held if that is at most 1.1 x the target. 20 s, since all running requests wait for the same step:
the P99 of less than a hundred steps is that of the slowest one. The last line is JSON.

The target is 200 ms, as for each token of Llama 2 70B in MLPerf Inference. It is feasible in every
window here: one running request with a small chunk of a prompt takes less, and the policy may run
as few requests as it likes. The price is throughput: all tokens over the time to the last one.
`fifo-unbounded` is `FIFOScheduler(max_stretch=None)`, which fills its steps with prompts.
"""

import collections
import random
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.charts import Bars, Line, Lines
from benchmarks.experiments.common import (
    Answer,
    Arrival,
    arguments,
    drive,
    open_llm,
    report,
    tokens,
    words,
)
from benchmarks.rows import percentile, table
from benchmarks.workloads import Job
from octavo.schedulers import FIFOScheduler, Policy, PriorityScheduler, SLOScheduler

WINDOW, LEAST_GAPS = 20, 100
POLICIES: dict[str, Callable[[float], Policy]] = {
    "fifo-unbounded": lambda target: FIFOScheduler(max_stretch=None),
    "fifo": lambda target: FIFOScheduler(),
    "priority": lambda target: PriorityScheduler(),
    "slo": lambda target: SLOScheduler(p99_itl_ms=target),
}


def main() -> int:
    args = arguments(
        __doc__,
        policies={"type": words, "default": ["fifo", "priority", "slo"]},
        seconds={"type": float, "default": 45.0},
        target_ms={"type": float, "default": 200.0},
    )
    capacity = _capacity(args.model)
    work = _ramp(capacity, args.seconds)
    runs = {}
    for name in args.policies:
        policy = POLICIES[name](args.target_ms)
        runs[name] = _summary(_run(args.model, policy, work, name), args.target_ms)
        if isinstance(policy, SLOScheduler):
            runs[name]["share_changes"] = policy.state.changes
    usual = max(run["tokens_per_s"] for name, run in runs.items() if name != "slo")
    lines = [[name, f"{run['held']} of {run['windows']}", f"{run['itl_p99_ms']:.0f}",
              f"{run['ttft_p50_s']:.2f}", f"{run['ttft_p99_s']:.2f}", f"{run['tokens_per_s']:.0f}",
              f"{run['tokens_per_s'] / usual:.2f}"] for name, run in runs.items()]  # fmt: skip
    header = ("policy", "windows held", "ITL P99, ms", "TTFT P50, s", "P99, s", "tokens/s",
              "/ best FIFO")  # fmt: skip
    values = {"runs": runs, "capacity_per_s": round(capacity, 3), "target_ms": args.target_ms,
              "seconds": args.seconds, "requests": len(work), "window_s": WINDOW}  # fmt: skip
    return report("slo", values, table(header, lines), panels, args.save)


def _job(draw: random.Random) -> Job:
    return Job(tokens(draw, draw.choice([50, 200, 400, 800])), draw.choice([20, 60, 150]))


def _run(model: str, policy: Policy, work: list[Arrival], label: str) -> list[Answer]:
    llm = open_llm(model, scheduler=policy, max_num_seqs=64, max_model_len=4096,
                   kv_cache_memory_bytes=1 << 30, swap_space=0)  # fmt: skip
    drive(llm.engine, [Arrival(Job([5] * n, 4)) for n in (1, 64, 400)], "warm-up")
    answers = drive(llm.engine, work, label)
    llm.close()
    return answers


def _capacity(model: str) -> float:
    draw = random.Random(2)
    work = [Arrival(_job(draw)) for _ in range(48)]
    answers = _run(model, FIFOScheduler(max_stretch=None), work, "capacity")
    return len(work) / max(answer.times[-1] for answer in answers)


def _ramp(capacity: float, seconds: float) -> list[Arrival]:
    draw, at, work = random.Random(4), 0.0, []
    while at < seconds:
        height = 1 - abs(2 * at / seconds - 1)
        at += draw.expovariate(capacity * (0.3 + 1.2 * height))
        work.append(Arrival(_job(draw), at, draw.choice([0, 1])))
    return work


def _summary(answers: list[Answer], target_ms: float) -> dict[str, Any]:
    gaps = sorted(gap for answer in answers for gap in answer.gaps)
    p99 = []
    for second in range(WINDOW, int(gaps[-1][0]) + 1):
        found = [gap for when, gap in gaps if second - WINDOW < when <= second]
        if len(found) >= LEAST_GAPS:
            p99.append((second, round(1e3 * percentile(found, 0.99), 1)))
    rates = collections.Counter(int(when // 3) for when, _ in gaps)
    firsts = [answer.ttft for answer in answers]
    count = sum(len(answer.times) for answer in answers)
    return {
        "windows": len(p99),
        "held": sum(found <= 1.1 * target_ms for _, found in p99),
        "itl_p99_ms": round(1e3 * percentile([gap for _, gap in gaps], 0.99), 1),
        "ttft_p50_s": round(percentile(firsts, 0.5), 3),
        "ttft_p99_s": round(percentile(firsts, 0.99), 3),
        "tokens_per_s": round(count / max(answer.times[-1] for answer in answers), 1),
        "p99_by_second": p99,
        "rate_by_second": [[3 * part + 1.5, round(rates[part] / 3, 1)] for part in sorted(rates)],
    }


def panels(rows: list[dict[str, Any]]) -> list[Lines | Bars]:
    made = rows[-1]
    latency = [Line(name, run["p99_by_second"]) for name, run in made["runs"].items()]
    last = max(x for line in latency for x, _ in line.points)
    target = made["target_ms"]
    latency.append(Line(f"target, {target:.0f} ms", [(0, target), (last, target)], dashed=True))
    rate = [Line(name, run["rate_by_second"]) for name, run in made["runs"].items()]
    x = f"seconds (arrivals peak at {made['seconds'] / 2:.0f})"
    return [
        Lines("P99 of the time between tokens, over the last 20 s", x, "milliseconds", latency),
        Lines("Tokens per second", x, "tokens/s", rate),
    ]


if __name__ == "__main__":
    sys.exit(main())
