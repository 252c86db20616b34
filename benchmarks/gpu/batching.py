"""Paged continuous batching against contiguous static batching, with the same kernels and memory.

Static: as many requests as the pool holds at the longest possible length are computed together
until the last one is done; then the next ones. Continuous: the engine. All requests arrive at
once. Both compute the same prompts and the same numbers of tokens.
"""

import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.models import prefill_step, size, start, write
from benchmarks.gpu.section import Rows, Scale, compilations
from octavo.core.plan import PlanRow, SampleSpec, StepPlan
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.params import SamplingParams
from octavo.runner.model_runner import ModelRunner

_GREEDY = SamplingParams(temperature=0)


class Job(NamedTuple):
    prompt: int
    output: int


class Measured(NamedTuple):
    """used: share of the reserved KV that held tokens, averaged over the steps."""

    seconds: float
    latencies: list[float]
    used: float
    concurrency: int


def run(scale: Scale, rows: Rows, folder: Path) -> bool:
    """Whether both were measured."""
    chance = random.Random(5)
    count, most_prompt, most_output = (4, 20, 6) if scale.dry else (256, 768, 256)
    jobs = [
        Job(chance.randint(most_prompt // 12, most_prompt), chance.randint(2, most_output))
        for _ in range(count)
    ]
    window = most_prompt + most_output
    blocks = 2 * -(-window // 16) if scale.dry else 2048
    runner = start(
        write(folder / "1B", size(scale, "1B")), scale, max_model_len=window,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=64 if scale.dry else 4096, max_num_seqs=256, swap_space=0,
        enable_prefix_caching=False,
        cuda_graph_sizes="2" if scale.dry else "1,2,4,8,16,32,64,128,256",
    )  # fmt: skip
    pool, found = (runner.limits.num_blocks - 1) * runner.limits.block_size, {}
    with compilations() as compiled:
        for name in ("static", "continuous"):
            if scale.is_late:
                return False
            found[name] = _static(runner, jobs) if name == "static" else _continuous(runner, jobs)
            rows.add(kind=name, requests=count, pool_tokens=pool, **_figures(found[name], jobs))
    ratio = found["static"].seconds / found["continuous"].seconds
    rows.add(throughput_ratio=ratio, compiled_after_ready=compiled, ok=not compiled)
    runner.close()
    return True


def _figures(found: Measured, jobs: list[Job]) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "output_tokens_per_s": sum(job.output for job in jobs) / found.seconds,
        "latency_mean_s": statistics.mean(found.latencies),
        "memory_used": found.used,
        "largest_concurrency": found.concurrency,
    }


def _continuous(runner: ModelRunner, jobs: list[Job]) -> Measured:
    engine = Engine(runner.config, runner, create_policy("fifo"))
    vocab, begin = runner.limits.vocab_size, time.perf_counter()
    for n, job in enumerate(jobs):
        params = SamplingParams(temperature=0, max_tokens=job.output, ignore_eos=True)
        ids = tuple((7 * i + n) % vocab for i in range(job.prompt))
        engine.add_request(Submission(str(n), ids, params))
    latencies, used = [], []
    while engine.has_work():
        updates = engine.step()
        now = time.perf_counter() - begin
        latencies += [now for update in updates if update.finish_reason]
        slots = engine.slots().values()
        if held := sum(slot[0] for slot in slots):
            used.append(sum(slot[1] for slot in slots) / held)
    seconds, peak = time.perf_counter() - begin, engine.scheduler.peak_running
    engine.scheduler.close()
    return Measured(seconds, latencies, statistics.mean(used), peak)


def _static(runner: ModelRunner, jobs: list[Job]) -> Measured:
    limits = runner.limits
    blocks = -(-limits.max_model_len // limits.block_size)
    most = (limits.num_blocks - 1) // blocks
    latencies: list[float] = []
    used: list[float] = []
    begin = time.perf_counter()
    for first in range(0, len(jobs), most):
        batch = jobs[first : first + most]
        tables = [(tuple(range(1 + n * blocks, 1 + (n + 1) * blocks)),) for n in range(most)]
        for n, job in enumerate(batch):  # prompts one by one: they fill a step
            plan = prefill_step(runner, 1, job.prompt)
            row = PlanRow("0", plan.rows[0].token_ids, 0, tables[n], plan.rows[0].samples)
            runner.execute(StepPlan(1, (row,)))
        for step in range(1, max(job.output for job in batch)):
            spec = (SampleSpec(_GREEDY, 0, 0, 0),)
            runner.execute(StepPlan(1, tuple(
                PlanRow(str(n), (n,), job.prompt + step - 1, tables[n], spec)
                for n, job in enumerate(batch)
            )))  # fmt: skip
            written = sum(job.prompt + min(step, job.output) for job in batch)
            used.append(written / (most * limits.max_model_len))
        latencies += [time.perf_counter() - begin] * len(batch)
    return Measured(time.perf_counter() - begin, latencies, statistics.mean(used), most)
