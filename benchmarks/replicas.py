"""Compares engines that divide the cores with one engine that has them all.

    python -m benchmarks.replicas [--engines 2] [--workloads W1,W3] [--model smollm2] [--reps 3]
        [--save]

Both are an `AsyncLLM`: data_parallel_size=1 with every core, and data_parallel_size=N, whose
engines have the cores of their share. Repetitions alternate, and the engines that do not run are
stopped; the first of each is not counted. Each begins with empty prefix caches; a request is
submitted when the run begins. Run it alone on the machine, with OMP_NUM_THREADS unset. With --save
each workload becomes a row in benchmarks/results/replicas.jsonl. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.engines import model_file
from benchmarks.rows import percentile, row, save, table
from benchmarks.system import usable_cores
from benchmarks.workloads import WORKLOADS, Job
from octavo import AsyncLLM, SamplingParams
from octavo.errors import EngineError
from octavo.params import RequestOutputKind

_OPTIONS = {"dtype": "bfloat16", "load_progress": False, "max_num_seqs": 64,
            "max_model_len": 4096, "kv_cache_memory_bytes": 512 << 20}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One run. Seconds; ttft and itl: of all requests, and of all pairs of tokens."""

    wall: float
    tokens: int
    ttft: list[float]
    itl: list[float]


def main() -> int:
    args = _arguments()
    if "OMP_NUM_THREADS" in os.environ:
        sys.exit("unset OMP_NUM_THREADS: it would decide the threads of both")
    model, cores = str(model_file(args.model)), usable_cores()
    counts = (1, args.engines)
    engines = [AsyncLLM(model, data_parallel_size=count, **_OPTIONS) for count in counts]
    rows = []
    try:
        for engine in engines:
            _signal(engine, signal.SIGSTOP)
        for workload in args.workloads:
            found: list[list[Result]] = [[], []]
            for repetition in range(args.reps + 1):
                jobs = WORKLOADS[workload](repetition)
                for which in (0, 1) if repetition % 2 else (1, 0):
                    with _running(engines[which]):
                        result = asyncio.run(_run(engines[which], jobs))
                    if repetition:
                        found[which].append(result)
                    _say(f"{workload}, engines={counts[which]}: {result.wall:.2f} s")
            rows.append(_row(workload, args.engines, cores, found))
    finally:
        for engine in engines:
            _signal(engine, signal.SIGCONT)
            engine.shutdown()
    for values in rows if args.save else ():
        save(values)
    header = ("workload", "one engine, s", f"{args.engines} engines, s", "ratio", "TTFT P50", "",
              "ITL P99", "")  # fmt: skip
    print(table(header, [_line(values) for values in rows]))
    print(json.dumps({values["workload"]: values["ratio"] for values in rows}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=["W1", "W3"])
    parser.add_argument("--model", default="smollm2", help="an embedded model")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    return parser.parse_args()


@contextmanager
def _running(engine: AsyncLLM) -> Iterator[None]:
    """The processes of an engine run meanwhile."""
    _signal(engine, signal.SIGCONT)
    asyncio.run(_awake(engine))
    try:
        yield
    finally:
        _signal(engine, signal.SIGSTOP)


async def _awake(engine: AsyncLLM) -> None:
    """Wait until all that were stopped have been heard of again."""
    while engine._host.client.down:
        await asyncio.sleep(0.05)
    while True:
        try:
            await engine.check_health()
            await engine.reset_prefix_cache()
        except EngineError:
            await asyncio.sleep(0.05)
        else:
            return


def _signal(engine: AsyncLLM, number: int) -> None:
    for link in engine._host.client.links:
        if link.process is not None:
            os.kill(link.process.pid, number)


async def _run(engine: AsyncLLM, jobs: list[Job]) -> Result:
    begun = time.perf_counter()
    done = await asyncio.gather(*(_answer(engine, job, begun) for job in jobs))
    return Result(
        time.perf_counter() - begun,
        sum(job.max_tokens for job in jobs),
        [times[0] for times in done],
        [later - earlier for times in done for earlier, later in pairwise(times)],
    )


async def _answer(engine: AsyncLLM, job: Job, begun: float) -> list[float]:
    """When each token came."""
    params = SamplingParams(
        temperature=0,
        max_tokens=job.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    times: list[float] = []
    async for output in engine.generate({"prompt_token_ids": job.prompt}, params):
        new = sum(len(choice.token_ids) for choice in output.outputs)
        times += [time.perf_counter() - begun] * new
    if len(times) != job.max_tokens:
        raise RuntimeError(f"{len(times)} tokens, not {job.max_tokens}")
    return times


def _row(workload: str, engines: int, cores: int, found: list[list[Result]]) -> dict[str, Any]:
    """ratio: the speed of N engines over that of one."""
    one, several = (_figures(results) for results in found)
    ratio = round(one["wall_s"] / several["wall_s"], 3)
    return row("replicas", workload=workload, engines=engines, cores_divided=cores, one=one,
               several=several, ratio=ratio)  # fmt: skip


def _figures(results: list[Result]) -> dict[str, Any]:
    """Medians over repetitions."""
    walls = [round(result.wall, 3) for result in results]
    return {
        "wall_s": statistics.median(walls),
        "tokens_per_s": round(results[0].tokens / statistics.median(walls), 1),
        "ttft_p50_s": round(statistics.median(percentile(r.ttft, 0.5) for r in results), 4),
        "itl_p99_s": round(statistics.median(percentile(r.itl, 0.99) for r in results), 4),
        "all_s": walls,
    }


def _line(values: dict[str, Any]) -> list[str]:
    one, several = values["one"], values["several"]
    return [
        values["workload"], f"{one['wall_s']:.2f}", f"{several['wall_s']:.2f}",
        f"{values['ratio']}x", f"{one['ttft_p50_s']:.2f}", f"{several['ttft_p50_s']:.2f}",
        f"{one['itl_p99_s']:.3f}", f"{several['itl_p99_s']:.3f}",
    ]  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
