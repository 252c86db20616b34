"""Workloads W1 to W4 on several engines, side by side.

    python -m benchmarks.run [--engines octavo,static-16] [--workloads W1,W2] [--reps 3] [--save]

Each engine has its own process. Repetitions alternate between the engines, so that a machine that
becomes slower affects all of them; idle engines are stopped. The table shows the median of the
repetitions, its spread, and the speedup of the first engine. With
--save each (engine, workload) becomes a row in benchmarks/results/. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.engines import ENGINES, model_file, start
from benchmarks.processes import EngineProcess, PeerError
from benchmarks.rows import percentile, row, save, table
from benchmarks.workloads import WORKLOADS, Job
from octavo.errors import OctavoError


def main() -> int:
    rows, _ = measure(__doc__, ["octavo", "static-16"])
    print(json.dumps(_summary(rows)))
    return 0 if rows else 1


def measure(
    doc: str | None, default: list[str], chart: Callable[[], Path] | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Do what the command line asks for and print the table; (rows, who was left out and why).

    chart: draws from the saved rows, after they are saved.
    """
    args = _arguments(doc, default)
    left_out: dict[str, str] = {}
    try:
        model = model_file(args.model)
    except (PeerError, OctavoError) as error:
        raise SystemExit(f"--model {args.model}: {error}") from error
    engines = start_all(args.engines, model, args.log, left_out)
    rows: list[dict[str, Any]] = []
    try:
        for workload in args.workloads:
            reps = dict.fromkeys(args.engines, args.reps)
            runs = alternate(engines, workload, WORKLOADS[workload], reps, left_out)
            new = [
                row("throughput", **measured(engine, workload, runs[engine.name]), model=model.name)
                for engine in engines
            ]
            rows += new
            for values in new if args.save else ():
                save(values)
    finally:
        for engine in engines:
            engine.close()
    print(shown(rows))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    if args.save and chart:
        say(f"chart: docs/charts/{chart().name}")
    return rows, left_out


def _arguments(doc: str | None, default: list[str]) -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=str(doc).split("\n", 1)[0])
    parser.add_argument(
        "--model", default="smollm2", help="embedded name, folder, .gguf file, or shape:1B-Q4_0"
    )
    parser.add_argument("--engines", type=words, default=default, help=", ".join(ENGINES))
    parser.add_argument(
        "--workloads", type=words, default=["W1", "W2", "W3", "W4"], help=", ".join(WORKLOADS)
    )
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--log", type=Path, help="append what the engines say to this file")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    args = parser.parse_args()
    for given, known in ((args.engines, ENGINES), (args.workloads, WORKLOADS)):
        for name in given:
            if name not in known:
                parser.error(f"{name!r} is none of {', '.join(known)}")
    return args


def start_all(
    names: Iterable[str],
    model: Path,
    log: Path | None,
    left_out: dict[str, str],
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[EngineProcess]:
    """Every engine that starts, one after the other; one that does not is left out with the reason.

    options: for some of them, beside their own.
    """
    engines = []
    for name in names:
        try:
            engine = start(name, model, log, **options.get(name, {}))
        except PeerError as error:
            left_out[name] = str(error)
            say(f"{name} is left out: {error}")
            continue
        engine.pause()
        engines.append(engine)
        say(f"{name} started in {engine.startup_s:.1f} s")
    return engines


def alternate(
    engines: list[EngineProcess],
    workload: str,
    jobs_of: Callable[[int], list[Job]],
    reps: Mapping[str, int],
    left_out: dict[str, str],
) -> dict[str, list[dict[str, Any]]]:
    """Results per engine: repetition 0 on each engine, then repetition 1 on each, ...

    reps: of each engine; one that is not named does not run. An engine that fails is closed and
    taken out of `engines`.
    """
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in engines}
    for repetition in range(max(reps.values())):
        jobs = jobs_of(repetition)
        for engine in engines.copy():
            if repetition >= reps.get(engine.name, 0):
                continue
            try:
                result = _run(engine, jobs)
            except (PeerError, OSError) as error:
                left_out[engine.name] = f"{workload}: {error}"
                say(f"{engine.name} is left out from {workload} on: {error}")
                engines.remove(engine)
                engine.close()
                continue
            runs[engine.name].append(result)
            rate = result["output_tokens"] / result["wall_s"]
            say(f"{workload} {engine.name}: {result['wall_s']:.2f} s, {rate:.1f} tokens/s")
    return runs


def _run(engine: EngineProcess, jobs: list[Job]) -> dict[str, Any]:
    engine.resume()
    try:
        return engine.run(jobs)
    finally:
        engine.pause()


def measured(engine: EngineProcess, workload: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the repetitions of a workload gave, for a row."""
    walls = [run["wall_s"] for run in runs]
    latencies = [second for run in runs for second in run["latency_s"]]
    middle = statistics.median(walls)
    timed = {}
    if latencies:
        timed = {
            "latency_mean_s": round(statistics.fmean(latencies), 3),
            "latency_p99_s": round(percentile(latencies, 0.99), 3),
        }
    return {
        "engine": engine.name,
        "workload": workload,
        "wall_s": round(middle, 3),
        "walls_s": [round(wall, 3) for wall in walls],
        "output_tokens": runs[0]["output_tokens"],
        "output_tokens_per_s": round(runs[0]["output_tokens"] / middle, 1),
        **timed,
        "in_flight": runs[-1]["in_flight"],
        "kv": runs[-1]["kv"],
        "cores_used": [run["cores"] for run in runs],
        "other_cores": [run["other_cores"] for run in runs],
        "peak_rss_mb": max(run["peak_rss_mb"] for run in runs),
        "startup_s": engine.startup_s,
        **engine.facts,
    }


def shown(rows: list[dict[str, Any]]) -> str:
    header = ("workload", "engine", "tokens/s", "seconds", "min-max", "mean latency", "P99",
              "KV use", "peak MB", "start s", "threads", "speed-up")  # fmt: skip
    first = {values["workload"]: values["wall_s"] for values in reversed(rows)}
    return table(header, [_line(values, first[values["workload"]]) for values in rows])


def _line(values: dict[str, Any], first_wall: float) -> list[str]:
    walls = values["walls_s"]
    return [
        values["workload"],
        values["engine"],
        f"{values['output_tokens_per_s']:.1f}",
        f"{values['wall_s']:.2f}",
        f"{min(walls):.2f}-{max(walls):.2f}",
        f"{values['latency_mean_s']:.2f}" if "latency_mean_s" in values else "-",
        f"{values['latency_p99_s']:.2f}" if "latency_p99_s" in values else "-",
        f"{values['kv']['use']:.1%}" if values["kv"] else "-",
        str(values["peak_rss_mb"]),
        f"{values['startup_s']:.1f}",
        str(values.get("threads", "-")),
        f"{values['wall_s'] / first_wall:.2f}x",
    ]


def _summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """workload -> engine -> output tokens per second."""
    summary: dict[str, dict[str, float]] = {}
    for values in rows:
        rate = values["output_tokens_per_s"]
        summary.setdefault(values["workload"], {})[values["engine"]] = rate
    return summary


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
