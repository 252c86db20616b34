"""Rules of the house that a syntax tree or a search can hold."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent
ROOT = Path(__file__).parents[2]


def trees() -> list[tuple[str, ast.Module]]:
    paths = sorted(SOURCE.rglob("*.py"))
    return [(str(path.relative_to(SOURCE)), ast.parse(path.read_text())) for path in paths]


def attribute_uses(tree: ast.AST, owner: str, names: set[str]) -> list[int]:
    """Lines where `owner.name` is read or called, for any of the names."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
        and node.attr in names
    ]


@pytest.mark.parametrize(("name", "tree"), trees(), ids=lambda v: v if isinstance(v, str) else "")
class TestEveryFile:
    def test_frozen_means_frozen(self, name: str, tree: ast.Module) -> None:
        assert attribute_uses(tree, "object", {"__setattr__"}) == []

    def test_no_global_statement(self, name: str, tree: ast.Module) -> None:
        assert [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Global)] == []

    def test_only_log_reads_the_environment(self, name: str, tree: ast.Module) -> None:
        names = {"environ", "getenv", "putenv", "environb"}
        if name != "log.py":
            assert attribute_uses(tree, "os", names) == []

    def test_every_file_says_what_it_is(self, name: str, tree: ast.Module) -> None:
        assert not tree.body or ast.get_docstring(tree), f"{name} has no docstring"

    def test_no_broad_except_that_hides(self, name: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and _broad(node.type):
                inner = [n for statement in node.body for n in ast.walk(statement)]
                told = any(
                    isinstance(n, ast.Raise) or _logs(n) or _names(n, node.name) for n in inner
                )
                assert told, f"{name}:{node.lineno} swallows an error"


def _broad(kind: ast.expr | None) -> bool:
    return kind is None or (
        isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")
    )


def _names(node: ast.AST, error: str | None) -> bool:
    """Whether the caught error is used: kept, shown, or passed on."""
    return isinstance(node, ast.Name) and node.id == error


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (
        (isinstance(node.func, ast.Name) and node.func.id.startswith("log_"))
        or (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("logger", "_logger", "log")
        )
    )


_MAX_LINES = 80
_MAX_KERNEL_PARAMETERS = 8


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", node


def test_no_function_is_long() -> None:
    long = {name for name, f in functions() if (f.end_lineno or 0) - f.lineno >= _MAX_LINES}
    assert long == set()


def test_no_function_of_a_kernel_takes_many_parameters() -> None:
    """Of compiled code: its callers take what torch or a protocol asks for. The builder of an
    emitter is none of its parameters."""
    wide = {
        name
        for name, f in functions()
        if name.startswith("kernels/cpu/") and _is_compiled(f)
        and len([a for a in f.args.args if a.arg != "b"]) > _MAX_KERNEL_PARAMETERS
    }  # fmt: skip
    assert wide == set()


def _is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Numba infers the types of what it compiles, so nothing there is annotated."""
    return bool(function.args.args) and all(a.annotation is None for a in function.args.args)


def test_raises_outnumber_asserts_outside_the_core() -> None:
    counted = {ast.Raise: 0, ast.Assert: 0}
    for name, tree in trees():
        if not name.startswith(("core/", "kernels/")):
            for node in ast.walk(tree):
                if type(node) in counted:
                    counted[type(node)] += 1
    assert counted[ast.Raise] > counted[ast.Assert]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git work tree")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_no_source_is_ignored_by_git() -> None:
    """A folder of the name of a build product would be missing from every clone."""
    paths = "\n".join(str(path) for path in sorted(SOURCE.rglob("*.py")))
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        cwd=ROOT, input=paths, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if found.returncode == 128:
        pytest.skip("not a git work tree")
    assert found.stdout == ""


# Written in halves, so that this file does not find itself.
_FORBIDDEN = re.compile(
    "|".join(
        first + last
        for first, last in [
            ("/wo", r"rk/(?:main|shared)"),
            ("/tm", r"p/\w"),
            ("/ro", r"ot/\."),
            ("/ho", r"me/\w"),
            ("/op", r"t/\w"),
            ("py", r"pi\.org"),
            ("python", r"hosted"),
            ("npm", r"js\.org"),
            ("download\\.py", r"torch\.org"),
            ("--(?:extra-)?index", r"-url"),
        ]
    )
)


def test_no_registry_host_and_no_machine_s_path_is_committed() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        hit = _FORBIDDEN.search(text)
        if hit:
            found.append(f"{path.relative_to(ROOT)}: {hit.group()}")
    assert found == []


def test_the_search_for_paths_can_find() -> None:
    assert _FORBIDDEN.search("see /" + "tmp/x")
    assert _FORBIDDEN.search("https://py" + "pi.org/x")


def test_no_big_file_is_committed() -> None:
    big = [p for p in tracked_files() if p.exists() and p.stat().st_size > 1_000_000]
    assert big == []
