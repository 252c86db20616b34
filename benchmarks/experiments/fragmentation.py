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
    return report("fragmentation", values, table(header, lines), chart, args.save)


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


def chart(rows: list[dict[str, Any]]) -> Chart:
    run = one_run(rows)
    use = run[-1]["use"]
    names = {
        "contiguous, longest": "contiguous, 2,048 tokens reserved each",
        "contiguous, length known": "contiguous, final length known",
    }
    panels = [
        Bars(
            f"{count} requests at once",
            [Bar(names.get(name, name), 100 * share, ours=name.endswith("of 16"))
             for name, share in use[count].items()],
            "{:.1f}%",
            100.0,
        )
        for count in use
    ]  # fmt: skip
    return Chart(
        "How much of the reserved KV cache is in use",
        "Written slots as a share of reserved slots, over a whole run. Lengths as in ShareGPT: "
        f"{LENGTHS['mean_prompt']} tokens of prompt and {LENGTHS['mean_output']} of output on "
        "average. Longer is better; 16 is Octavo's default block size.",
        "Bars: paged blocks of 16 tokens use 96% of what they reserve, contiguous reservations of "
        "the longest length 10%, and of the final length about half.",
        source(run, "SmolLM2-135M, real requests; the contiguous layouts are counted for the "
               "same requests at the same moments."),
        panels,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
