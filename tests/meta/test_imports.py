"""The import rule: a file imports from lower rows and from its own folder, never up or sideways.

Read off the syntax tree, so that imports inside functions and type-only imports count too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent

# Each row sees the rows above it here; the columns of a row do not see each other.
ROWS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "config",
        "devices",
        "params",
        "structured_outputs",
        "constraints",
        "outputs",
        "log",
        "processes",
        "cgroup",
        "topology",
        "version",
        "vllm_names",
        "inputs",
        "sampling_params",
        "logprobs",
        "sequence",
        "logger",
    ),
    ("checkpoint", "progress", "utils", "hardware"),
    ("core", "kernels", "text"),
    ("quant", "attention", "dist", "schedulers"),
    ("layers",),
    ("models",),
    ("runner",),
    ("engine", "planner"),
    ("llm", "async_llm", "server", "bench", "doctor"),
    ("llm_engine", "sim"),
    ("cli", "entrypoints", "v1"),
)
ROW_OF = {part: row for row, parts in enumerate(ROWS) for part in parts}

# Other names of what is above them, in a folder of another row since vLLM has them there.
ALIASES = {"engine/async_llm_engine.py": "entrypoints", "engine/llm_engine.py": "entrypoints"}

# The decisions and the text need no tensors; the web side starts without torch.
TORCH_FREE_PARTS = (
    *ROWS[0],
    "checkpoint",
    "hardware",
    "core",
    "text",
    "schedulers",
    "server",
    "sim",
    "bench",
    "doctor",
    "cli",
)
TORCH_FREE_FILES = (
    "engine/client.py",
    "engine/launcher.py",
    "engine/link.py",
    "engine/messages.py",
    "engine/output.py",
    "engine/stats.py",
    "models/files.py",
)
COMPILERS = {"numba", "llvmlite", "triton"}


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def part_of(path: Path) -> str:
    """The first-level part a file belongs to: `core` for core/plan.py, `llm` for llm.py."""
    return ALIASES.get(name_of(path)) or path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> list[str]:
    return list(imported(ast.parse(path.read_text())))


def internal_faults(part: str, names: list[str]) -> list[str]:
    """Which of the imports of a file of `part` break the rule."""
    faults = []
    for name in names:
        if name.split(".")[0] != "octavo" or name == "octavo.__version__":
            continue
        target = [*name.split("."), ""][1]
        if target == part and part not in ROWS[0]:
            continue
        same_row = part in ROWS[0] and target in ROWS[0]
        if not same_row and ROW_OF.get(target, 99) >= ROW_OF[part]:
            faults.append(f"{part} imports {name}")
        if part == "runner" and target == "core" and not name.startswith("octavo.core.plan"):
            faults.append(f"runner imports {name}; of core it sees core.plan only")
    return faults


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_point_down(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return  # the public names, imported lazily: it stands above all rows
    assert part_of(path) in ROW_OF, f"{part_of(path)} has no row in the import rule"
    assert internal_faults(part_of(path), imports_of(path)) == []


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("core", "octavo.kernels.dispatch"),
        ("text", "octavo.core.plan.StepPlan"),
        ("quant", "octavo.attention.base"),
        ("runner", "octavo.core.scheduler.Scheduler"),
        ("runner", "octavo.engine.engine"),
        ("llm", "octavo.server.app"),
        ("bench", "octavo.llm"),
        ("errors", "octavo.core"),
        ("core", "octavo.newcomer"),
    ],
)
def test_the_rule_finds_a_fault(part: str, name: str) -> None:
    assert internal_faults(part, [name])


def test_imports_in_functions_and_for_types_only_count() -> None:
    text = "if TYPE_CHECKING:\n    import a.b\ndef f():\n    from c import d\n"
    assert list(imported(ast.parse(text))) == ["a.b", "c.d"]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_third_parties_stay_where_they_belong(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    part = part_of(path)
    if part in TORCH_FREE_PARTS or name_of(path) in TORCH_FREE_FILES:
        assert "torch" not in roots
    if part not in ("kernels", "attention"):
        assert not roots & COMPILERS
    if part in ROWS[0]:
        assert roots <= {*sys.stdlib_module_names, "msgspec", "octavo"}


# What may name a module of a device's kernels: they themselves, the attention backend and the
# group that are written over them, and the place that chooses a device.
DEVICE_KERNELS = "octavo.kernels.cpu"
DEVICE_FILES = ("attention/cpu.py", "dist/shared_memory.py", "runner/device.py")


def device_kernels(names: list[str]) -> list[str]:
    """Those of the imported names that belong to a device's kernels."""
    return [name for name in names if f"{name}.".startswith(f"{DEVICE_KERNELS}.")]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_only_the_choice_of_a_device_knows_its_kernels(path: Path) -> None:
    if name_of(path) not in DEVICE_FILES and not name_of(path).startswith("kernels/cpu/"):
        assert device_kernels(imports_of(path)) == []


def test_an_import_of_a_device_s_kernels_is_found() -> None:
    text = "def f():\n    from octavo.kernels import cpu, codes\nimport octavo.kernels.cpu.linear\n"
    found = device_kernels(list(imported(ast.parse(text))))
    assert sorted(found) == ["octavo.kernels.cpu", "octavo.kernels.cpu.linear"]


def module_of(path: Path) -> str:
    return ".".join(("octavo", *path.relative_to(SOURCE).with_suffix("").parts))


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of `sources` that it imports, wherever in its text."""
    return {
        module: {
            target
            for name in imported(ast.parse(text))
            for target in (name, name.rpartition(".")[0])
            if target in sources and target != module
        }
        for module, text in sources.items()
    }


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules of which each imports all others, directly or through the others."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        queue = [start]
        while queue:
            new = graph[queue.pop()] - found
            found |= new
            queue += new
        return found

    reach = {module: reachable(module) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_no_import_circle() -> None:
    """Of files, imports inside functions and for types only included."""
    files = [path for path in sources() if path.name != "__init__.py"]
    assert circles(import_graph({module_of(path): path.read_text() for path in files})) == []


def test_a_circle_is_found() -> None:
    texts = {
        "octavo.a": "from octavo.b import c",
        "octavo.b": "def f():\n    from octavo import d",
        "octavo.d": "import octavo.a",
        "octavo.e": "import octavo.a",
    }
    assert circles(import_graph(texts)) == [{"octavo.a", "octavo.b", "octavo.d"}]


def test_torch_is_not_loaded_by_what_decides_or_serves() -> None:
    parts = ["cli.main", "core.scheduler", "core.policy", "engine.output", "engine.stats"]
    parts += [
        name_of(p)[:-3].replace("/", ".") for p in sources() if part_of(p) in ("checkpoint", "text")
    ]
    parts += [name[:-3].replace("/", ".") for name in TORCH_FREE_FILES if (SOURCE / name).exists()]
    names = ["octavo", *(f"octavo.{part.removesuffix('.__init__')}" for part in parts)]
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "    assert 'numba' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_import_octavo_loads_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import octavo\n"
        "print(' '.join({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert set(loaded) <= {"octavo", *sys.stdlib_module_names}
