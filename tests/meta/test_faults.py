"""The codes that tests carry in their names are explained in docs/faults.md, and only those."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_KINDS = "cht|lgp|lim|mdl|pfx|sch|sec|smp|srv|sto|stp|str|tol"


def used() -> set[str]:
    """Codes in names of tests: `test_pfx_01_...`, `TestPfx01`."""
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(
            r"(?m)^\s*(?:async )?(?:def|class) (test\w+|Test\w+)", path.read_text()
        ):
            for kind, number in re.findall(rf"(?i)({_KINDS})_?(\d\d)(?!\d)", name):
                found.add(f"{kind.upper()}-{number}")
    return found


def explained() -> list[str]:
    text = (ROOT / "docs/faults.md").read_text()
    return re.findall(r"(?m)^\| ([A-Z]{3}-\d\d) \| \S.{20,}\|$", text)


def test_each_code_has_one_line_and_each_line_a_test() -> None:
    assert len(explained()) == len(set(explained()))
    assert set(explained()) == used()


def test_lines_are_in_order() -> None:
    assert explained() == sorted(explained())
