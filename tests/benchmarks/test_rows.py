"""Saved rows and tables."""

import json
from pathlib import Path

import pytest
from benchmarks.workloads import WORKLOADS

from benchmarks import rows, run, system


def test_a_row_says_when_where_and_with_what() -> None:
    row = rows.row("throughput", tokens=5)
    wanted = {"date", "version", "commit", "device", "cores", "python", "command"}
    assert wanted <= set(row)
    json.dumps(row)


def test_rows_are_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    rows.save({"kind": "x", "n": 1})
    path = rows.save({"kind": "x", "n": 2})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_command_names_no_machine_s_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run.py", "--model", "/somewhere/else/m.gguf"])
    assert "/somewhere" not in system.command_line()
    assert system.command_line().endswith("--model m.gguf")


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_percentiles_are_samples(share: float, value: int) -> None:
    assert rows.percentile(list(range(1, 101)), share) == value


def test_a_table_lines_up() -> None:
    assert rows.table(("a", "b"), [("x", 10), ("yy", 5)]) == "a    b\n--  --\nx   10\nyy   5"


def test_saved_rows_can_be_read() -> None:
    for path in rows.RESULTS.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            assert row["kind"] == path.stem
            assert {"date", "version", "commit", "device", "command"} <= set(row)


class Paused:
    """A stand-in for an engine's process: says when it ran, and refuses to run while paused."""

    def __init__(self, name: str, seconds: list[float], order: list[str]) -> None:
        self.name, self.startup_s, self.facts = name, 1.0, {"build": name}
        self._seconds, self._order, self._paused = iter(seconds), order, True

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def run(self, jobs: object) -> dict[str, object]:
        assert not self._paused
        self._order.append(self.name)
        return {"wall_s": next(self._seconds), "output_tokens": 128, "latency_s": [1.0],
                "in_flight": 1.0, "kv": {"use": 0.9}, "cores": 1.9, "other_cores": 0.0,
                "peak_rss_mb": 10}  # fmt: skip


def test_engines_take_turns_and_medians_are_reported() -> None:
    order: list[str] = []
    engines = [Paused("a", [1.0, 9.0, 2.0], order), Paused("b", [4.0, 4.0, 5.0], order)]
    runs = run.alternate(engines, "W2", WORKLOADS["W2"], {"a": 3, "b": 3}, {})  # type: ignore[arg-type]
    assert order == ["a", "b", "a", "b", "a", "b"]
    made = [run.measured(engine, "W2", runs[engine.name]) for engine in engines]  # type: ignore[arg-type]
    assert [row["wall_s"] for row in made] == [2.0, 4.0]
    assert made[0]["walls_s"] == [1.0, 9.0, 2.0]
    assert "2.00x" in run.shown(made)
    assert run._summary(made) == {"W2": {"a": 64.0, "b": 32.0}}


def test_an_engine_may_have_fewer_turns() -> None:
    order: list[str] = []
    engines = [Paused("a", [1.0] * 3, order), Paused("b", [4.0], order), Paused("c", [], order)]
    run.alternate(engines, "W7", WORKLOADS["W7"], {"a": 3, "b": 1}, {})  # type: ignore[arg-type]
    assert order == ["a", "b", "a", "a"]
