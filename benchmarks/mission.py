"""A claim on paper: LLaMA-13B on eight A100-40GB cards, static batching against paged memory.

    python -m benchmarks.mission [--save]

No card is needed: the simulation plans every step as the engine does, and a roofline of the card
says how long it takes (docs/simulate.md has its formulas and constants). 500 clients send 4,000
requests, each the next one when its last one is answered. `static` reserves a contiguous place for
the longest request that may come, and computes batches to their end; `paged` is the engine's own
scheduler. Then: the same at 4,096 tokens, CUDA graphs at 1 to 64 rows, and how far each ratio
moves if a constant of the model is wrong.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.rows import row, save, table
from octavo import hardware
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.log import configure
from octavo.planner.plan import Plan, make_plan
from octavo.planner.target import target
from octavo.sim.cost import StepShape
from octavo.sim.devices import roofline
from octavo.sim.record import Record
from octavo.sim.requests import Job
from octavo.sim.roofline import Reached, RooflineCost
from octavo.sim.scenario import Scenario, limits_of

CARD, CARDS = "a100-40gb", 8
CLIENTS, REQUESTS = 500, 4000
ROWS = (1, 2, 4, 8, 16, 32, 64)  # of the steps with and without graphs
_CONTEXT = 256
# Constants that are doubled and halved; shares stay at 1 at most.
_VARIED = tuple(field.name for field in dataclasses.fields(Reached))


class Published(NamedTuple):
    """Tokens a second of one request that somebody has measured, at a context of 128."""

    model: str
    card: str
    ranks: int
    tokens_per_s: float
    address: str


_GPT_FAST = "https://github.com/pytorch-labs/gpt-fast"
_SGLANG = "https://github.com/sgl-project/sglang/issues/2271"
PUBLISHED = (
    Published("llama-2-7b", "a100-80gb", 1, 104.9, _GPT_FAST),
    Published("llama-2-7b", "a100-80gb", 2, 168.84, _GPT_FAST),
    Published("llama-2-7b", "a100-80gb", 4, 254.02, _GPT_FAST),
    Published("llama-2-7b", "a100-80gb", 8, 328.43, _GPT_FAST),
    Published("llama-2-70b", "a100-80gb", 4, 38.01, _GPT_FAST),
    Published("llama-2-70b", "a100-80gb", 8, 62.5, _GPT_FAST),
    Published("llama-3.1-8b", "h100-80gb", 1, 147.0, _SGLANG),
)


class Lengths(NamedTuple):
    """Of requests: mean tokens of prompt and answer. spread: "equal", "uniform" (half to one and a
    half of the mean), "exponential", or "full" (prompts as uniform, answers to `most` in all).
    most: of prompt and answer together."""

    prompt: int
    output: int
    spread: str
    most: int


class Setup(NamedTuple):
    """reserved: tokens of a contiguous place; ranks: cards of an engine; requests: how many."""

    name: str
    model: str
    lengths: Lengths
    reserved: int
    ranks: int
    requests: int = REQUESTS


SHORT = Lengths(128, 128, "exponential", 2048)
BASE = Setup("256 tokens", "llama-13b", SHORT, 2048, 8)
SETUPS = (
    BASE,
    BASE._replace(name="256 tokens, eight engines", ranks=1),
    BASE._replace(name="256 tokens, four engines of two cards", ranks=2),
    BASE._replace(name="256 tokens, uniform", lengths=SHORT._replace(spread="uniform")),
    BASE._replace(name="256 tokens, all equal", lengths=SHORT._replace(spread="equal")),
    BASE._replace(name="256 tokens, places of 1,024", reserved=1024,
                  lengths=SHORT._replace(most=1024)),
    BASE._replace(name="256 tokens, places of 512", reserved=512, lengths=SHORT._replace(most=512)),
    Setup("4,096 tokens", "llama-2-13b", Lengths(2700, 1396, "full", 4096), 4096, 8, 2000),
    Setup("up to 4,096 tokens", "llama-2-13b", Lengths(1024, 512, "exponential", 4096), 4096, 8,
          2000),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    args = parser.parse_args()
    configure("error")
    rows = [
        *(_setup(setup) for setup in SETUPS), *_graphs(), *_published(), *_sensitivity()
    ]  # fmt: skip
    for values in rows if args.save else ():
        save(values)
    parts = {
        "setup": _SETUP, "graphs": _GRAPHS, "published": _PUBLISHED_ROW, "constant": _CONSTANT,
    }  # fmt: skip
    for part, lines in parts.items():
        of = [values for values in rows if values["part"] == part]
        print(table(lines, [[_cell(values[name]) for name in lines] for values in of]) + "\n")
    print(json.dumps({values["name"]: values["throughput"] for values in rows[: len(SETUPS)]}))
    return 0


_SETUP = ("name", "throughput", "latency", "concurrency", "static_tokens_per_s",
          "paged_tokens_per_s", "static_latency_s", "paged_latency_s", "static_running",
          "paged_running", "static_use", "paged_use", "static_card_use", "paged_card_use",
          "places", "paged_capacity", "same_load_latency")  # fmt: skip
_GRAPHS = ("name", "rows", "eager_ms", "captured_ms", "speed_up")
_PUBLISHED_ROW = ("name", "published", "model_says", "error", "address")
_CONSTANT = ("name", "factor", "throughput", "latency", "graphs_1", "graphs_64")


def jobs(lengths: Lengths, count: int, rate: float = 0.0) -> list[Job]:
    """rate: a second, as a Poisson process; 0: all are there from the start, and how many are sent
    at once is up to the clients."""
    draw = np.random.default_rng(0)
    prompts, outputs = (_draw(draw, mean, lengths, count) for mean in lengths[:2])
    if lengths.spread == "full":
        outputs = [lengths.most] * count
    gaps = draw.exponential(1 / rate, count) if rate else np.zeros(count)
    return [
        Job(float(at), prompt, min(output, lengths.most - prompt))
        for at, prompt, output in zip(np.cumsum(gaps), prompts, outputs, strict=True)
    ]


def _draw(draw: np.random.Generator, mean: int, lengths: Lengths, count: int) -> list[int]:
    if lengths.spread == "equal":
        return [mean] * count
    found: Any
    if lengths.spread == "exponential":
        found = draw.exponential(mean, count)
    else:
        found = draw.integers(mean - mean // 2, mean + mean // 2 + 1, count)
    return [int(min(max(length, 4), lengths.most - 4)) for length in found]


class Engine(NamedTuple):
    """One of the engines of a setup."""

    config: EngineConfig
    plan: Plan
    limits: RunnerLimits
    cost: RooflineCost


def engine(setup: Setup, reached: Reached | None = None, **options: Any) -> Engine:
    config = EngineConfig(
        model=setup.model, tensor_parallel_size=setup.ranks, max_model_len=setup.reserved,
        max_num_seqs=CLIENTS, **options,
    )  # fmt: skip
    plan = make_plan(config, target(config, CARD, None))
    return Engine(
        config, plan, limits_of(plan), roofline(config, hardware.find(CARD), plan, reached)
    )


def _run(setup: Setup, made: Engine, kind: str, works: Sequence[Job], clients: int) -> list[Record]:
    """Of each engine: the requests and clients are dealt out to them."""
    count = CARDS // setup.ranks
    records = []
    for number in range(count):
        part = list(works[number::count])
        most = (clients - number - 1) // count + 1
        scenario = Scenario(made.config, made.limits, made.cost, part, True, most)
        records.append(scenario.run_static() if kind == "static" else scenario.run())
    return records


def _figures(made: Engine, records: Sequence[Record]) -> dict[str, float]:
    """use: of the memory that requests hold, the part that holds tokens. card_use: of all memory of
    the cards, the part that holds weights or tokens."""
    busy = sum(record.busy for record in records)
    written = sum(record.held - record.unwritten for record in records)
    token_bytes = made.plan.kv_bytes / made.plan.kv_tokens
    memory = hardware.find(CARD).memory
    return {
        "tokens_per_s": round(
            sum(r.output_tokens for r in records) / max(r.ended_at for r in records), 1
        ),
        "latency_s": round(statistics.fmean(t for r in records for t in r.latencies), 3),
        "running": round(sum(r.running for r in records) / busy * len(records), 1),
        "use": round(written / sum(record.held for record in records), 4),
        "card_use": round((made.plan.weight_bytes + written / busy * token_bytes) / memory, 4),
    }


def _compare(setup: Setup, made: Engine, works: Sequence[Job], clients: int) -> dict[str, Any]:
    """Both kinds, and what paged memory gains."""
    both = {
        kind: _figures(made, _run(setup, made, kind, works, clients))
        for kind in ("static", "paged")
    }
    static, paged = both["static"], both["paged"]
    return {
        "throughput": round(paged["tokens_per_s"] / static["tokens_per_s"], 2),
        "latency": round(paged["latency_s"] / static["latency_s"] - 1, 3),
        **{f"{kind}_{name}": value for kind, of in both.items() for name, value in of.items()},
    }


def _setup(setup: Setup) -> dict[str, Any]:
    made, works = engine(setup), jobs(setup.lengths, setup.requests)
    count = CARDS // setup.ranks
    places = count * (made.limits.kv_tokens // setup.reserved)
    held = statistics.fmean(job.prompt_len + job.output_len / 2 for job in works)
    capacity = count * int(made.limits.kv_tokens / (held + made.limits.block_size / 2))
    found = _compare(setup, made, works, CLIENTS)
    # At a load that static batching still sustains: the same requests, arriving as a process.
    each = statistics.fmean(job.output_len for job in works)
    rate = 0.8 * found["static_tokens_per_s"] / each
    arriving = jobs(setup.lengths, setup.requests, rate)
    open_ = _compare(setup, made, arriving, setup.requests)
    return row(
        "mission", part="setup", name=setup.name, model=setup.model, ranks=setup.ranks,
        engines=count, lengths=setup.lengths._asdict(), reserved=setup.reserved, places=places,
        paged_capacity=capacity, concurrency=round(capacity / places, 2), **found,
        same_load_rate=round(rate, 2), same_load_latency=open_["latency"],
        same_load_static_latency_s=open_["static_latency_s"],
        same_load_paged_latency_s=open_["paged_latency_s"],
    )  # fmt: skip


def _graphs(reached: Reached | None = None) -> Iterator[dict[str, Any]]:
    """A decode step with and without graphs."""
    for ranks in (1, 8):
        setup = BASE._replace(ranks=ranks)
        captured, eager = (engine(setup, reached, enforce_eager=off).cost for off in (False, True))
        for rows in ROWS:
            shape = StepShape(rows, rows, rows * _CONTEXT, 0, 0, rows, True, 0)
            with_, without = captured.seconds(shape), eager.seconds(shape)
            yield row(
                "mission", part="graphs", name=f"{ranks} card{'s' * (ranks > 1)}", ranks=ranks,
                rows=rows, eager_ms=round(1e3 * without, 3), captured_ms=round(1e3 * with_, 3),
                speed_up=round(without / with_, 3),
            )  # fmt: skip


def _published() -> Iterator[dict[str, Any]]:
    """What the model says of steps that others have measured."""
    for one in PUBLISHED:
        config = EngineConfig(model=one.model, tensor_parallel_size=one.ranks)
        plan = make_plan(config, target(config, one.card, None))
        cost = roofline(config, hardware.find(one.card), plan)
        found = 1 / cost.seconds(StepShape(1, 1, 128, 0, 0, 1, True, 0))
        yield row(
            "mission", part="published", name=f"{one.model} on {one.ranks} x {one.card}",
            published=one.tokens_per_s, model_says=round(found, 1),
            error=round(found / one.tokens_per_s - 1, 3), address=one.address,
        )  # fmt: skip


def _sensitivity() -> Iterator[dict[str, Any]]:
    """The figures of the first setup with one constant changed."""
    works = jobs(BASE.lengths, REQUESTS // 4)
    for name in ("none", *_VARIED):
        for factor in (0.5, 2.0) if name != "none" else (1.0,):
            reached = Reached()
            if name != "none":
                value = factor * getattr(reached, name)
                if value > 1:
                    value = 1.0
                reached = dataclasses.replace(reached, **{name: value})
            found = _compare(BASE, engine(BASE, reached), works, CLIENTS)
            gains = {
                values["rows"]: values["speed_up"]
                for values in _graphs(reached)
                if values["ranks"] == BASE.ranks
            }
            yield row(
                "mission", part="constant", name=name, factor=factor,
                value=getattr(reached, name, None), graphs_1=gains[1], graphs_64=gains[64], **found,
            )  # fmt: skip


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
