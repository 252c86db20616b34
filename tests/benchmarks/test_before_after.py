"""The comparison of two checkouts: the ratio's direction, and a difference is an error."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import before_after


def test_a_ratio_above_one_means_that_this_checkout_is_faster() -> None:
    row = before_after._timed(Path(), "W1, octavo", [[2.0, 4.0, 3.0], [1.0, 2.0, 1.5]])
    assert (row["before"], row["after"], row["ratio"]) == (3.0, 1.5, 2.0)
    assert row["pair_ratios"] == [2.0, 2.0, 2.0]
    assert row["before_commit"]


@pytest.mark.parametrize(("after", "exit_code"), [("aa", 0), ("bb", 1)])
def test_a_hash_that_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: str, exit_code: int
) -> None:
    def hashes(root: Path, environment: dict[str, str], modes: list[str]) -> dict[str, str]:
        return {mode: "aa" if root == Path("old").resolve() else after for mode in modes}

    saved: list[dict[str, Any]] = []
    monkeypatch.setattr(before_after, "_hashes", hashes)
    monkeypatch.setattr(before_after, "save", saved.append)
    monkeypatch.setattr("sys.argv", ["x", "--before", "old", "--skip-speed", "--save"])
    assert before_after.main() == exit_code
    assert [row["same"] for row in saved] == [after == "aa"] * 2
    assert (saved[0]["differing"] == []) == (after == "aa")
