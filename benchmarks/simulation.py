"""Is the simulation right? The real engine on this processor, and the simulation of it.

    python -m benchmarks.simulation [--model smollm2] [--cases W1,W2,arrivals-1.0] [--save]
    python -m benchmarks.simulation --table

For each case: the machine is calibrated (ten seconds), the engine runs the case, the machine is
measured again, and the simulation runs the case with what both measurements give: other users of
the machine make it faster or slower from minute to minute. Rows also have the error by the first of
them alone. Cases are W1 to W4 (`benchmarks.workloads`), the first
requests of one (W1/16), and arrivals-R: requests with the lengths of W1 that arrive over 20
seconds as a Poisson process of R a second. Run it several times; --table shows, over the saved rows
of each case, the medians and the error of the prediction.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.processes import machine_seconds
from benchmarks.rows import RESULTS, row, save, table
from benchmarks.workloads import WORKLOADS
from benchmarks.workloads import Job as Work
from octavo.config import EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.engine.executor import Executor, create_executor
from octavo.log import configure
from octavo.params import SamplingParams
from octavo.sim.calibrated import CalibratedCost, Terms
from octavo.sim.calibration import Sample, calibration_of, sample
from octavo.sim.requests import Job
from octavo.sim.simulation import Simulation

CASES = ("W1", "W2", "W3", "W4", "arrivals-1.0", "arrivals-2.0")
FIGURES = ("tokens_per_s", "latency_s", "ttft_s", "itl_s")
_SECONDS = 20.0  # of arrivals
_SHARED = 512  # tokens of W3's prompts
_MOST_OTHERS = 0.1  # processors that others use during a run that counts


class Arrival(NamedTuple):
    """A request, and when it comes."""

    at: float
    work: Work
    shared: int = 0


class Figures(NamedTuple):
    """Output tokens per second; means of latency, time to first token and between tokens."""

    tokens_per_s: float
    latency_s: float
    ttft_s: float
    itl_s: float


def main() -> int:
    args = _arguments()
    if args.table:
        print(_table(_saved()))
        return 0
    configure("error")
    # As in the comparison (`benchmarks.engines`).
    config = EngineConfig(
        model=args.model, dtype="bfloat16", kv_cache_memory_bytes=1 << 30, max_num_seqs=64,
        max_model_len=4096, load_progress=False,
    )  # fmt: skip
    executor = create_executor(config)
    rows = []
    try:
        before = sample(executor, config)
        for name in args.cases:
            requests = arrivals(name, args.rep)
            used, began = _others(), time.perf_counter()
            measured = _measured(config, executor, requests)
            others = (_others() - used) / (time.perf_counter() - began)
            after = sample(executor, config)
            values = _row(name, config, requests, measured, (before, after), executor)
            values["other_cores"] = round(others, 3)
            rows.append(values)
            before = after
            if args.save:
                save(values)
    finally:
        executor.close()
    print(_table(rows))
    print(json.dumps({values["case"]: values["error"] for values in rows}))
    return 0


def _arguments() -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    parser.add_argument("--cases", type=words, default=list(CASES))
    parser.add_argument("--rep", type=int, default=0, help="which repetition: new tokens, arrivals")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    parser.add_argument("--table", action="store_true", help="medians of saved rows; runs nothing")
    return parser.parse_args()


def arrivals(name: str, repetition: int) -> list[Arrival]:
    """The requests of a case, by arrival."""
    kind, _, number = name.partition("-")
    if kind == "arrivals":
        draw, at = random.Random(400 + repetition), 0.0
        found: list[Arrival] = []
        works = WORKLOADS["W1"](0)
        while at < _SECONDS:
            work = works[len(found) % len(works)]
            tokens = [draw.randrange(300, 49_000) for _ in work.prompt]
            found.append(Arrival(at, Work(tokens, work.max_tokens)))
            at += draw.expovariate(float(number))
        return found
    kind, _, number = name.partition("/")
    works = WORKLOADS[kind](repetition)
    shared = _SHARED if kind == "W3" else 0
    return [Arrival(0.0, work, shared) for work in works[: int(number) if number else None]]


def _row(
    name: str,
    config: EngineConfig,
    requests: Sequence[Arrival],
    measured: Figures,
    around: tuple[Sample, Sample],
    executor: Executor,
) -> dict[str, Any]:
    """around: what was measured before and after the run."""
    limits = executor.limits
    both, first = calibration_of(around, limits), calibration_of(around[:1], limits)
    predicted = _predicted(config, executor, both.terms, requests)
    before = _predicted(config, executor, first.terms, requests)
    values = row(
        "simulation",
        case=name,
        model=config.model,
        requests=len(requests),
        measured=_rounded(measured),
        predicted=_rounded(predicted),
        error=_errors(predicted, measured),
        error_by_the_first_calibration=_errors(before, measured),
        calibration=asdict(both),
        first_calibration=asdict(first),
    )
    print(f"{name}: {values['error']}", file=sys.stderr, flush=True)
    return values


def _others() -> float:
    """Seconds of processors that all but this process have used or taken away."""
    return machine_seconds() - time.process_time()


def _errors(predicted: Figures, measured: Figures) -> dict[str, float]:
    pairs = zip(FIGURES, predicted, measured, strict=True)
    return {name: round(expected / found - 1, 4) for name, expected, found in pairs}


def _measured(config: EngineConfig, executor: Executor, requests: Sequence[Arrival]) -> Figures:
    """Of the real engine, which is stepped while it has work."""
    engine = Engine(config, executor, create_policy(config.scheduler))
    times: dict[str, list[float]] = {}
    waiting = list(enumerate(requests))[::-1]
    began = engine.clock()
    while waiting or engine.has_work():
        now = engine.clock() - began
        while waiting and waiting[-1][1].at <= now:
            number, request = waiting.pop()
            params = SamplingParams(
                temperature=0.0, max_tokens=request.work.max_tokens, ignore_eos=True
            )
            prompt = tuple(request.work.prompt)
            engine.add_request(
                Submission(f"{number}", prompt, params, arrival_time=began + request.at)
            )
            times[f"{number}"] = []
        if not engine.has_work():
            time.sleep(max(0.0, waiting[-1][1].at - now))
            continue
        updates = engine.step()
        now = engine.clock() - began
        for update in updates:
            times[update.request_id] += [now] * len(update.token_ids)
    engine.reset_prefix_cache()
    return _figures([times[f"{number}"] for number in range(len(requests))], requests)


def _figures(times: Sequence[Sequence[float]], requests: Sequence[Arrival]) -> Figures:
    """times: of each request's tokens."""
    gaps = sum(each[-1] - each[0] for each in times)
    return Figures(
        sum(map(len, times)) / max(each[-1] for each in times),
        statistics.fmean(e[-1] - r.at for e, r in zip(times, requests, strict=True)),
        statistics.fmean(e[0] - r.at for e, r in zip(times, requests, strict=True)),
        gaps / sum(len(each) - 1 for each in times),
    )


def _predicted(
    config: EngineConfig,
    executor: Executor,
    terms: Terms,
    requests: Sequence[Arrival],
) -> Figures:
    """Of the simulation."""
    jobs = [
        Job(r.at, len(r.work.prompt), r.work.max_tokens, group=int(r.shared > 0), shared=r.shared)
        for r in requests
    ]
    cost = CalibratedCost(terms)
    policy = create_policy(config.scheduler)
    record = Simulation(config, executor.limits, policy, cost, jobs).run()
    gaps = sum(gap * count for gap, count in zip(record.gaps, record.gap_counts, strict=True))
    return Figures(
        record.output_tokens / record.ended_at,
        statistics.fmean(record.latencies),
        statistics.fmean(record.firsts),
        gaps / sum(record.gap_counts),
    )


def _rounded(figures: Figures) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures._asdict().items()}


def _saved() -> list[dict[str, Any]]:
    path = RESULTS / "simulation.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the rows of a case, and the range of the errors of single runs. Without runs
    during which others used more than a tenth of a processor."""
    rows = [values for values in rows if values.get("other_cores", 0.0) <= _MOST_OTHERS]
    header = ["model, case", "runs"]
    for figure in FIGURES:
        header += [figure, "predicted", "error", "single runs"]
    cases = dict.fromkeys((values["model"], values["case"]) for values in rows)
    lines = []
    for model, case in cases:
        of = [values for values in rows if (values["model"], values["case"]) == (model, case)]
        line = [f"{model} {case}", str(len(of))]
        for figure in FIGURES:
            measured, predicted = (
                statistics.median(values[kind][figure] for values in of)
                for kind in ("measured", "predicted")
            )
            errors = [values["error"][figure] for values in of]
            line += [f"{measured:.4g}", f"{predicted:.4g}", f"{statistics.median(errors):+.0%}",
                     f"{min(errors):+.0%} to {max(errors):+.0%}"]  # fmt: skip
        lines.append(line)
    return table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
