"""What is right, and how fast it is, on one NVIDIA GPU: one command, without a network.

    python -m benchmarks.gpu [--out FOLDER] [--limit 450] [--sections kernels,tokens] [--dry]

Sections run in the order of their value, each in a process of its own, so that one that fails ends
no other: kernels against references; the engine's tokens against those of its own CPU engine; CUDA
graphs by batch size; the host's time of a step that the GPU does not hide; decode and prefill of
8B, 1B and 13B shapes against the card's own limits; paged continuous batching against contiguous
static batching. Weights are random. Each result is on the disk, in FOLDER/gpu_check.jsonl, before
the next one is measured; what is left when the limit is over is not begun. --dry runs all of it on
a CPU, in Triton's interpreter, in tiny shapes.

Needed beside torch for CUDA: Triton, NumPy, numba, safetensors, tokenizers, jinja2, tqdm, PyYAML,
huggingface_hub, msgspec. docs/gpu.md says how to read the rows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

Processes = list["subprocess.Popen[str]"]

_ROOT = Path(__file__).parents[2]
# Seconds that each section may take at most on a GPU.
SECTIONS = {
    "kernels": 120,
    "tokens": 110,
    "graphs": 80,
    "overlap": 60,
    "speed": 150,
    "batching": 90,
}
# Processes in which kernels are compared, since most of the time goes into compiling them.
_PARTS = 8
# Of `models.AHEAD`, which needs torch.
_AHEAD = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--limit", type=float, default=450.0, help="seconds for all sections")
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="which of them, and in order"
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, in tiny shapes")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # in the process of a section
    parser.add_argument("--part", default="0/1", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.section:
        return 0 if _section(args.section, args.part, args.out, args.limit, args.dry) else 1
    wanted = args.sections.split(",")
    if unknown := [name for name in wanted if name not in SECTIONS]:
        parser.error(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    return _all(wanted, args.out, args.limit, args.dry)


def _all(wanted: list[str], out: Path, limit: float, dry: bool) -> int:
    end = time.monotonic() + limit
    results: dict[str, str] = {}
    ahead = [] if dry else _started("compile", out, limit, dry, _AHEAD)
    for name in wanted:
        if name in ("graphs", "overlap", "speed", "batching"):  # which measure time
            _ended(ahead, end)
            ahead = []
        left = end - time.monotonic()
        seconds = left if dry else min(SECTIONS[name], left)
        began = time.monotonic()
        if seconds > 5:
            parts = _PARTS if name == "kernels" and not dry else 1
            results[name] = _ended(_started(name, out, seconds - 3, dry, parts), began + seconds)
        else:
            results[name] = "not begun: out of time"
        line = {"section": name, "result": results[name], "wall_s": time.monotonic() - began}
        with (out / "gpu_check.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    _ended(ahead, time.monotonic())
    print("; ".join(f"{name}: {result}" for name, result in results.items()))
    return 0 if all(result == "ok" for result in results.values()) else 1


def _started(name: str, out: Path, limit: float, dry: bool, parts: int) -> Processes:
    """The processes of a section."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_ROOT), str(_ROOT / "src"), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, "--out", str(out),
               "--limit", str(limit)]  # fmt: skip
    if dry:
        command.append("--dry")
        environment["TRITON_INTERPRET"] = "1"
    return [
        subprocess.Popen([*command, "--part", f"{part}/{parts}"], cwd=_ROOT, env=environment,
                         stderr=subprocess.PIPE, text=True)
        for part in range(parts)
    ]  # fmt: skip


def _ended(processes: Processes, end: float) -> str:
    """Waits for them, to the end at most; "ok" if all have succeeded."""
    result = "ok"
    for process in processes:
        try:
            _, said = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            result = "ended: it took too long"
            continue
        if process.returncode:
            result = f"failed ({process.returncode}): {said.strip()[-1500:]}"
    return result


def _section(name: str, part_of: str, out: Path, limit: float, dry: bool) -> bool:
    from benchmarks.gpu import batching, graphs, kernels, models, overlap, speed, tokens
    from benchmarks.gpu.section import Rows, Scale

    scale = Scale(dry, time.monotonic() + limit)
    rows = Rows(out / "gpu_check.jsonl", name)
    part, parts = map(int, part_of.split("/"))
    if name == "kernels":
        return kernels.run(scale, rows, part, parts)
    sections = {"tokens": tokens.run, "graphs": graphs.run, "overlap": overlap.run,
                "speed": speed.run, "batching": batching.run}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="octavo-gpu-") as folder:
        if name == "compile":
            models.compile_ahead(Path(folder), scale, part)
            return True
        return sections[name](scale, rows, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
