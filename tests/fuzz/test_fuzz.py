"""Malformed files are a clean error or load: no other exception, no crash, no hang, no memory.

Here the cases that were findings, and the first few of each kind; `make fuzz` runs 10,000 of each.
"""

from collections.abc import Iterator

import pytest
from tests.fuzz.cases import KINDS, NUMBERS, Bench, Case, case, kept
from tests.fuzz.target import judge, memory_bound, open_tokenizer

COUNT = 75  # of each kind


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("fuzz") / "seeds")
    with memory_bound():
        yield bench


def plain(seed: str, file: str) -> Case:
    return Case("tokenizer" if seed == "spm" else "gguf", seed, file, [], [])


def test_every_seed_loads(bench: Bench) -> None:
    cases = [plain(name, "model.gguf") for name in bench.gguf]
    cases += [plain(name, "tokenizer_config.json") for name in bench.folders]
    ends = {each.seed: bench.judge(each) for each in cases}
    assert {seed: end.text for seed, end in ends.items() if end.kind != "loads"} == {}


def test_a_case_is_always_the_same(bench: Bench) -> None:
    for kind in KINDS:
        again = Case.parse(case(bench, kind, 11).text())
        assert repr(again) == repr(case(bench, kind, 11))
        assert bench.data(again) == bench.data(again)


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_files_are_clean_errors(bench: Bench, kind: str) -> None:
    ends = {number: bench.judge(case(bench, kind, number)) for number in range(COUNT)}
    assert {number: end.text for number, end in ends.items() if end.kind == "finding"} == {}
    assert {end.kind for end in ends.values()} == {"loads", "error"}


@pytest.mark.parametrize("name", kept())
def test_what_was_found_is_mended(bench: Bench, name: str) -> None:
    outcome = bench.judge(kept()[name])
    assert outcome.kind == "error", outcome.text


def test_each_kind_of_finding_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge sees another exception, memory, and a message without the file."""
    path = bench.folders["llama"]

    def fails(*_: object) -> None:
        raise TypeError("object of type 'int' has no len()")

    def grows(*_: object) -> None:
        open_tokenizer(path)
        bytearray(64 << 20)

    for broken, words in ((fails, "TypeError"), (grows, "MiB for files of")):
        monkeypatch.setattr("tests.fuzz.target.open_model", broken)
        outcome = judge(path, 1000)
        assert outcome.kind == "finding"
        assert words in outcome.text
    assert len(NUMBERS) > 20
