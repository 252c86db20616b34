"""What the experiments share: an engine driven request by request, lengths, and how to report."""

import argparse
import datetime
import functools
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmarks.charts import Chart, write
from benchmarks.clock import RunningClock
from benchmarks.rows import RESULTS, row, save
from benchmarks.workloads import Job
from octavo import LLM, SamplingParams
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.runner.model_runner import ModelRunner

# Tokens of a ShareGPT conversation's turn. The means are those that Kwon et al. (SOSP 2023, section
# 6.1, figure 11) give for the data set; that they are log-normal, and sigma, are assumptions.
MEAN_PROMPT, MEAN_OUTPUT, SIGMA, LONGEST = 161, 338, 1.0, 2048
LENGTHS = {"mean_prompt": MEAN_PROMPT, "mean_output": MEAN_OUTPUT, "sigma": SIGMA, "cut": LONGEST}


def share_gpt(draw: random.Random) -> tuple[int, int]:
    """(prompt, output) tokens: log-normal, together cut to LONGEST."""
    lengths = [
        max(4, round(draw.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)))
        for mean in (MEAN_PROMPT, MEAN_OUTPUT)
    ]
    prompt = min(lengths[0], LONGEST // 2)
    return prompt, min(lengths[1], LONGEST - prompt)


def tokens(draw: random.Random, count: int) -> list[int]:
    """Random plain words of SmolLM2's vocabulary: no two prompts share a block."""
    return [draw.randrange(300, 49_000) for _ in range(count)]


@dataclass(frozen=True)
class Arrival:
    """A job, and when it comes: seconds from the start."""

    job: Job
    at: float = 0.0
    priority: int = 0


@dataclass
class Answer:
    """Seconds from the start of the run: arrival, and each token."""

    arrival: float
    priority: int
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(when, seconds since the token before)."""
        return [(b, b - a) for a, b in zip(self.times, self.times[1:], strict=False)]


@functools.cache
def clock() -> RunningClock:
    """This process's clock."""
    return RunningClock()


def open_llm(model: str, **options: Any) -> LLM:
    """bf16, no prefix cache: what is shown is memory and order, not luck."""
    llm = LLM(model, **{"dtype": "bfloat16", "load_progress": False,
                        "enable_prefix_caching": False, "max_waiting": 10**6, **options}
              )  # fmt: skip
    llm.engine.clock = clock()
    _touch(llm)
    return llm


def _touch(llm: LLM) -> None:
    """Write the whole pool: a virtual machine's host has to find a page when it is first written
    (0.5 GB/s seen), and what is compared must not differ in who comes first."""
    executor = llm.engine.executor
    assert isinstance(executor, ModelRunner)
    for layer in executor.cache.layers:
        layer.zero_()


def drive(
    engine: Engine,
    arrivals: Sequence[Arrival],
    label: str,
    *,
    at_once: int | None = None,
    each: Callable[[float], bool | None] = lambda now: None,
) -> list[Answer]:
    """Let the arrivals come by the clock, and step until all are answered.

    at_once: let that many be there at a time instead, and end when fewer are left. each: told the
    time after each step; True ends the run there. What is left at an end is aborted.
    """
    answers: dict[str, Answer] = {}
    begin, open_now = engine.clock(), 0
    with tqdm(total=len(arrivals), desc=label, unit="request", file=sys.stderr) as bar:
        while len(answers) < len(arrivals) or open_now:
            now = engine.clock() - begin
            while len(answers) < len(arrivals) and (at_once is None or open_now < at_once):
                arrival = arrivals[len(answers)]
                if arrival.at > now:
                    break
                due = arrival.at if at_once is None else now
                name = str(len(answers))
                answers[name] = Answer(due, arrival.priority)
                open_now += 1
                engine.add_request(
                    Submission(
                        name, tuple(arrival.job.prompt), _params(arrival.job),
                        arrival_time=begin + due,
                        priority=arrival.priority if engine.capabilities.heeds_priority else 0,
                    )
                )  # fmt: skip
            if not open_now:
                time.sleep(min(max(arrivals[len(answers)].at - now, 0.0), 0.005))
                continue
            updates = engine.step()
            now = engine.clock() - begin
            for update in updates:
                answer = answers[update.request_id]
                answer.token_ids += update.token_ids
                answer.times += [now] * len(update.token_ids)
                if update.finish_reason:
                    open_now -= 1
                    bar.update()
            few = at_once is not None and len(answers) == len(arrivals) and open_now < at_once
            if each(now) or few:
                for name in answers:
                    engine.abort(name)
                break
    return list(answers.values())


def _params(job: Job) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
    )


def reset(engine: Engine) -> None:
    """Forget cached prefixes and learned rates, so that what follows learns for itself."""
    engine.reset_prefix_cache()
    scheduler = engine.scheduler
    scheduler.rates = scheduler.queues.rates = type(scheduler.rates)()


def arguments(doc: str | None, **more: dict[str, Any]) -> argparse.Namespace:
    """--model and --save, and what the experiment adds: name=add_argument's keywords."""
    parser = argparse.ArgumentParser(description=str(doc).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="embedded name, folder or .gguf file")
    parser.add_argument("--save", action="store_true", help="save a row and draw its chart")
    for name, options in more.items():
        parser.add_argument("--" + name.replace("_", "-"), **options)
    return parser.parse_args()


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def report(
    kind: str,
    values: dict[str, Any],
    table: str,
    chart: Callable[[list[dict[str, Any]]], Chart],
    keep: bool,
) -> int:
    """Print the table, save the row, draw the chart from one saved run, end with JSON."""
    made = row(kind, **values, stopped_s=round(clock().stopped, 1))
    print(table)
    if keep:
        save(made)
        print(f"chart: docs/charts/{write(kind, chart(saved(kind))).name}", file=sys.stderr)
    print(json.dumps(made))
    return 0


def saved(kind: str) -> list[dict[str, Any]]:
    """All saved rows of a kind, oldest first."""
    path = RESULTS / f"{kind}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def one_run(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one run: of the newest one among those with the most rows."""
    runs: dict[Any, list[dict[str, Any]]] = {}
    for made in rows:
        # Rows that were saved before there was a `run`: by what one command has in common.
        key = made.get("run") or (made["command"], made["commit"].rstrip("+"))
        runs.setdefault(key, []).append(made)
    return max(reversed(runs.values()), key=len)


def source(rows: Sequence[dict[str, Any]], more: str = "") -> str:
    """When, on what, and with which command the rows of one run were measured."""
    made = rows[0]
    features = set(made["features"])
    extension = next(
        name for name, needed in (("AMX", {"amx_bf16"}), ("AVX-512 BF16", {"avx512_bf16"}),
                                  ("AVX-512", {"avx512f"}), ("AVX2", set())) if needed <= features
    )  # fmt: skip
    device = re.sub(r"\((R|TM)\)| Processor| CPU| @.*", "", made["device"])
    when = datetime.date.fromisoformat(made["date"][:10])
    cores = made["cores"] if isinstance(made["cores"], int) else len(made["cores"])
    command = made["command"].replace("python -m benchmarks.experiments.", "octavo bench ")
    command = command.replace("python -m benchmarks.", "octavo bench ")
    return " ".join(filter(None, [
        f"Measured on {when.day} {when:%B %Y}, one run: {device} ({extension}), {cores} cores,",
        f"Octavo {made['version']} at {made['commit'].rstrip('+')}, {command}.", more,
    ]))  # fmt: skip
