"""What a kernel's key depends on: what is compiled, and nothing else."""

import logging
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo import log
from octavo.kernels.cpu import object_cache, target

SOURCES = Path(object_cache.__file__).parent
KERNELS = ("attention", "fused", "gemm_bf16", "gemm_int8", "gguf", "program", "sampling",
           "weight_only")  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the package whose sources a test may change, with a cache of its own."""
    folder = tmp_path / "cpu"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(object_cache, "__file__", str(folder / "object_cache.py"))
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "kernels")
    object_cache._keys.cache_clear()
    yield folder
    monkeypatch.undo()
    object_cache._keys.cache_clear()


def keys():
    object_cache._keys.cache_clear()
    return {name: object_cache._keys(object_cache.cache_folder())[name] for name in KERNELS}


def changed(before):
    return {name for name, key in keys().items() if key != before[name]}


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "caller",
    [
        "fused_call",
        "gemm_int8_call",
        "weight_only_call",
        "graph",
        "kernel",
        "openmp",
        "object_cache",
    ],
)
def test_a_change_in_a_caller_compiles_nothing_anew(package, caller):
    before = keys()
    file = package / f"{caller}.py"
    file.write_text(file.read_text() + "\nCHANGED = 1\n")
    assert changed(before) == set()


def test_comments_and_docstrings_compile_nothing_anew(package):
    before = keys()
    file = package / "fused.py"
    text = file.read_text()
    docstring = text.index('"""', 3)
    file.write_text(text[:docstring] + " More words." + text[docstring:] + "\n# a comment\n")
    assert changed(before) == set()


def test_a_kernel_s_code_is_its_own(package):
    before = keys()
    edit(package / "fused.py", "return _by_rows(row)", "return _by_rows(row) or None")
    assert "fused" in changed(before)
    assert "attention" not in changed(before)
    assert "sampling" not in changed(before)


@pytest.mark.parametrize(
    ("module", "touched"),
    [("simd", set(KERNELS)), ("compile", set(KERNELS)), ("target", set(KERNELS))],
)
def test_what_a_kernel_imports_is_part_of_its_key(package, module, touched):
    before = keys()
    file = package / f"{module}.py"
    file.write_text(file.read_text() + "\nCHANGED = 1\n")
    assert changed(before) == touched


def test_object_code_is_kept_apart_by_processor(monkeypatch):
    def folder():
        object_cache.cache_folder.cache_clear()
        return object_cache.cache_folder()

    name, features = target.cpu()
    folders = {folder()}
    monkeypatch.setattr(target, "cpu", lambda: (name, features - {sorted(features)[0]}))
    folders.add(folder())
    monkeypatch.setattr(target, "cpu", lambda: (name + "2", features))
    folders.add(folder())
    monkeypatch.undo()
    assert len(folders) == 3
    assert folder() in folders


def test_damaged_keys_are_found_anew(package):
    before = keys()
    [file] = (package.parent / "kernels").glob("keys-*")
    file.write_bytes(b"x" * 50)
    assert keys() == before


def test_warm_keys_take_little_time(package):
    keys()
    took = []
    for _ in range(5):
        began = time.perf_counter()
        keys()
        took.append(time.perf_counter() - began)
    assert min(took) < 0.005


def test_a_user_without_a_home_has_no_cache_and_hears_it_once(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)
    monkeypatch.setattr(log, "find_cache_dir", lambda: None)
    object_cache.cache_folder.cache_clear()
    object_cache._say_not_kept.cache_clear()
    try:
        file = object_cache.object_file("fused", "activation")
        assert file is None
        object_cache.store(file, b"code")
        assert object_cache.read(file) is None
        object_cache.cache_folder.cache_clear()
        assert not object_cache.is_writable()
    finally:
        object_cache.cache_folder.cache_clear()
    assert caplog.text.count("not kept for the next start: this user has no home") == 1


def test_a_full_disk_leaves_nothing_behind_and_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("octavo"), "propagate", True)

    def full(*names):
        raise OSError(28, "No space left on device", str(names))

    monkeypatch.setattr(object_cache.os, "replace", full)
    for name in ("a.o", "b.o"):
        object_cache.store(tmp_path / name, b"code")
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("No space left") == 1


def test_where_others_can_find_what_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "new" / "folder")
    assert object_cache.is_writable()
    (tmp_path / "file").touch()
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "file" / "kernels")
    assert not object_cache.is_writable()
    monkeypatch.setattr(object_cache, "cache_folder", lambda: Path("/proc/self"))  # never written
    monkeypatch.setattr(object_cache.os, "access", lambda path, mode: False)
    assert not object_cache.is_writable()


def test_one_process_compiles_and_the_others_find_it(tmp_path):
    """As ranks do that need the same kernel at once; here each has a thread."""
    file, compiled = tmp_path / "kernels" / "k.o", []

    def make(number):
        with object_cache.compiling(file):
            if object_cache.read(file) is None:
                compiled.append(number)
                time.sleep(0.1)
                object_cache.store(file, b"code")
        return object_cache.read(file)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(make, range(4))) == [b"code"] * 4
    assert len(compiled) == 1
    assert [path.name for path in file.parent.iterdir()] == ["k.o"]


def test_without_a_folder_each_compiles_for_itself(tmp_path):
    (tmp_path / "file").touch()
    for file in (None, tmp_path / "file" / "k.o"):
        with object_cache.compiling(file):
            pass


LINKED = """
import ctypes, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import llvmlite.binding as llvm
from octavo.kernels.cpu import object_cache
from tests import address_space

threads, scattered = int(sys.argv[1]), sys.argv[2] == "scattered"
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()
machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="small")

def compiled(name):  # adds 0.5 two thousand times: more code than a page holds, and a constant
    body = "".join(f"%x{i + 1} = fadd double %x{i}, 0.5\\n" for i in range(2000))
    text = f"define double @{name}(double %x0) {{\\n{body}ret double %x2000\\n}}"
    return machine.emit_object(llvm.parse_assembly(text))

create = llvm.create_mcjit_compiler

def create_slowly(*arguments, **options):  # for each thread to find that there is none yet
    time.sleep(0.1)
    return create(*arguments, **options)

llvm.create_mcjit_compiler = create_slowly
codes = [compiled(f"f{i}") for i in range(8)]
together = threading.Barrier(threads)
if scattered:
    address_space.scatter()

def link(i):
    together.wait()
    return object_cache.link(codes[i], f"f{i}")

with ThreadPoolExecutor(threads) as pool:
    addresses = list(pool.map(link, range(8)))
function = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double)
print([function(address)(i) for i, address in enumerate(addresses)])
"""


def linked_and_called(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", LINKED, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str([1000.0 + i for i in range(8)])


def test_threads_link_at_once():
    linked_and_called("8", "roomy")


def test_code_and_its_constants_stay_together_where_memory_is_scattered():
    linked_and_called("1", "scattered")
