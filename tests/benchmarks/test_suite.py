"""The suite: what its parts name exists, figures are of one run, failures are told and no end."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks.engines import ENGINES
from benchmarks.processes import PeerError
from benchmarks.suite import FIGURES, PARTS, START, Part
from benchmarks.suite_report import Figure, engines_chart, filled, newest, outcome, ratios_chart
from benchmarks.workloads import WORKLOADS, Job

from benchmarks import charts, suite, suite_report
from octavo.utils.charts import Bars

FACTS = {"build": "thing 1.2", "commit": "1", "run": "r", "device": "CPU", "cores": 2,
         "date": "2026-12-01T00:00:00+00:00", "version": "0", "command": "c", "features": [],
         "peak_rss_mb": 9, "startup_s": 1.0}  # fmt: skip


def row(part: str, engine: str, workload: str, *walls: float, **more: Any) -> dict[str, Any]:
    middle = sorted(walls)[len(walls) // 2]
    return {"part": part, "model": "m", "engine": engine, "workload": workload, **FACTS,
            "walls_s": list(walls), "wall_s": middle, "output_tokens": 128,
            **more}  # fmt: skip


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_names_what_there_is(part: Part) -> None:
    assert set(part.engines) <= set(ENGINES)
    assert set(part.works) <= {*WORKLOADS, START}
    assert set(part.options) <= set(part.engines)
    for figure in part.figures:
        assert {figure.ours, *figure.theirs} <= set(part.works[figure.workload])
    assert len({figure.what + figure.against for figure in part.figures}) == len(part.figures)


def test_the_best_of_the_others_counts_and_repetitions_are_compared_in_pairs() -> None:
    figure = Figure("w", "x", "W2", "a", ("b", "c", "none"), 1.5)
    rows = [row("p", "a", "W2", 2.0, 1.0, 4.0), row("p", "b", "W2", 9.0),
            row("p", "c", "W2", 4.0, 3.0)]  # fmt: skip
    found = outcome(figure, rows)
    assert found
    assert (found.value, found.low, found.high) == (2.0, 0.75, 4.0)
    assert found.reached
    assert str(found) == "2.00 (0.75 to 4.00)"
    assert outcome(figure, rows[1:]) is None
    assert outcome(figure, [rows[0], {**rows[1], "failed": "why"}]) is None


def test_a_start_is_a_difference_and_a_limit_a_share() -> None:
    rows = [row("p", "a", START, 3.0, 3.5), row("p", "b", START, 1.5, 1.7)]
    found = outcome(Figure("w", "x", START, "a", ("b",), 1.5, "start"), rows)
    assert found
    assert (found.value, found.reached) == (pytest.approx(1.8), False)
    limit = Figure("w", "x", "W2", "a", (), 0.8, "limit")
    # 127 tokens in 12.7 s beside the first one's; 2.4 GB at 30 GB/s are 80 ms.
    rows = [
        row("p", "a", "W7", 0.3),
        row("p", "a", "W2", 13.0, read_bytes=2.4e9, read_gb_s=[29, 30]),
    ]
    found = outcome(limit, rows)
    assert found
    assert found.value == pytest.approx(0.8)
    assert found.ours == "100.0 ms a token"


def test_of_each_part_the_last_run_counts() -> None:
    rows = [row("p", "a", "W2", 1.0, run="1"), row("q", "a", "W2", 1.0, run="2"),
            row("p", "b", "W2", 1.0, run="3")]  # fmt: skip
    assert [(made["part"], made["run"]) for made in newest(rows)] == [("q", "2"), ("p", "3")]


class Stub:
    """An engine's process that answers at once; `fails` on a workload."""

    def __init__(self, name: str) -> None:
        self.name, self.startup_s, self.facts = name, 1.0, {"build": "stub 1.0"}

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...

    def run(self, jobs: list[Job]) -> dict[str, Any]:
        if self.name == "fails":
            raise PeerError("fails: /a/folder/of this/machine/file.gguf is missing")
        assert all(len(job.prompt) <= 24 and job.max_tokens <= 4 for job in jobs), "not a toy"
        tokens = sum(job.max_tokens for job in jobs)
        return {"wall_s": 2.0, "output_tokens": tokens, "latency_s": [], "in_flight": None,
                "kv": {}, "cores": 1.0, "other_cores": 0.0, "peak_rss_mb": 1}  # fmt: skip


def test_one_that_fails_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, *rest: Any, **options: Any) -> Stub:
        if name == "absent":
            raise PeerError("absent cannot be prepared: no such package")
        assert options == ({"kv_gib": 1} if name == "good" else {})
        return Stub(name)

    monkeypatch.setattr(suite, "start", start)
    monkeypatch.setattr("benchmarks.run.start", start)
    monkeypatch.setattr(suite, "model_file", lambda name: Path("m.gguf"))
    names = {"good": 3, "fails": 3, "absent": 1}
    part = Part("p", "m", {"W6": names, "W7": {"good": 1}}, 1, (), {"good": {"kv_gib": 1}})
    rows = suite.run_part(part, toy=True)
    assert [(made["engine"], made["workload"]) for made in rows if "failed" not in made] == [
        ("good", "W6"), ("good", "W7"),
    ]  # fmt: skip
    told = {made["engine"]: made["failed"] for made in rows if "failed" in made}
    assert set(told) == {"fails", "absent"}
    assert "/a/folder" not in told["fails"]
    starts = Part("q", "m", {START: {"good": 2, "absent": 2}}, 1, (), {"good": {"kv_gib": 1}})
    made = suite.run_part(starts)
    assert [len(values["walls_s"]) for values in made if "failed" not in values] == [2]


def test_pages_get_their_tables_and_keep_the_rest() -> None:
    begin, end = suite_report._BEGIN.format("benchmarks/suite.py", "figures"), suite_report._END
    page = f"before\n\n{begin}\n\nold | \\1\n\n{end}\n\nafter\n"
    assert (
        filled(page, {"figures": r"new \1"}) == f"before\n\n{begin}\n\nnew \\1\n\n{end}\n\nafter\n"
    )
    assert filled("no place", {"figures": "x"}) == "no place"


def test_charts_and_tables_show_what_was_measured() -> None:
    part = next(part for part in PARTS if part.name == "qwen")
    ours, theirs = part.engines
    rows = [row("qwen", ours, "W2", 2.0, 2.1, 2.2), row("qwen", theirs, "W2", 3.0)]
    rows.append({**FACTS, "part": "1B", "engine": "openvino", "workload": "W6", "failed": "why"})
    (panel,) = engines_chart(rows).panels
    assert isinstance(panel, Bars)
    assert [bar.label for bar in panel.bars] == [
        "Octavo, as stored", "llama.cpp server 1.2, 8 slots (one run)",
    ]  # fmt: skip
    (ratios,) = ratios_chart(FIGURES, rows).panels
    assert isinstance(ratios, Bars)
    assert [round(bar.value or 0, 2) for bar in ratios.bars] == [1.43]
    table = suite_report.figures_table(FIGURES, rows)
    assert "| **1.43 (1.36 to 1.50)** | 1.3 |" in table
    assert "1B: openvino failed: why" in table


def test_the_pages_have_places_and_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = suite_report._ROOT
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/performance.md"):
        (tmp_path / page).write_text((root / page).read_text())
    monkeypatch.setattr(suite_report, "_ROOT", tmp_path)
    monkeypatch.setattr(charts, "CHARTS", tmp_path)
    part = next(part for part in PARTS if part.name == "qwen")
    ours, theirs = part.engines
    rows = [row("qwen", ours, "W2", 2.0, 2.1, 2.2), row("qwen", theirs, "W2", 3.0)]
    assert suite_report.write(FIGURES, []) == []
    assert len(suite_report.write(FIGURES, rows)) == 4
    figure = "Qwen2.5-Coder 0.5B, Q4_K_M, one stream | llama.cpp server, same file"
    assert f"| {figure} | **1.43** |" in (tmp_path / "README.md").read_text()
    performance = (tmp_path / "docs/performance.md").read_text()
    assert f"| {figure} | 2.10 s" in performance
    assert "| qwen | W2 | Octavo, as stored | 2.10 s" in performance
    assert {"compare.svg", "ratios.svg"} <= {path.name for path in tmp_path.iterdir()}
