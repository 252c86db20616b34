"""The generated pages are up to date, and the hand-written ones name things that exist."""

import re

import pytest
from scripts import docs

ROOT = docs.ROOT
HAND_WRITTEN = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/README.md",
    "docs/architecture.md",
    "docs/walk.md",
    "docs/models.md",
)


@pytest.mark.parametrize("name", docs.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text() == docs.PAGES[name](), "run `make docs`"


def test_every_file_says_what_it_is() -> None:
    silent = [name for name, what in docs.files().items() if what in ("(no docstring)",)]
    assert silent == []


def test_the_tree_names_no_file_twice_and_misses_none() -> None:
    listed = re.findall(r"^\| `(.+?)` \|", docs.tree_page(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    for path in (ROOT / "src/octavo").rglob("*.py"):
        if path.name == "__init__.py" and not path.read_text():
            continue
        assert str(path.relative_to(ROOT)) in listed


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_paths_named_in_the_docs_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    paths = re.findall(r"`((?:src|tests|benchmarks|docs|scripts|examples)/[\w./-]+)`", text)
    paths += re.findall(r"\]\(((?!http|#)[\w./-]+)\)", text)
    base = (ROOT / name).parent
    missing = [p for p in paths if not (ROOT / p).exists() and not (base / p).exists()]
    assert missing == []


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_source_files_named_in_the_docs_exist(name: str) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", (ROOT / name).read_text())
    bases = (ROOT, ROOT / "src/octavo")
    assert [n for n in named if not any((base / n).exists() for base in bases)] == []


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_flags_named_in_the_docs_exist(name: str) -> None:
    known = set(re.findall(r"`(--[a-z-]+)`", (ROOT / "docs/flags.md").read_text()))
    named = set(re.findall(r"octavo (?:\w+ )?[^`\n]*?(--[a-z][a-z-]+)", (ROOT / name).read_text()))
    assert named - known - {"--help", "--version"} == set()


def test_make_targets_named_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name in HAND_WRITTEN:
        named = set(re.findall(r"`make ([a-z-]+)`", (ROOT / name).read_text()))
        assert named <= targets, name


def test_every_decision_has_context_choice_and_cost() -> None:
    records = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert records
    assert len({path.name[:4] for path in records}) == len(records), "a number is used twice"
    for path in records:
        assert re.match(r"\d{4}-[a-z0-9-]+\.md$", path.name)
        assert path.read_text().startswith(f"# {int(path.name[:4])}. ")
        text = path.read_text()
        for part in ("Context", "Choice", "Cost"):
            assert re.search(rf"^\*\*{part}\.\*\*", text, re.MULTILINE), f"{path.name}: {part}"
