"""`octavo simulate`: how a model would be served on a device, before either is there."""

import argparse
import copy
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.cli.plan import add_device_flags
from octavo.config import EngineConfig
from octavo.errors import ConfigError, cause, counted, nearest
from octavo.log import configure
from octavo.utils.flags import flag_name

if TYPE_CHECKING:
    from octavo.sim.cost import StepCost
    from octavo.sim.requests import Job
    from octavo.sim.scenario import Scenario

# Of `sim.workload` and `bench.report`, which a parser does without.
NAMED = ("W1", "W2", "W3", "W4")
DISTRIBUTIONS = ("uniform", "lognormal", "exponential")
METRICS = "ttft,tpot,itl,e2el"
_RANDOM = "random"
_CPU = "cpu"
_MOST_VALUES = 64  # of a sweep
# Of W1 to W4 and of traces, these say what the workload says already.
_OF_RANDOM = (
    "num_prompts", "input_len", "output_len", "length_distribution", "random_range_ratio",
    "random_prefix_len", "prefix_repetition_num_prefixes",
)  # fmt: skip
# What else a sweep may change; no flag of the engine.
_SWEPT = (*_OF_RANDOM, "request_rate", "burstiness", "max_concurrency", "seed", "workload",
          "device", "memory", "bandwidth", "flops", "link")  # fmt: skip
_Costs = dict[tuple[object, ...], "StepCost"]


class Result(NamedTuple):
    """The figures of one simulation. value: of the sweep. static: of static batching."""

    value: str
    figures: dict[str, Any]
    static: dict[str, Any] | None


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("device")
    add_device_flags(group)
    for name, unit in (("bandwidth", "GB/s"), ("flops", "TFLOPS"), ("link", "GB/s")):
        what = {"bandwidth": "of its memory", "flops": "of bfloat16 products",
                "link": "to another card, each way"}[name]  # fmt: skip
        group.add_argument(flag_name(name), type=float, metavar="NUMBER",
                           help=f"{unit}, {what} (default: of the data sheet)")  # fmt: skip
    group.add_argument("--calibration", type=Path, metavar="FILE",
                       help="cpu: measurements, saved there if it is not there yet "
                            "(default: measure now)")  # fmt: skip
    _workload_flags(parser)
    _result_flags(parser)
    add_engine_flags(parser, skip=("device", "seed"))


def _workload_flags(parser: Parser) -> None:
    group = parser.add_argument_group("requests")

    def flag(name: str, kind: type, default: object, help: str) -> None:
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(flag_name(name), type=kind, default=argparse.SUPPRESS,
                           metavar=kind.__name__.upper(), help=help + shown)  # fmt: skip

    group.add_argument("--workload", default=_RANDOM, metavar="NAME|FILE",
                       help=f"{', '.join(NAMED)}, random, or a trace: CSV or JSON lines with "
                            "arrival, prompt_tokens, output_tokens (default: random)")  # fmt: skip
    flag("num_prompts", int, 1000, "number of requests")
    flag("input_len", int, 1024, "prompt tokens, on average")
    flag("output_len", int, 128, "answer tokens, on average")
    group.add_argument("--length-distribution", choices=DISTRIBUTIONS, default=argparse.SUPPRESS,
                       help="of both lengths (default: uniform)")  # fmt: skip
    flag("random_range_ratio", float, 0.0,
         "uniform lengths are in length x (1 - ratio) to length x (1 + ratio)")  # fmt: skip
    flag("random_prefix_len", int, 0, "tokens before each prompt that others share")
    flag("prefix_repetition_num_prefixes", int, 1, "how many such prefixes there are")
    group.add_argument("--request-rate", type=float, metavar="RPS",
                       help="requests per second (default: inf, all at once)")  # fmt: skip
    group.add_argument("--burstiness", type=float, metavar="SHAPE",
                       help="1 (default): Poisson; below: bursts; above: more even")  # fmt: skip
    group.add_argument("--max-concurrency", type=int, metavar="N",
                       help="most requests in flight; others wait, untimed")  # fmt: skip
    group.add_argument("--seed", type=int, metavar="INT",
                       help="of lengths and arrivals (default: 0)")  # fmt: skip


def _result_flags(parser: Parser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--static", action="store_true", help="also simulate static batching over "
                       "contiguous memory, for comparison")  # fmt: skip
    group.add_argument("--sweep", metavar="FLAG=V,V", help="simulate once for each value of a "
                       "flag, such as max_num_seqs=64,128,256; values with commas are separated "
                       "by semicolons")  # fmt: skip
    group.add_argument("--chart", type=Path, metavar="FILE",
                       help="write a chart of the sweep, as SVG")  # fmt: skip
    group.add_argument("--json", action="store_true", help="print the figures as JSON")
    group.add_argument("--percentile-metrics", default=METRICS, metavar="NAMES",
                       help=f"metrics to report (default: {METRICS})")  # fmt: skip
    group.add_argument("--metric-percentiles", default="90,99", metavar="P,P",
                       help="their percentiles (default: 90,99)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    _metrics(args)  # raises
    name, runs = _runs(args)
    for _, values in runs:
        _config(values)
        jobs(values)
    if args.chart is not None:
        _check_chart(args.chart)
    configure("error")  # the plan says what the log of a start would
    costs: _Costs = {}
    results = [_result(value, values, costs) for value, values in runs]
    if args.json:
        print(json.dumps(_as_json(name, results), indent=2))
    else:
        print(_as_text(args, name, results))
    if args.chart is not None:
        _write_chart(args, name, results)
    return 0


def _check_chart(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"--chart {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"--chart {path} is a folder; name a file, such as chart.svg")


def _metrics(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """(names, percentiles). Raises ConfigError."""
    from octavo.bench.report import metric_names, percentile_list

    return metric_names(args.percentile_metrics), percentile_list(args.metric_percentiles)


# What to simulate.


def _runs(args: argparse.Namespace) -> tuple[str, list[tuple[str, argparse.Namespace]]]:
    """(the swept flag, its values and the arguments with each); one without a name otherwise.

    Raises ConfigError.
    """
    if args.sweep is None:
        if args.chart is not None:
            raise ConfigError("--chart shows a sweep: add --sweep, such as max_num_seqs=64,128,256")
        return "", [("", args)]
    flag, _, text = args.sweep.partition("=")
    name = flag.strip().removeprefix("--").replace("-", "_")
    known = (*_SWEPT, *(item.name for item in fields(EngineConfig) if item.name != "seed"))
    if name not in known:
        raise ConfigError(
            f"--sweep {args.sweep}: {name!r} is no flag that a sweep can change"
            f"{nearest(name, known)}"
        )
    separator = ";" if ";" in text else ","  # as values with commas in them are separated
    values = [value.strip() for value in text.split(separator) if value.strip()]
    if len(values) < 2 or len(values) > _MOST_VALUES:
        raise ConfigError(
            f"--sweep {name} has {counted(len(values), 'value')}: give 2 to {_MOST_VALUES} "
            f"values, such as {name}=64,128,256"
        )
    parser = Parser(prog="octavo simulate")
    add_arguments(parser)
    return name, [(value, _with(parser, args, name, value)) for value in values]


def _with(parser: Parser, args: argparse.Namespace, name: str, value: str) -> argparse.Namespace:
    """`args`, with another value of one flag, which is read as on the command line."""
    word = [f"{flag_name(name)}={value}"]
    if value in ("true", "false") and _is_switch(name):
        word = [flag_name(name) if value == "true" else f"--no-{name.replace('_', '-')}"]
    given = copy.copy(args)
    if name == "model":  # of which one may be given
        given.model = EngineConfig.model
    return parser.parse_args(word, given)


def _is_switch(name: str) -> bool:
    return isinstance(getattr(EngineConfig, name, None), bool)


def jobs(args: argparse.Namespace) -> "list[Job]":
    """The requests that the flags describe. Raises ConfigError."""
    from octavo.sim.workload import Shape, Traffic, named_jobs, random_jobs

    given = {name: getattr(args, name) for name in _OF_RANDOM if hasattr(args, name)}
    traffic = Traffic(
        math.inf if args.request_rate is None else args.request_rate,
        1.0 if args.burstiness is None else args.burstiness,
        args.seed or 0,
    )
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, not {args.max_concurrency}")
    if args.burstiness is not None and args.request_rate is None:
        raise ConfigError("burstiness is of arrivals over time: give request_rate, too")
    if args.workload == _RANDOM:
        count = given.pop("num_prompts", 1000)
        return random_jobs(count, Shape(**{_SHAPE[k]: v for k, v in given.items()}), traffic)
    if given:
        raise ConfigError(
            f"{flag_name(next(iter(given)))} is for random workloads; {args.workload} says so "
            "itself: leave out --workload, or the flag"
        )
    if args.workload in NAMED:
        return named_jobs(args.workload, traffic)
    return _trace(args)


_SHAPE: Mapping[str, str] = {
    "input_len": "input_len",
    "output_len": "output_len",
    "length_distribution": "distribution",
    "random_range_ratio": "range_ratio",
    "random_prefix_len": "prefix_len",
    "prefix_repetition_num_prefixes": "num_prefixes",
}


def _trace(args: argparse.Namespace) -> "list[Job]":
    from octavo.sim.traces import read_trace

    path = Path(args.workload)
    if not args.workload or (not path.suffix and not path.exists()):
        known = (*NAMED, _RANDOM)
        raise ConfigError(
            f"unknown workload {args.workload!r}{nearest(args.workload, known)}; there are "
            f"{', '.join(known)}, and files"
        )
    for name in ("request_rate", "burstiness", "seed"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{flag_name(name)} is not for a trace, which has arrivals itself")
    return read_trace(path)


def _config(args: argparse.Namespace) -> EngineConfig:
    given = {"model": args.model, **engine_options(args, ("model", "device", "seed"))}
    config = EngineConfig.from_options(given)
    if config.trace is not None:
        raise ConfigError("trace is written by an engine that runs; leave it out of a simulation")
    return config


# Simulating.


def _result(value: str, args: argparse.Namespace, costs: _Costs) -> Result:
    from octavo.sim.report import TABLE_PERCENTILES, figures

    names, wanted = _metrics(args)
    if value:
        names = tuple(METRICS.split(","))
        wanted = tuple(dict.fromkeys((*wanted, *TABLE_PERCENTILES)))
    found = scenario(args, costs)
    static = figures(found.run_static(), names, wanted) if args.static else None
    return Result(value, figures(found.run(), names, wanted), static)


def scenario(args: argparse.Namespace, costs: _Costs) -> "Scenario":
    """What the flags describe. costs: those that were measured before, by what they depend on."""
    # Imported late: wrong flags are reported without torch.
    from octavo.planner.plan import make_plan
    from octavo.planner.target import target
    from octavo.sim.devices import SETTINGS, Rates, step_cost
    from octavo.sim.scenario import Scenario, limits_of

    rates = Rates(args.bandwidth, args.flops, args.link)
    config = _config(args)
    on = target(config, args.device, args.memory)
    device = _device(args.device, on.device.name)
    plan = make_plan(config, on)
    given = ("model", "dtype", "kv_cache_dtype", *SETTINGS)
    key = (device, *(getattr(config, name) for name in given))
    cost = costs.get(key) if device == _CPU else None
    if cost is None:
        cost = costs[key] = step_cost(config, device, plan, rates, args.calibration)
    return Scenario(config, limits_of(plan), cost, jobs(args), device != _CPU, args.max_concurrency)


def _device(asked: str, found: str) -> str:
    """The device whose time of steps is modelled."""
    if asked not in ("auto", _CPU, "cuda"):
        return asked
    if found != _CPU:
        raise ConfigError(
            f"--device {asked} is a GPU of this machine; name its card, such as --device h100-80gb"
        )
    return _CPU


# Results.


def _as_json(name: str, results: Sequence[Result]) -> dict[str, Any]:
    rows = [
        {**result.figures, **({"static": result.static} if result.static else {})}
        for result in results
    ]
    if not name:
        return rows[0]
    return {
        "sweep": name,
        "runs": [{"value": r.value, **row} for r, row in zip(results, rows, strict=True)],
    }


def _as_text(args: argparse.Namespace, name: str, results: Sequence[Result]) -> str:
    from octavo.sim.report import sweep_table, table

    if name:
        rows = [(result.value, result.figures) for result in results]
        static = [(f"{r.value}, static", r.static) for r in results if r.static is not None]
        both = [row for pair in zip(rows, static, strict=True) for row in pair] if static else rows
        return f"{sweep_table(name, both)}\n(latencies in milliseconds)"
    names, wanted = _metrics(args)
    parts = [table("Simulated Result", results[0].figures, names, wanted)]
    if (static_figures := results[0].static) is not None:
        parts.append(table("Static Batching", static_figures, names, wanted))
    return "\n\n".join(parts)


def _write_chart(args: argparse.Namespace, name: str, results: Sequence[Result]) -> None:
    from octavo.sim.report import sweep_chart
    from octavo.utils.charts import svg

    rows = [(result.value, result.figures) for result in results]
    command = (
        f"octavo simulate {shlex.quote(args.model)} --device {args.device} --sweep {args.sweep}"
    )
    chart = sweep_chart(name, rows, f"{Path(args.model).name} on {args.device}", command)
    try:
        args.chart.write_text(svg(chart))
    except OSError as error:
        raise ConfigError(f"--chart {args.chart} cannot be written: {cause(error)}") from error
