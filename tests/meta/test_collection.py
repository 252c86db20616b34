"""Collecting tests is cheap: what takes seconds to import is imported where it is needed."""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Each takes a second or more, on top of torch.
SLOW = {"transformers", "accelerate", "openai"}


def imported_at_once(tree: ast.Module) -> set[str]:
    """Roots of what a module imports when it is imported itself."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).split(".")[0])
    return found


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_no_test_file_imports_a_slow_library_at_once(path: Path) -> None:
    assert imported_at_once(ast.parse(path.read_text())) & SLOW == set()


def test_an_import_at_once_is_found() -> None:
    text = "import a.b\nfrom c.d import e\ndef f():\n    import g\n"
    assert imported_at_once(ast.parse(text)) == {"a", "c"}


def test_no_folder_of_tests_is_left_out_by_its_name(pytestconfig: pytest.Config) -> None:
    """By pytest's defaults, `dist` and `build` would be."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(TESTS).parts}
    assert [name for name in names if any(fnmatch(name, pattern) for pattern in left_out)] == []


def test_every_file_is_linted() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "src", "tests"]
    shown = subprocess.run(
        command, cwd=TESTS.parent, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    files = [path for part in ("src", "tests") for path in (TESTS.parent / part).rglob("*.py")]
    assert {str(path) for path in files} - set(shown) == set()


def test_tests_of_what_decides_load_no_tensors() -> None:
    code = (
        "import sys, pytest\n"
        "assert pytest.main(['--collect-only', '-q', 'tests/core']) == 0\n"
        "loaded = {'torch', 'numba', 'transformers', 'hypothesis'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_long_files_exist_and_come_first() -> None:
    from conftest import LONG_FILES, pytest_collection_modifyitems

    assert [name for name in LONG_FILES if not (TESTS / name).is_file()] == []

    class Item:
        def __init__(self, name: str) -> None:
            self.path = TESTS / name

    items = [Item("a.py"), Item(LONG_FILES[1]), Item("b.py"), Item(LONG_FILES[0])]
    pytest_collection_modifyitems(items)
    order = [str(item.path.relative_to(TESTS)) for item in items]
    assert order == [LONG_FILES[0], LONG_FILES[1], "a.py", "b.py"]
