"""Saved results: one JSON object per line in benchmarks/results/, and tables for people."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.system import facts

RESULTS = Path(__file__).parent / "results"


def row(kind: str, **values: Any) -> dict[str, Any]:
    """A row: what was measured, then where and with what."""
    return {"kind": kind, **values, **facts()}


def save(values: dict[str, Any]) -> Path:
    """Append a row to the file of its kind."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{values['kind']}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")
    return path


def table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table in columns: the first flush left, the others flush right."""
    cells = [list(map(str, line)) for line in (header, *lines)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    shown = [cells[0], rule, *cells[1:]]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in shown
    )


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` of all are at or below (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))]
