"""Start-up: import time, `octavo --help`, process start to first token.

    python -m benchmarks.startup [--model smollm2] [--reps 7] [--save]

The first token is timed with warm caches (kernels compiled before) and with cold ones (an empty
cache folder for compiled kernels). `import torch` alone is the lower bound of a start, and
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

from benchmarks.engines import model_file
from benchmarks.rows import row, save, table

_ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="save a row in benchmarks/results/")
    args = parser.parse_args()
    model = model_file(args.model)
    bare = _seconds([sys.executable, "-c", "pass"], args.reps)
    imported = _seconds([sys.executable, "-c", "import octavo"], args.reps)
    torch = [_seconds([sys.executable, "-c", "import torch"], 1) for _ in range(args.reps)]
    command = Path(sys.executable).parent / "octavo"
    _first_token(model, {})  # whatever was cold is warm after this
    warm = [_first_token(model, {}) for _ in range(max(1, args.reps // 2))]
    values = row(
        "startup",
        import_octavo_s=round(imported - bare, 3),
        import_torch_s=round(statistics.median(torch), 2),
        help_s=round(_seconds([str(command), "--help"], args.reps), 3),
        first_token_warm_s=round(statistics.median(warm), 2),
        first_token_warm_all_s=warm,
        first_token_cold_s=_cold(model),
    )
    if args.save:
        save(values)
    shown = [(key, value) for key, value in values.items() if key.endswith("_s")]
    print(table(("measure", "seconds"), shown))
    print(json.dumps(values))
    return 0


def _seconds(command: list[str], reps: int) -> float:
    """The fastest of several runs of a command: what it costs without other load."""
    times = []
    for _ in range(reps):
        begin = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begin)
    return min(times)


def _first_token(model: Path, environment: dict[str, str]) -> float:
    command = [sys.executable, "-m", "benchmarks.first_token", str(model)]
    # Some build machines keep Python from keeping its byte code; users' do not.
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        cwd=_ROOT,
        env={**inherited, **environment},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(done.stdout)


def _cold(model: Path) -> float:
    with tempfile.TemporaryDirectory() as empty:
        return _first_token(model, {"OCTAVO_CACHE_DIR": empty, "NUMBA_CACHE_DIR": empty})


if __name__ == "__main__":
    sys.exit(main())
