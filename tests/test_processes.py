"""Children import what their parent imports, and nothing from the folder they are started in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import octavo
from octavo.processes import Owner, import_path, module_command

SOURCE = str(Path(octavo.__file__).parents[1])
# What a trap prints: nothing that a path may contain.
SPRUNG = "<a trap was imported>"
TRAPS = ("calendar", "json", "sitecustomize", "runpy", "shown", "octavo", "msgspec")


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """The working folder: files and folders named like modules, each of which says it was run."""
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(f"print('{SPRUNG} {name}')\n")
    (tmp_path / "octavo.py").unlink()
    (tmp_path / "octavo").mkdir()
    (tmp_path / "octavo" / "__init__.py").write_text(f"print('{SPRUNG} octavo')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output(command, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_child_imports_nothing_from_the_working_folder(traps, tmp_path_factory):
    modules = tmp_path_factory.mktemp("modules")
    (modules / "main.py").write_text(
        "import calendar, json, msgspec, octavo, sys\n"
        "print(__name__, sys.argv[1:], octavo.__file__)\n"
    )
    code = (
        f"import sys; sys.path[:] = {[*sys.path, str(modules)]!r}\n"
        "from octavo.processes import module_command\n"
        "import json; print(json.dumps(module_command('main', 'a', 'b c')))"
    )
    command = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    import json

    found = output(json.loads(command))
    assert found.split(" ")[0] == "__main__"
    assert "['a', 'b c']" in found
    assert found.strip().endswith(str(Path(SOURCE) / "octavo" / "__init__.py"))
    assert SPRUNG not in found


@pytest.mark.parametrize("module", ["octavo.engine.process", "octavo.kernels.cpu", "pip"])
def test_no_child_of_octavo_runs_a_file_of_the_working_folder(traps, module):
    if module == "octavo.engine.process":  # it ends at an empty line that is no Launch
        done = subprocess.run(module_command(module), input=b"\n", capture_output=True, check=False)
        assert SPRUNG.encode() not in done.stdout
        assert b"DecodeError" in done.stderr
        return
    arguments = ("--version",) if module == "pip" else ()
    assert SPRUNG not in output(module_command(module, *arguments))


def test_the_first_entry_alone_is_the_working_folder_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/one", "", SOURCE, "two"])
    assert import_path() == ["/one", SOURCE, str(tmp_path / "two")]
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), SOURCE])  # named by PYTHONPATH too
    assert import_path() == [str(tmp_path), SOURCE]
    monkeypatch.setattr(sys, "path", ["/script", "/one"])
    assert import_path() == ["/script", "/one", SOURCE]


def test_the_package_s_own_folder_stays_but_last(monkeypatch):
    monkeypatch.chdir(SOURCE)
    monkeypatch.setattr(sys, "path", [SOURCE, "/one"])
    assert import_path() == ["/one", SOURCE]


def test_an_owner_knows_its_fork():
    owner = Owner("this thing")
    assert owner.is_here()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, f"{owner.is_here()} {owner.complaint()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    os.close(writer)
    assert said.startswith(f"False this thing was made in process {os.getpid()} and is used in its")
    assert str(child) in said
    assert "spawn" in said
