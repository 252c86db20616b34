"""Start-up: import time, `octavo --help`, process start to first token.

    python -m benchmarks.startup [--model smollm2 ...] [--reps 7] [--llama] [--warm-only] [--save]

The first token is timed with warm caches (kernels compiled before) and with cold ones (an empty
cache folder for compiled kernels), and with --llama that of llama.cpp's server beside it, in turn.
There is a row for each model. `import torch` alone is the lower bound of a start, and
distinguishes a slow machine from a slow start. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.engines import ENGINES, model_file
from benchmarks.environments import python_of
from benchmarks.rows import row, save, table

_ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument(
        "--model", action="append", help="embedded name or .gguf file; may be repeated"
    )
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--llama", action="store_true", help="llama.cpp's server, too")
    parser.add_argument("--warm-only", action="store_true", help="no start that compiles kernels")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    args = parser.parse_args()
    bare = _seconds([sys.executable, "-c", "pass"], args.reps)
    imported = _seconds([sys.executable, "-c", "import octavo"], args.reps)
    torch = [_seconds([sys.executable, "-c", "import torch"], 1) for _ in range(args.reps)]
    command = Path(sys.executable).parent / "octavo"
    common = {
        "import_octavo_s": round(imported - bare, 3),
        "import_torch_s": round(statistics.median(torch), 2),
        "help_s": round(_seconds([str(command), "--help"], args.reps), 3),
    }
    for name in args.model or ["smollm2"]:
        _measure(name, common, args)
    return 0


def _measure(name: str, common: dict[str, float], args: argparse.Namespace) -> None:
    """The row of one model."""
    model = model_file(name)
    llama = _llama_python() if args.llama else ""
    _first_token(model, {})  # whatever was cold is warm after this
    ours, theirs = [], []
    for _ in range(max(1, args.reps // 2)):
        ours.append(_first_token(model, {}))
        if llama:
            theirs.append(_first_token(model, {}, llama, "benchmarks.llama_first_token"))
    measured: dict[str, object] = {
        "first_token_warm_s": round(statistics.median(ours), 2),
        "first_token_warm_all_s": ours,
    }
    if theirs:
        measured["llama_server_first_token_s"] = round(statistics.median(theirs), 2)
        measured["llama_server_first_token_all_s"] = theirs
    if not args.warm_only:
        measured["first_token_cold_s"] = _cold(model)
    values = row("startup", model=model.name, **common, **measured)
    if args.save:
        save(values)
    shown = [(key, value) for key, value in values.items() if key.endswith("_s")]
    print(table(("measure", "seconds"), shown))
    print(json.dumps(values))


def _llama_python() -> str:
    """The interpreter of an environment with llama.cpp's server."""
    spec = ENGINES["llama-server-file-8-slots"]
    found = python_of(f"{spec.module}-{spec.build}", spec.requirements, spec.without, spec.cmake)
    return str(found)


def _seconds(command: list[str], reps: int) -> float:
    """The fastest of several runs of a command: what it costs without other load."""
    times = []
    for _ in range(reps):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
    return min(times)


def _first_token(
    model: Path,
    environment: dict[str, str],
    python: str = sys.executable,
    module: str = "benchmarks.first_token",
) -> float:
    command = [python, "-m", module, str(model)]
    # Some build machines keep Python from keeping its byte code; users' do not.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**inherited, **environment},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return float(done.stdout.split()[-1])


def _cold(model: Path) -> float:
    with tempfile.TemporaryDirectory() as empty:
        return _first_token(model, {"OCTAVO_CACHE_DIR": empty, "NUMBA_CACHE_DIR": empty})


if __name__ == "__main__":
    sys.exit(main())
