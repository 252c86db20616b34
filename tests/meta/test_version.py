"""One version: in the package, its metadata, the changelog and the command."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import octavo
from octavo.cli.main import main

ROOT = Path(__file__).parents[2]


def test_metadata_has_the_package_s_version() -> None:
    assert importlib.metadata.version("octavo") == octavo.__version__


def test_the_changelog_begins_with_it() -> None:
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == octavo.__version__


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


def test_direct_dependencies_are_pinned() -> None:
    wanted = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|dev|bench) = \[(.*?)\]", wanted, re.MULTILINE | re.DOTALL)
    names = {
        name.lower().replace("_", "-") for name in re.findall(r'"([A-Za-z0-9_-]+)', " ".join(lists))
    }
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {
        name.lower().replace("_", "-")
        for name in re.findall(r"^([A-Za-z0-9_-]+)==", pins, re.MULTILINE)
    }
    assert names <= pinned, f"not pinned: {sorted(names - pinned)}"
