"""constraints.txt says truly what each version is for."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def project_dependencies() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return {name.lower().replace("_", "-") for name in re.findall(r'"([\w-]+)', listed.group(1))}


def sections() -> dict[str, set[str]]:
    """The first line of each comment over a block -> the packages of the block."""
    found: dict[str, set[str]] = {}
    for block in (ROOT / "constraints.txt").read_text().split("\n\n"):
        title, *lines = block.strip().splitlines()
        names = (line.split("==")[0] for line in lines if not line.startswith("#"))
        found[title.removeprefix("# ")] = {name.lower().replace("_", "-") for name in names}
    return found


def test_what_the_package_imports_is_what_it_depends_on() -> None:
    found = sections()
    titles = ("what the engine imports", "what the server imports", "what a chat imports")
    imported = set().union(*(found[title] for title in titles))
    assert len(imported) == sum(len(found[title]) for title in titles)
    assert imported == project_dependencies()


def test_no_version_is_listed_twice() -> None:
    names = [name for block in sections().values() for name in block]
    assert len(names) == len(set(names)) > 15
