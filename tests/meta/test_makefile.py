"""The Makefile does what it says: no undefined variable, and `make test` runs the tests.

A line `@$(UNDEFINED) -m "not slow"` is an ignored failure for make, and CI would pass untested.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)


def dry_run(target: str) -> subprocess.CompletedProcess[str]:
    """What `make target` would run; targets that install are taken as made."""
    return subprocess.run(
        ["make", "-n", "--warn-undefined-variables", "--no-print-directory",
         "-o", ".venv/.dev", "-o", ".venv/.bench", target],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_every_variable_is_defined(target: str) -> None:
    warnings = re.findall(r"undefined variable '(\w+)'", dry_run(target).stderr)
    # Those that a user may give.
    assert set(warnings) <= {"ARGS", "COUNT", "MAKEFLAGS", "MAKEOVERRIDES", "GNUMAKEFLAGS"}


@pytest.mark.parametrize("target", TARGETS)
def test_no_command_may_fail_unseen(target: str) -> None:
    assert [line for line in dry_run(target).stdout.splitlines() if line.startswith("-")] == []


def test_make_test_runs_lint_and_the_fast_tests() -> None:
    lines = dry_run("test").stdout.splitlines()
    assert lines[-2].endswith('-m "not slow and not netns"')
    assert '-m "netns and not slow"' in lines[-1]
    assert all(" -m pytest " in line for line in lines[-2:])
    for tool in ("ruff check", "ruff format --check", "mypy"):
        assert any(tool in line for line in lines)


def test_ci_runs_make_test() -> None:
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test")
