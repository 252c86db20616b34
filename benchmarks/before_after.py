"""Compares this checkout with another one: answers equal to the bit, and the speed of each.

    python -m benchmarks.before_after --before DIR [--workloads W1,W2,W3,W4] [--reps 3]
        [--engine octavo] [--start-reps 7] [--skip-answers | --skip-speed] [--save]

DIR is a checkout of an earlier commit (`git worktree add DIR COMMIT`). Answers: the hashes of
`benchmarks.answers` in every mode, on this processor and restricted to AVX2. Speed: one engine
process of each checkout, alternating repetitions, the idle one stopped; and the start to the first
token, alternating. With --save each comparison becomes a row in benchmarks/results/. The last line
is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import answers
from benchmarks.engines import ENGINES, model_file
from benchmarks.processes import ROOT, EngineProcess
from benchmarks.rows import row, save, table
from benchmarks.workloads import WORKLOADS

_AVX2 = ENGINES["octavo-avx2"].environment
_AVX2_MODES = ("float32", "bfloat16", "int8", "int4", "bfloat16-kv-int8")


def main() -> int:
    args = _arguments()
    before = args.before.resolve()
    rows: list[dict[str, Any]] = []
    if not args.skip_answers:
        rows += [_answers(before, "native", {}, list(answers.MODES))]
        rows += [_answers(before, "AVX2", _AVX2, list(_AVX2_MODES))]
    if not args.skip_speed:
        if args.workloads != [""]:
            rows += _speed(before, args.engine, args.workloads, args.reps)
        rows.append(_start(before, args.start_reps))
    for values in rows if args.save else ():
        save(values)
    print(table(("comparison", "before", "after", "ratio"), [_line(values) for values in rows]))
    print(json.dumps({values["what"]: values["ratio"] for values in rows}))
    return 0 if all(values.get("same", True) for values in rows) else 1


def _arguments() -> argparse.Namespace:
    words = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--engine", default="octavo", help="an Octavo engine of the benchmarks")
    parser.add_argument("--workloads", type=words, default=list(WORKLOADS))
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--skip-answers", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--start-reps", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    return parser.parse_args()


def _answers(
    before: Path, held_to: str, environment: dict[str, str], modes: list[str]
) -> dict[str, Any]:
    """Hashes of both checkouts. The script is this checkout's: it needs the public API alone."""
    found = [_hashes(root, environment, modes) for root in (before, ROOT)]
    differing = [mode for mode in modes if found[0].get(mode) != found[1].get(mode)]
    return _row(
        before, f"answers, {held_to}", len(modes), len(modes) - len(differing),
        same=not differing, differing=differing,
        hashes_before=found[0], hashes=found[1],
    )  # fmt: skip


def _hashes(root: Path, environment: dict[str, str], modes: list[str]) -> dict[str, str]:
    command = [sys.executable, str(Path(answers.__file__)), "--modes", ",".join(modes)]
    sources = {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        command,
        env={**os.environ, **environment, **sources},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _speed(before: Path, engine: str, workloads: list[str], reps: int) -> list[dict[str, Any]]:
    """A row per workload: seconds of both, repetitions in turn, the first of each not counted."""
    spec = ENGINES[engine]
    options = {"model": str(model_file("smollm2")), **spec.options}
    module = f"benchmarks.peers.{spec.module}"
    engines = []
    for name, root in (("before", before), ("after", ROOT)):
        engines.append(
            EngineProcess(name, module, options, environment=spec.environment, root=root)
        )
        engines[-1].pause()
    rows = []
    try:
        for workload in workloads:
            walls: list[list[float]] = [[], []]
            for repetition in range(reps + 1):
                order = (0, 1) if repetition % 2 else (1, 0)  # neither is always the second
                for which in order:
                    engines[which].resume()
                    seconds = engines[which].run(WORKLOADS[workload](repetition))["wall_s"]
                    engines[which].pause()
                    if repetition:
                        walls[which].append(round(seconds, 3))
                    _say(f"{workload} {engines[which].name}: {seconds:.2f} s")
            rows.append(_timed(before, f"{workload}, {engine}", walls))
    finally:
        for process in engines:
            process.close()
    return rows


def _start(before: Path, reps: int) -> dict[str, Any]:
    """Process start to first token, kernels compiled before, in turn."""
    model, walls = model_file("smollm2"), [[], []]  # type: ignore[var-annotated]
    for repetition in range(reps + 1):
        for which, root in enumerate((before, ROOT)):
            command = [sys.executable, "-m", "benchmarks.first_token", str(model)]
            # As in benchmarks.startup: users' Pythons keep byte code, whatever this one does.
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
            environment["PYTHONPATH"] = str(root / "src")
            done = subprocess.run(
                command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            if repetition:
                walls[which].append(float(done.stdout))
    return _timed(before, "start to first token, warm", walls)


def _timed(before: Path, what: str, walls: list[list[float]]) -> dict[str, Any]:
    pairs = [round(old / new, 3) for old, new in zip(*walls, strict=True)]
    old, new = (statistics.median(seconds) for seconds in walls)
    _say(f"{what}: {old:.2f} s before, {new:.2f} s after; pairs {pairs}")
    return _row(before, what, old, new, before_s=walls[0], after_s=walls[1], pair_ratios=pairs)


def _row(before: Path, what: str, old: float, new: float, **more: Any) -> dict[str, Any]:
    """ratio: speed of this checkout over the other's; of answers, the share that is the same."""
    ratio = round(new / old if what.startswith("answers") else old / new, 3)
    command = ["git", "-C", str(before), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return row(
        "before_after", what=what, before_commit=done.stdout.strip(), before=round(old, 3),
        after=round(new, 3), ratio=ratio, **more,
    )  # fmt: skip


def _line(values: dict[str, Any]) -> list[str]:
    return [values["what"], f"{values['before']:g}", f"{values['after']:g}", f"{values['ratio']}x"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
