"""The pages of docs/ that are made from the code: docs/tree.md, docs/flags.md and part of
docs/from-vllm.md.

    python -m scripts.docs [--write]

Without --write it says which page is out of date, and exits 1 if one is. A test does the same.
"""

import argparse
import ast
import itertools
import re
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from octavo import vllm_names
from octavo.cli import bench
from octavo.cli.arguments import Parser
from octavo.cli.main import COMMANDS, command_parser
from octavo.vllm_names import Entry, Kind, Status

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
    "README.md": "what Octavo is, how to install it, the first answer, speed",
    "examples/README.md": "the index of the examples",
    "constraints.txt": "the versions that were tested together",
    "pyproject.toml": "the package, its extras, and the settings of ruff, mypy and pytest",
    "docs/charts": "pictures drawn from saved rows (`octavo bench NAME --save`)",
    "docs/images": "pictures of the dashboard (`python -m scripts.screenshots`)",
    "docs/decisions": "one record per choice: context, choice, cost",
    "docs/flags.md": "every flag of every command (generated)",
    "docs/log.md": "what was tried and what came of it, newest first",
    "docs/tree.md": "this page (generated)",
    "docs/walk.md": "one request, from call to answer, in ten steps",
    "benchmarks/results": "saved rows, one JSON object per line",
    "src/octavo/server/dashboard/icon.svg": "the dashboard's icon",
    "src/octavo/server/dashboard/index.html": "the dashboard's page, without data",
    "src/octavo/server/dashboard/style.css": "the dashboard's colours and layout, light and dark",
    "src/octavo/py.typed": "says that the package carries its types",
}


# Folders with one line for all of their files.
_GROUPS = ("docs/decisions", "docs/charts", "docs/images", "benchmarks/results")


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
                (g for g in _GROUPS if g in name),
                "",
            )
            if path.is_dir() or "__pycache__" in name or path.suffix in (".nbi", ".nbc", ".pyc"):
                continue
            found[grouped or name] = _OTHERS[grouped] if grouped else describe(path)
    return found


def describe(path: Path) -> str:
    """The first sentence of a file's docstring or leading comment, or the entry in `_OTHERS`."""
    name = str(path.relative_to(ROOT))
    if path.suffix == ".js":
        comment = itertools.takewhile(lambda line: line[3:], path.read_text().splitlines())
        return " ".join(line.removeprefix("// ") for line in comment)
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


_INTRODUCTION = """# Flags

Made by `make docs` from the commands themselves. Flags that several commands share are listed once,
at the end: [engine](#engine-flags) flags are also the keywords of `LLM(...)` (`--max-num-seqs` is
`max_num_seqs`); [sampling](#sampling-flags) flags are the fields of `SamplingParams`. A flag that
turns something on has a form with `no-` that turns it off.
"""
_SHARED = ("engine", "sampling")  # titles of argument groups
_DEFAULT = re.compile(r" \(default: (.*)\)$")


def flags_page() -> str:
    """docs/flags.md: every flag of every command, shared groups once."""
    lines = [_INTRODUCTION]
    shared: dict[str, dict[str, dict[str, str]]] = {title: {} for title in _SHARED}
    for command, (parser, what) in _parsers().items():
        lines += [f"## `octavo {command}`", "", f"{what[0].upper()}{what[1:]}.", ""]
        own: dict[str, str] = {}
        taken = []
        for group in parser._action_groups:
            found = {
                _names(action): _meaning(action)
                for action in group._group_actions
                if action.help != argparse.SUPPRESS
            }
            if group.title not in _SHARED:
                own |= {names: meaning for names, meaning in found.items() if "--help" not in names}
                continue
            taken.append(group.title)
            for names, meaning in found.items():
                shared[group.title].setdefault(names, {})[command] = meaning
        lines += _table(own)
        if taken:
            links = " and ".join(f"[{title} flags](#{title}-flags)" for title in taken)
            lines += [f"Also takes the {links}.", ""]
    for title, flags in shared.items():
        commands = {command for meanings in flags.values() for command in meanings}
        lines += [f"## {title.capitalize()} flags", ""]
        lines += [f"Of {_listed(command for command in _parsers() if command in commands)}.", ""]
        lines += _table({names: _merged(meanings, commands) for names, meanings in flags.items()})
    return "\n".join(lines)


def _parsers() -> dict[str, tuple[Parser, str]]:
    """Command -> its parser, and what the command does; those of `octavo bench` included."""
    found = {name: (command_parser(name), what) for name, what in COMMANDS.items()}
    for name, (_, what) in bench.COMMANDS.items():
        found[f"bench {name}"] = (bench.benchmark_parser(name), what)
    return found


def _names(action: argparse.Action) -> str:
    names = [
        name
        for name in action.option_strings
        if name.replace("--no-", "--") == name or isinstance(action, argparse._StoreTrueAction)
    ]
    return ", ".join(f"`{name}`" for name in names) or f"`{action.metavar or action.dest}`"


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("|", "\\|")
    return text.replace(" (default: None)", "").replace(" (default: )", "")


def _table(flags: dict[str, str]) -> list[str]:
    rows = [f"| {names} | {meaning} |" for names, meaning in flags.items()]
    return ["| Flag | Meaning |", "|---|---|", *rows, ""] if rows else []


def _merged(meanings: dict[str, str], commands: Collection[str]) -> str:
    """One text for a flag of several commands, which may lack it or have defaults of their own."""
    texts = list(dict.fromkeys(meanings.values()))
    text = texts[0]
    if len(texts) > 1 and len({_DEFAULT.sub("", text) for text in texts}) == 1:
        found = {command: _DEFAULT.search(meaning) for command, meaning in meanings.items()}
        each = ", ".join(f"{default[1]} in `{name}`" for name, default in found.items() if default)
        text = f"{_DEFAULT.sub('', text)} (default: {each})"
    missing = sorted(set(commands) - set(meanings))
    return f"{text}; not in {_listed(missing)}" if missing else text


def _listed(commands: Iterable[str]) -> str:
    names = [f"`octavo {command}`" for command in commands]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


_MADE = "<!-- made by make docs from here on -->"
_HEADINGS = {
    Kind.ENGINE: "Engine options: keywords of `LLM` and `EngineArgs`, and flags",
    Kind.SERVER: "Flags of the server",
    Kind.SAMPLING: "Sampling parameters",
    Kind.PROMPT: "Keys of a prompt",
    Kind.METHOD: "Methods of `LLM`",
    Kind.ASYNC_METHOD: "Methods of `AsyncLLM`",
    Kind.ARGUMENT: "Arguments of the methods of `LLM`",
    Kind.REQUEST: "Fields of a request",
    Kind.IMPORT: "Imports",
}


def from_vllm_page() -> str:
    """docs/from-vllm.md: the introduction that stands there, and the table of vLLM's names."""
    before = (ROOT / "docs/from-vllm.md").read_text().partition(_MADE)[0]
    lines = [before + _MADE, "", f"The names are those of vLLM {vllm_names.VERSION}.", ""]
    for kind, heading in _HEADINGS.items():
        lines += [f"## {heading}", "", *_vllm_table(kind), ""]
    return "\n".join(lines)


def _vllm_table(kind: Kind) -> list[str]:
    """Names of one kind: the supported ones in a line, then a row for each reason."""
    same = [e for e in vllm_names.entries(kind) if e.status is Status.SUPPORTED and not e.note]
    lines = [f"The same: {', '.join(f'`{entry.name}`' for entry in same)}.", ""]
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in vllm_names.entries(kind):
        if entry in same:
            continue
        if entry.status in (Status.SUPPORTED, Status.NO_EFFECT):
            state, text = "taken", entry.note
        elif entry.status is Status.RENAMED:
            state, text = "taken", f"the same as `{entry.ours}`"
        else:
            state, text = "refused", entry.refusal()
        rows.setdefault((state, text), []).append(_vllm_name(entry))
    lines += ["| Names | | What it means here, or why not and what to use |", "|---|---|---|"]
    lines += [f"| {', '.join(names)} | {state} | {text} |" for (state, text), names in rows.items()]
    return lines


def _vllm_name(entry: Entry) -> str:
    """A name, and the values that are taken, where that is not obvious."""
    values = [v for v in entry.neutral if v is not None]
    if entry.status is Status.NO_EFFECT and not entry.any_value:
        return f"`{entry.name}` ({', '.join(f'`{value!r}`' for value in values)})"
    return f"`{entry.name}`"


PAGES: dict[str, Callable[[], str]] = {
    "docs/tree.md": tree_page,
    "docs/flags.md": flags_page,
    "docs/from-vllm.md": from_vllm_page,
}


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
