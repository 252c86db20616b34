"""The processor as kernels see it, and as ONEDNN_MAX_CPU_ISA limits it."""

import pytest

from octavo import log
from octavo.kernels.cpu import target


@pytest.fixture
def limited(monkeypatch):
    def limit(name):
        monkeypatch.setattr(log, "instruction_limit", lambda: name)
        target.cpu.cache_clear()
        return target.cpu()

    yield limit
    monkeypatch.undo()
    target.cpu.cache_clear()


def test_no_limit_is_this_processor(limited):
    name, features = limited("")
    assert name
    assert "sse2" in features or "neon" in features


@pytest.mark.parametrize(
    ("limit", "name", "absent"),
    [
        ("AVX2", "haswell", ("avx512f", "avx512vnni", "amx-tile")),
        ("AVX512_CORE", "skylake-avx512", ("avx512bf16", "avx512fp16", "amx-bf16")),
        ("AVX512_CORE_BF16", "cooperlake", ("avx512fp16", "amx-tile")),
    ],
)
def test_a_limit_takes_away_later_instructions(limited, limit, name, absent):
    found, features = limited(limit)
    assert found == name
    assert not features & set(absent)


def test_tiles_need_all_their_features(monkeypatch):
    monkeypatch.setattr(target, "cpu", lambda: ("some", frozenset(["amx-tile", "avx512bf16"])))
    target.has_tiles.cache_clear()
    assert not target.has_tiles()
    assert target.int8_unit() == "vector"
    assert target.has_bf16()
    monkeypatch.undo()
    target.has_tiles.cache_clear()
