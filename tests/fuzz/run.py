"""`python -m tests.fuzz.run`: many cases of each kind, and how they ended.

The case that is being looked at is in the file `current` of the scratch folder, so that one which
ends the process is known.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.cases import KINDS, Bench, case
from tests.fuzz.target import memory_bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="cases of each kind")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=float, default=0, help="stop a kind after so long")
    options = parser.parse_args()
    findings = 0
    with tempfile.TemporaryDirectory(prefix="octavo-fuzz-") as scratch:
        bench = Bench(Path(scratch) / "seeds")
        current = Path(scratch) / "current"
        print(f"the case at work is in {current}", flush=True)
        with memory_bound():
            for kind in options.kinds:
                findings += run_kind(bench, current, kind, options)
    return findings > 0


def run_kind(bench: Bench, current: Path, kind: str, options: argparse.Namespace) -> int:
    """Run cases of one kind and print their outcomes. Returns the number of findings."""
    counts: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    begin = time.monotonic()
    for number in range(options.start, options.start + options.count):
        tried = case(bench, kind, number)
        current.write_text(tried.text())
        outcome = bench.judge(tried)
        counts[outcome.kind] += 1
        if outcome.kind == "finding":
            shown[outcome.text] += 1
            if shown[outcome.text] == 1:
                print(f"{kind} {number}: {outcome.text}\n    {tried.text()[:1000]}", flush=True)
        if options.seconds and time.monotonic() - begin > options.seconds:
            break
    done = sum(counts.values())
    print(
        f"{kind}: {done} cases, {counts['loads']} load, {counts['error']} are clean errors, "
        f"{counts['finding']} findings ({time.monotonic() - begin:.0f} s)",
        flush=True,
    )
    return counts["finding"]


if __name__ == "__main__":
    sys.exit(main())
