"""A P99 target: keep the time between tokens below a limit while the load varies.

Runs the same prompts twice: first in steps as large as they get, then with a target for the 99th
percentile of the time between tokens. The scheduler measures how long steps take and makes them
just small enough. Prints throughput and latency of both runs, and the scheduler's own account.

    python examples/latency_target.py --target 200
"""

import argparse

from octavo import LLM, SamplingParams
from octavo.schedulers import FIFOScheduler, SLOScheduler

PROMPTS = [
    f"Item {n}. " + "A paged cache gives each request the blocks that it needs. " * (n % 7 + 1)
    for n in range(24)
]


def run(model: str, scheduler: FIFOScheduler) -> None:
    llm = LLM(model, scheduler=scheduler, max_num_seqs=8, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    llm.generate(PROMPTS, params)
    stats = llm.engine.stats
    print(
        f"{scheduler.name:5} {stats.throughput:6.0f} tokens/s, between tokens: "
        f"P50 {stats.itl.p50 * 1e3:.0f} ms, P99 {stats.itl.p99 * 1e3:.0f} ms"
    )
    if stats.slo is not None:  # the state of an SLOScheduler
        print(f"      {stats.slo.tokens} tokens per step at most: {stats.slo.reason}")
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--target", type=float, default=200.0, help="P99 in milliseconds")
    args = parser.parse_args()

    run(args.model, FIFOScheduler(max_stretch=None))
    run(args.model, SLOScheduler(p99_itl_ms=args.target))


if __name__ == "__main__":
    main()
