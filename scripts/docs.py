"""The pages of docs/ that are made from the code: docs/tree.md and docs/flags.md.

    python -m scripts.docs [--write]

Without --write it says which page is out of date, and exits 1 if one is. A test does the same.
"""

import argparse
import ast
import sys
from collections.abc import Callable
from pathlib import Path

from octavo.cli import bench
from octavo.cli.main import COMMANDS, command_parser

ROOT = Path(__file__).parent.parent
_PARTS = ("src/octavo", "tests", "benchmarks", "scripts", "examples", "docs")

# Files that cannot say what they are in a docstring.
_OTHERS = {
    ".ci/run": "what continuous integration runs",
    ".gitignore": "what stays out of the repository",
    "CHANGELOG.md": "what changed, for users",
    "CONTRIBUTING.md": "how to work on this, and how to add a model, a kernel, a policy",
    "LICENSE": "Apache-2.0",
    "Makefile": "every command of the repository",
    "README.md": "what Octavo is, what it reaches, two commands to see it",
    "constraints.txt": "the versions that were tested together",
    "pyproject.toml": "the package, its extras, and the settings of ruff, mypy and pytest",
    "docs/charts": "pictures drawn from saved rows (`octavo bench NAME --save`)",
    "docs/decisions": "one record per choice: context, choice, cost",
    "docs/flags.md": "every flag of every command (generated)",
    "docs/log.md": "what was tried and what came of it, newest first",
    "docs/tree.md": "this page (generated)",
    "docs/walk.md": "one request, from call to answer, in ten steps",
    "benchmarks/results": "saved rows, one JSON object per line",
    "src/octavo/py.typed": "says that the package carries its types",
}


def tree_page() -> str:
    """docs/tree.md: every file, one line each, by folder; empty `__init__` files left out."""
    lines = ["# The tree", "", "Made by `make docs`: the first line of each file's docstring."]
    lines += ["The map is [architecture.md](architecture.md)."]
    folder = None
    for name, what in files().items():
        if name.endswith("/__init__.py") and not what:
            continue
        if str(Path(name).parent) != folder:
            folder = str(Path(name).parent)
            lines += ["", f"## {'The root' if folder == '.' else folder}", ""]
            lines += ["| File | What it is |", "|---|---|"]
        lines.append(f"| `{name}` | {what} |")
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """Path below the root -> what it is. Raises KeyError for a file without a description."""
    found = {name: what for name, what in _OTHERS.items() if "/" not in name}
    found = {name: what for name, what in found.items() if (ROOT / name).exists()}
    found[".ci/run"] = _OTHERS[".ci/run"]
    for part in _PARTS:
        # A folder's own files before those of its folders.
        for path in sorted((ROOT / part).rglob("*"), key=lambda p: (str(p.parent), p.name)):
            name = str(path.relative_to(ROOT))
            grouped = next(
                (g for g in ("docs/decisions", "docs/charts", "benchmarks/results") if g in name),
                "",
            )
            if path.is_dir() or "__pycache__" in name or path.suffix in (".nbi", ".nbc", ".pyc"):
                continue
            found[grouped or name] = _OTHERS[grouped] if grouped else describe(path)
    return found


def describe(path: Path) -> str:
    """The first sentence of a Python file's docstring, or the entry in `_OTHERS`."""
    name = str(path.relative_to(ROOT))
    if path.suffix != ".py":
        return _OTHERS.get(name) or _title(path)
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        return "" if path.stat().st_size == 0 else "(no docstring)"
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.replace("|", "\\|")


def _title(path: Path) -> str:
    """A Markdown page says what it is in its first line."""
    return path.read_text().splitlines()[0].lstrip("# ") if path.suffix == ".md" else ""


def flags_page() -> str:
    """docs/flags.md: every flag of every command, with its help."""
    lines = ["# Flags", "", "Made by `make docs` from the commands themselves.", ""]
    parsers = {name: (command_parser(name), what) for name, what in COMMANDS.items()}
    for name, (_, what) in bench.COMMANDS.items():
        parsers[f"bench {name}"] = (bench.benchmark_parser(name), what)
    for command, (parser, what) in parsers.items():
        lines += [f"## `octavo {command}`", "", f"{what[0].upper()}{what[1:]}.", ""]
        lines += ["| Flag | Meaning |", "|---|---|"]
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:
                continue
            names = ", ".join(f"`{name}`" for name in action.option_strings)
            what_it_does = (action.help or "").replace("|", "\\|")
            lines.append(f"| {names or f'`{action.metavar or action.dest}`'} | {what_it_does} |")
        lines.append("")
    return "\n".join(lines)


PAGES: dict[str, Callable[[], str]] = {"docs/tree.md": tree_page, "docs/flags.md": flags_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if write:
            path.write_text(text)
    for name in stale:
        print(f"{name}: {'written' if write else 'out of date; run make docs'}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
