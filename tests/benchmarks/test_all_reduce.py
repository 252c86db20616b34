"""Timing a group's operation: every rank makes as many calls, and the first does not count."""

import pytest
import torch
from benchmarks.all_reduce import timed

from octavo.dist.base import SINGLE, Single


def test_calls_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def all_reduce(group: Single, x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x

    monkeypatch.setattr(Single, "all_reduce", all_reduce)
    found = timed(SINGLE, 3, 5, 7)
    assert seen == [(3, 5)] * 8
    assert 0 <= found["min"] <= found["median"]
