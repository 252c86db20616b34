"""Long requests in the same KV memory: Octavo against transformers' static batches.

    octavo bench longseq [--lengths 512,1024,2048,4096,8192] [--reps 1] [--gib 1] [--save]

Requests of 512 to 8,192 tokens in all, 64 of them generated. Static batches hold as many rows as
the memory holds when each reserves the model's window (8,192 tokens, since the longest request is
not known in advance); Octavo has a pool of the same size. Engines alternate, one stopped while the
other runs. As long ones are slow in static batches, there are fewer of them. Output
tokens per second. The last line is JSON.

Where the memory does not hold one window, static batching has no batch to run (--gib 0.125);
Octavo runs every request that fits by itself.
"""

import random
import statistics
import sys
from typing import Any

from benchmarks.charts import Bar, Bars, Chart
from benchmarks.engines import model_file, start
from benchmarks.experiments.common import arguments, numbers, one_run, report, source, tokens
from benchmarks.processes import EngineProcess
from benchmarks.rows import table
from benchmarks.workloads import Job

WINDOW, OUTPUT, SLOT_BYTES = 8192, 64, 23_040
COUNTS = {512: 20, 1024: 20, 2048: 10, 4096: 10, 8192: 5}
HEADER = ("tokens each", "requests", "static rows", "Octavo tokens/s", "static tokens/s",
          "Octavo / static")  # fmt: skip


def main() -> int:
    args = arguments(
        __doc__,
        lengths={"type": numbers, "default": list(COUNTS)},
        reps={"type": int, "default": 1},
        gib={"type": float, "default": 1.0},
    )
    slots = int(args.gib * 2**30) // SLOT_BYTES
    engines = _start(args, slots)
    facts = {name: engine.facts for name, engine in engines.items()}
    try:
        for length in args.lengths:
            values = _measure(engines, length, args.reps)
            values |= {"gib": args.gib, "static_rows": slots // WINDOW, "engines": facts}
            line = [length, values["requests"], values["static_rows"], values["octavo"],
                    values["static"] or "no room for a row", values["times"] or "-"]  # fmt: skip
            report("longseq", values, table(HEADER, [line]), chart, args.save)
    finally:
        for engine in engines.values():
            engine.close()
    return 0


def _start(args: Any, slots: int) -> dict[str, EngineProcess]:
    model = model_file(args.model)
    window = min(WINDOW, slots // 16 * 16 - 32)
    pool: dict[str, Any] = {"kv_cache_memory_bytes": int(args.gib * 2**30), "max_model_len": window,
            "max_num_seqs": 128}  # fmt: skip
    engines = {"octavo": start("octavo", model, **pool)}
    if slots >= WINDOW:
        engines["static"] = start("static-16", model, batch=slots // WINDOW)
    for engine in engines.values():
        engine.pause()
    return engines


def _measure(engines: dict[str, EngineProcess], length: int, reps: int) -> dict[str, Any]:
    """Output tokens per second by engine, the median and all, and their ratio."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(reps):
        draw = random.Random(1000 * length + repetition)
        work = [Job(tokens(draw, length - OUTPUT), OUTPUT) for _ in range(COUNTS[length])]
        for name, engine in engines.items():
            engine.resume()
            result = engine.run(work)
            engine.pause()
            rates[name].append(round(result["output_tokens"] / result["wall_s"], 2))
            print(f"{length} {name}: {result['wall_s']:.1f} s", file=sys.stderr)
    ours = statistics.median(rates["octavo"])
    theirs = statistics.median(rates["static"]) if "static" in rates else None
    return {
        "length": length,
        "requests": COUNTS[length],
        "output": OUTPUT,
        "octavo": ours,
        "static": theirs,
        "times": round(ours / theirs, 2) if theirs else None,
        "all": rates,
    }


def chart(rows: list[dict[str, Any]]) -> Chart:
    run = sorted(one_run([made for made in rows if made["gib"] == 1.0]), key=lambda m: m["length"])
    panels = []
    for made in run:
        bars = [Bar("Octavo", made["octavo"], *_ends(made, "octavo"), ours=True),
                Bar(f"transformers, batches of {made['static_rows']}", made["static"],
                    *_ends(made, "static"))]  # fmt: skip
        title = f"{made['length']:,} tokens per request, {made['requests']} requests"
        times = f": {made['times']:.1f} times as fast" if made["times"] else ""
        panels.append(Bars(title + times, bars, "{:,.1f} tokens/s"))
    repetitions = max(len(made["all"]["octavo"]) for made in run)
    counted = f"medians of {repetitions} runs" if repetitions > 1 else "one run of each"
    return Chart(
        "Long requests in 1 GiB of KV cache",
        f"Output tokens per second, {counted}; 64 tokens of each request are generated. A static "
        "batch reserves the model's window of 8,192 tokens for each row.",
        "Pairs of bars, one for each length from 512 to 8,192 tokens: Octavo is faster than static "
        "batches at each, and more so for shorter requests.",
        source(run, "SmolLM2-135M, bf16."),
        panels,
    )


def _ends(made: dict[str, Any], engine: str) -> tuple[float | None, float | None]:
    found = made["all"].get(engine, ())
    return (min(found), max(found)) if len(found) > 1 else (None, None)


if __name__ == "__main__":
    sys.exit(main())
