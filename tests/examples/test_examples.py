"""Every example runs, and prints what its docstring says.

Here each runs in this process over an executor without weights (`engine/fake.py`), so that all
take seconds together; the attention backend, which needs tensors, over a toy; clients over the
tests' scripted server. The slow test runs each as a user does, over the embedded model.
"""

import ast
import functools
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.docs import ROOT

import fake_engine
import tool_model
from octavo import LLM
from octavo.async_llm import AsyncLLM
from octavo.cli import run_batch
from octavo.config import EngineConfig
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH, Server, write_model

EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NEEDS_SERVER = {"openai_client", "langchain_client"}
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as a program in this process; returns what it printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def fake(run: Run, llm_without_weights: None) -> Run:
    """`run`, with an LLM that computes nothing."""
    return run
    return run


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model for an engine process whose answers are the alphabet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        yield write_model(tmp_path_factory.mktemp("examples") / "scripted")


@pytest.fixture(scope="module")
def url(scripted: Path) -> Iterator[str]:
    with Server(scripted, {}) as server:
        yield f"{server.url}/v1"


def test_offline_batch(fake: Run) -> None:
    printed = fake("offline_batch")
    assert printed.count(" -> ") == 4
    assert re.search(r"^96 tokens, \d+ tokens/s$", printed, re.MULTILINE)


def test_chat_finds_the_earlier_turns_in_the_cache(fake: Run) -> None:
    cached = re.findall(r"\[(\d+) prompt tokens, (\d+) cached\]", fake("chat"))
    (_, first), (second_prompt, second), (_, third) = cached
    assert int(first) == 0
    assert 0 < int(second) < int(second_prompt)
    assert int(third) > int(second)


def test_streaming_leaves_nothing_running(fake: Run) -> None:
    printed = fake("streaming")
    assert "first token after" in printed
    assert "[stopped; 0 requests are running]" in printed


def test_structured_output(fake: Run) -> None:
    planet, larger, date = fake("structured_output").splitlines()
    assert re.fullmatch(r"planet: .*, (rocky|gas|ice), \d+ moons", planet)
    assert larger in ("larger: yes", "larger: no")
    assert re.fullmatch(r"date: \d{4}-\d\d-\d\d", date)


def test_tools_calls_functions_with_arguments_of_their_schemas(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tool_model.write(tmp_path / "hermes")

    def make(model: str, **options: Any) -> LLM:
        config = EngineConfig(model=str(folder), swap_space=0, **options)
        return LLM.over(fake_engine.create(config), load_tokenizer(folder), config)

    monkeypatch.setattr("octavo.LLM", make, raising=False)
    for turns in ("1", "2"):
        *calls, answer = run("tools", "--turns", turns).splitlines()
        assert calls
        assert all(re.fullmatch(r"(in_stock|price)\(\{.*\}\) -> .*", line) for line in calls)
        assert answer


def test_reasoning(fake: Run) -> None:
    found = re.fullmatch(r"reasoning: (.*)\nanswer: (yes|no)\n", fake("reasoning"), re.DOTALL)
    assert found is not None
    assert "</think>" not in found[1]


class UnhurriedLLM(AsyncLLM):
    """Its engine takes its time for a token, so that a reader on a busy machine keeps up."""

    def generate(self, prompt: str, *args: Any, **options: Any) -> Any:
        return super().generate(f"!slow {prompt}", *args, **options)


def test_async_engine(run: Run, scripted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: str) -> AsyncLLM:
        config = EngineConfig(model=model, swap_space=0, max_model_len=2048)
        return UnhurriedLLM.over(config, "fake_engine:create")

    monkeypatch.setattr("octavo.AsyncLLM", make, raising=False)
    *lines, last = sorted(run("async_engine", "--model", str(scripted)).splitlines())
    assert last == "'Water boils at' -> 'abcdefghijklmnopqrstuvwx'"
    assert len(lines) == 3
    assert re.fullmatch(r"'Once upon a time' stopped after 1\d tokens", lines[0])


def test_batch_file(run: Run, scripted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = functools.partial(run_batch.run, executor="fake_engine:create")
    monkeypatch.setattr(run_batch, "run", answer)
    printed = run("batch_file", "--model", str(scripted))
    assert sorted(line.split(":")[0] for line in printed.splitlines()) == ["sea", "sky", "sum"]
    assert printed.count(": abcdefghijklm") == 3


def test_priorities_put_the_urgent_and_the_short_first(fake: Run) -> None:
    lines = fake("priorities").splitlines()
    assert lines[0].startswith("priority -1")
    tokens = [int(length) for length in re.findall(r"(\d+) prompt tokens", "\n".join(lines))]
    assert max(tokens[:3]) < min(tokens[3:])
    assert lines[-1] == "weight_fn failed 0 times"


def test_a_latency_target_is_reported(fake: Run) -> None:
    lines = fake("latency_target").splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["fifo", "slo"]
    assert "tokens per step at most" in lines[2]


def test_a_custom_scheduler_serves_every_user_before_a_third_request_of_one(fake: Run) -> None:
    *lines, last = fake("custom_scheduler").splitlines()
    assert {line.split()[1] for line in lines[:4]} == {"1", "2", "3"}
    assert {line.split()[1] for line in lines[-3:]} == {"1"}
    assert last.startswith("policy errors: 0, metrics: {'most_tokens':")


def test_a_custom_attention_backend_gives_the_same_answer(run: Run, tiny_folder: Path) -> None:
    first, second = run("custom_attention", "--model", str(tiny_folder)).splitlines()
    assert first.startswith("gather ")
    assert second.startswith("torch ")
    assert first.split(None, 1)[1] == second.split(None, 1)[1]


def test_a_shared_prefix_is_found(fake: Run) -> None:
    printed = fake("shared_prefix")
    cached = [int(found) for found in re.findall(r"\[(\d+) of \d+ cached\]", printed)]
    assert min(cached[2:]) > 400  # each passage was seen in one of the first two questions
    assert re.search(r"hit rate: [1-9]\d%", printed)


def test_the_openai_client(run: Run, url: str) -> None:
    printed = run("openai_client", "--url", url, "--model", "scripted")
    assert "answer: abc" in printed
    assert "stream: abc" in printed
    assert printed.count(" -> 'abc") == 2
    assert "'param': 'temperature'" in printed


def test_langchain(run: Run, url: str) -> None:
    pytest.importorskip("langchain_openai", reason="`make clients` runs it in its environment")
    printed = run("langchain_client", "--url", url, "--model", "scripted")
    assert "chain: abc" in printed
    assert "stream: abc" in printed
    assert printed.count("batch: abc") == 2


def test_every_example_has_a_test_and_a_line_in_the_index() -> None:
    tests = " ".join(name for name in globals() if name.startswith("test_"))
    source = Path(__file__).read_text()
    index = (EXAMPLES / "README.md").read_text()
    for name in NAMES:
        assert f'("{name}"' in source, f"no test runs {name}: {tests}"
        assert f"({name}.py)" in index
    assert set(re.findall(r"\((\w+)\.py\)", index)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_says_what_it_prints(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text)) or ""
    assert "rints" in docstring
    assert f"python examples/{name}.py" in docstring
    assert len(text.splitlines()) <= 120


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_SERVER])
def test_an_example_over_the_embedded_model(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
