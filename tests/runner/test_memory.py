"""The memory sum, and what limits it."""

from dataclasses import dataclass

from octavo.runner.memory import GIB, MemorySum


@dataclass
class Memory:
    total: int
    free: int
    used: int


def test_the_sum_is_its_terms():
    found = MemorySum(total=16 * GIB, limit=14 * GIB, used=3 * GIB, step_peak=GIB)
    assert found.budget == 10 * GIB
    said = found.explain()
    for term in ("14.00", "16.00", "3.00", "1.00", "10.00"):
        assert term in said


def test_the_share_and_what_is_free_both_limit():
    plenty = MemorySum.of(Memory(total=1000, free=900, used=100), 0.5, 7)
    assert (plenty.limit, plenty.budget) == (500, 393)
    scarce = MemorySum.of(Memory(total=1000, free=200, used=100), 0.5, 7)
    assert (scarce.limit, scarce.budget) == (200, 93)


def test_captured_steps_are_a_term_where_they_have_memory_of_their_own():
    memory = Memory(total=16 * GIB, free=15 * GIB, used=GIB)
    found = MemorySum.of(memory, 0.5, GIB, captured=GIB // 2)
    assert found.budget == MemorySum.of(memory, 0.5, GIB).budget - GIB // 2
    assert "- 1.00 GiB for a full step - 0.50 GiB for captured steps = " in found.explain()
