"""Tensor parallelism on the cores of one machine against one process that uses them all.

    python -m benchmarks.tensor_parallel [--model qwen2.5-coder-0.5b] [--ranks 2] [--save]

The workload is the first 16 requests of W1, cut to 128 tokens in and 48 out. Each engine runs
alone, from its start to its end, so that ranks are never stopped; the table shows the median of the
repetitions. With --save each engine becomes a row in benchmarks/results/. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.engines import model_file
from benchmarks.processes import EngineProcess
from benchmarks.rows import row, save, table
from benchmarks.workloads import Job, mixed


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b", help="embedded name or .gguf file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quantization", default="int8", help="none for bfloat16 weights; int8 "
                        "steps are captured on any processor")  # fmt: skip
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--log", type=Path, help="append what the engines say to this file")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    args = parser.parse_args()
    options = {
        "model": str(model_file(args.model)), "dtype": "bfloat16", "load_progress": False,
        "kv_cache_memory_bytes": 1 << 28, "max_model_len": 512, "quantization":
        None if args.quantization == "none" else args.quantization,
    }  # fmt: skip
    jobs = [Job(job.prompt[:128], min(job.max_tokens, 48)) for job in mixed()[: args.requests]]
    rows = []
    for ranks in (1, args.ranks):
        values = _measured(ranks, {**options, "tensor_parallel_size": ranks}, jobs, args)
        rows.append(values)
        if args.save:
            save(values)
    lines = [
        (f"TP {values['ranks']}", f"{values['output_tokens_per_s']:.1f}", f"{values['wall_s']:.2f}",
         f"{min(values['walls_s']):.2f}-{max(values['walls_s']):.2f}", values["peak_rss_mb"],
         f"{values['startup_s']:.1f}", f"{rows[0]['wall_s'] / values['wall_s']:.2f}x")
        for values in rows
    ]  # fmt: skip
    print(table(("ranks", "tokens/s", "seconds", "min-max", "peak MB", "start s", "rate"), lines))
    print(json.dumps(rows))
    return 0


def _measured(
    ranks: int, options: dict[str, Any], jobs: list[Job], args: argparse.Namespace
) -> dict[str, Any]:
    engine = EngineProcess(f"TP {ranks}", "benchmarks.peers.octavo_llm", options, log=args.log)
    try:
        runs = [engine.run(jobs) for _ in range(args.reps)]
    finally:
        engine.close()
    walls = [run["wall_s"] for run in runs]
    middle = statistics.median(walls)
    return row(
        "tensor_parallel",
        ranks=ranks,
        model=args.model,
        quantization=args.quantization,
        requests=len(jobs),
        wall_s=round(middle, 3),
        walls_s=[round(wall, 3) for wall in walls],
        output_tokens_per_s=round(runs[0]["output_tokens"] / middle, 1),
        cores_used=[run["cores"] for run in runs],
        other_cores=[run["other_cores"] for run in runs],
        peak_rss_mb=max(run["peak_rss_mb"] for run in runs),
        startup_s=engine.startup_s,
        **engine.facts,
    )


if __name__ == "__main__":
    sys.exit(main())
