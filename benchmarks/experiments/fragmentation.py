"""How much of the KV memory that requests hold is in use: contiguous reservations against blocks.

    octavo bench fragmentation [--blocks 8,16,32,128] [--save]

For 8 and 32 requests at once, with lengths like ShareGPT's, real runs at each block size; after
each step the engine's own accounting is read. For the same requests at the same moments two
contiguous layouts are counted: each request reserves the longest it may become (2,048 tokens), or
just what it will become, as if the output's length were known. use: written / reserved slots,
summed over the run, which ends when fewer than 8 or 32 are left. The last line is JSON.
"""

import random
import sys
from typing import Any

from benchmarks.charts import Bars, Lines
from benchmarks.experiments.common import (
    LENGTHS,
    LONGEST,
    Arrival,
    arguments,
    drive,
    numbers,
    open_llm,
    report,
    share_gpt,
    tokens,
)
from benchmarks.rows import table
from benchmarks.workloads import Job

CONCURRENT = {8: 16, 32: 48}  # at once -> in all


def main() -> int:
    args = arguments(__doc__, blocks={"type": numbers, "default": [8, 16, 32, 128]})
    use: dict[str, dict[str, float]] = {str(count): {} for count in CONCURRENT}
    most: dict[str, dict[str, int]] = {str(count): {} for count in CONCURRENT}
    for size in args.blocks:
        llm = open_llm(args.model, block_size=size, max_model_len=4096,
                       kv_cache_memory_bytes=1 << 30)  # fmt: skip
        for count, total in CONCURRENT.items():
            shares, peaks = _measure(llm, jobs(total), count, f"{count} at once, blocks of {size}")
            use[str(count)].update(shares)
            most[str(count)].update(peaks)
        llm.close()
    lines = [[name, *(f"{use[count][name]:.1%}" for count in use),
              *(most[count].get(name, "") for count in use)] for name in use["8"]]  # fmt: skip
    header = ("slots in use / reserved", *(f"{count} at once" for count in use),
              *(f"most written, {count}" for count in use))  # fmt: skip
    values = {"use": use, "most_written_slots": most, "lengths": LENGTHS, "in_all": CONCURRENT}
    return report("fragmentation", values, table(header, lines), panels, args.save)


def jobs(count: int) -> list[Job]:
    draw = random.Random(7)
    lengths = [share_gpt(draw) for _ in range(count)]
    return [Job(tokens(draw, prompt), output) for prompt, output in lengths]


def _measure(
    llm: Any, work: list[Job], count: int, label: str
) -> tuple[dict[str, float], dict[str, int]]:
    """(use by layout, most written slots by layout) of one run."""
    engine = llm.engine
    written = held = known = longest = most = 0

    def sample(now: float) -> None:
        nonlocal written, held, known, longest, most
        usage = engine.scheduler.kv.usage()
        written, held = written + usage.written_slots, held + usage.held_slots
        most = max(most, usage.written_slots)
        for name in engine.slots():
            job = work[int(name)]
            known += len(job.prompt) + job.max_tokens
            longest += LONGEST

    drive(engine, [Arrival(job) for job in work], label, at_once=count, each=sample)
    block = f"paged, blocks of {llm.config.block_size}"
    shares = {"contiguous, longest": written / longest, "contiguous, length known": written / known,
              block: written / held}  # fmt: skip
    return {name: round(share, 4) for name, share in shares.items()}, {block: most}


def panels(rows: list[dict[str, Any]]) -> list[Lines | Bars]:
    use = rows[-1]["use"]
    names = list(use["8"])
    series = {f"{count} requests at once": [100 * use[count][n] for n in names] for count in use}
    groups = [name.replace("contiguous, ", "contig., ").replace("blocks of", "") for name in names]
    title = "KV slots in use / reserved, lengths like ShareGPT's (SmolLM2, real runs)"
    return [Bars(title, "percent", groups, series, "{:.1f}")]


if __name__ == "__main__":
    sys.exit(main())
