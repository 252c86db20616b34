"""Kernels that come with the package: used by the processors that run them as their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import shipped_kernels

from octavo.kernels.cpu import object_cache, shipped, target
from octavo.kernels.cpu.kernel import Kernel

NAME = "fused:add:float32"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """An empty cache, and a folder for what is shipped."""
    monkeypatch.setattr(object_cache, "cache_folder", lambda: tmp_path / "kernels")
    monkeypatch.setattr(shipped, "parent", lambda: tmp_path / "shipped")
    shipped._folder.cache_clear()
    yield
    shipped._folder.cache_clear()


@pytest.fixture
def file(tmp_path):
    """One kernel, compiled for the processor of PROCESSORS that this one is like."""
    like = shipped.processor_of(target.cpu()[1])
    if like is None or not sys.platform.startswith("linux"):
        pytest.skip("no kernels are shipped for this processor")
    folder = tmp_path / "shipped" / like
    shipped_kernels.write(like, folder, [NAME])
    shipped._folder.cache_clear()
    return folder / "fused-add_float32.o"


def compiled_by(monkeypatch):
    """The names that are compiled from here on."""
    names, compile_it = [], Kernel.compiled
    monkeypatch.setattr(
        Kernel, "compiled", lambda self: names.append(self.name) or compile_it(self)
    )
    return names


def test_a_shipped_kernel_is_used_and_a_damaged_one_is_not(file, monkeypatch):
    names = compiled_by(monkeypatch)
    Kernel("fused:add", "float32").load()
    assert names == []
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    Kernel("fused:add", "float32").load()
    assert names == ["add_float32"]


def test_other_sources_are_compiled(file, monkeypatch):
    monkeypatch.setattr(object_cache, "sources_digest", lambda: "of other sources")
    shipped._folder.cache_clear()
    assert shipped.read("fused", "add_float32") is None


def test_another_processor_compiles(file, monkeypatch):
    features = target.cpu()[1]
    monkeypatch.setattr(target, "cpu", lambda: ("older", features - {"avx2", "avx512f"}))
    shipped._folder.cache_clear()
    assert shipped.read("fused", "add_float32") is None


def test_the_processor_that_a_machine_is_like():
    processors = shipped.PROCESSORS
    for name, features in processors.items():
        assert shipped.processor_of(features) == name
        assert shipped.processor_of(features | {"sha", "serialize"}) == name
        assert shipped.processor_of(features - {"avx2"}) is None
    zen5 = processors["znver4"] | {"avx512vp2intersect", "movdiri", "avxvnni"}
    assert shipped.processor_of(zen5) == "znver4"
    # Their kernels would be of another kind: bytes that are multiplied by one instruction.
    assert shipped.processor_of(processors["haswell"] | {"avxvnni"}) is None
    without_amx = processors["sapphirerapids"] - {"amx-tile", "amx-bf16", "amx-int8"}
    assert shipped.processor_of(without_amx) == "znver4"
    assert shipped.processor_of(frozenset({"neon", "bf16"})) is None


@pytest.mark.parametrize("processor", shipped.PROCESSORS)
def test_what_is_shipped_is_what_common_models_start_with(processor, monkeypatch):
    monkeypatch.setattr(target, "cpu", lambda: (processor, shipped.PROCESSORS[processor]))
    names = shipped_kernels.wanted()
    assert len(set(names)) == len(names)
    dtype = "float32" if processor in ("haswell", "cascadelake") else "bfloat16"
    tiles = "_tiles" if processor == "sapphirerapids" else ""
    for wanted in ("sampling:draw:", "program:program:", "gguf_pack:pack:Q4_0",
                   f"fused:rms_norm:{dtype}", f"weight_only{tiles}:product:4-half-none-{dtype}",
                   f"weight_only{tiles}:product:6-super-none-{dtype}"):  # fmt: skip
        assert wanted in names


@pytest.mark.slow
def test_kernels_of_amx_are_compiled_on_any_processor(tmp_path):
    """In a process of its own, as sources are written for one processor."""
    name = "weight_only_tiles:product:4-half-none-bfloat16"
    code = f"""
from pathlib import Path
from scripts import shipped_kernels
shipped_kernels.write("sapphirerapids", Path({str(tmp_path)!r}), [{name!r}])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "weight_only_tiles-product_4-half-none-bfloat16.o").stat().st_size > 10_000
