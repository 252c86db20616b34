"""Shared fixtures: toy models are written and loaded once a session.

Toy products gain nothing from a second thread, and OpenMP threads that spin for each other make
a busy machine crawl; so tests run on one thread, and those that are about threads ask for more.
"""

import logging
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from octavo.llm import LLM


# Of several processes, one would wait for the other if a file that takes long began last.
LONG_FILES = (
    "core/test_scheduler.py",
    "test_containers.py",
    "core/test_kv_manager_groups.py",
    "server/test_rows.py",
    "attention/test_cpu.py",
    "test_same_answer.py",
    "models/test_decoder.py",
    "meta/test_package.py",
    "test_llm.py",
    "test_kv_groups.py",
    "kernels/cpu/test_kernel.py",
    "kernels/cpu/test_object_cache.py",
    "server/test_run.py",
)
TESTS = Path(__file__).parent


def pytest_configure() -> None:
    """A shell starts its background jobs with SIGINT ignored, which their children inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, each as a whole; the others stay in their order."""
    place = {TESTS / name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import kit

    return kit.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def llm_without_weights(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`octavo.LLM(...)` makes one that answers with 200 letters, for programs of users."""
    import kit
    from octavo.config import OFFLINE_SCHEDULER, EngineConfig
    from octavo.core.plan import RunnerLimits, SampleSpec
    from octavo.core.policy_registry import create_policy
    from octavo.engine.fake import FakeRunner
    from octavo.llm import LLM
    from octavo.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tiny_folder)

    def make(
        model: str = "smollm2", *, scheduler: Any = OFFLINE_SCHEDULER, **options: Any
    ) -> "LLM":
        config = EngineConfig.from_options({"model": model, **options})
        limits = RunnerLimits(
            num_blocks=2049, block_size=16, block_bytes=1024, max_model_len=8192,
            vocab_size=tokenizer.vocab_size, eos_token_ids=(kit.EOS,), model=model,
            architecture="fake", dtype="none", kv_cache_dtype="none", device="none",
        )  # fmt: skip

        def letter(history: Sequence[int], spec: SampleSpec) -> int:
            return 97 + len(history) % 26 if spec.position < 200 else kit.EOS

        runner = FakeRunner(limits, letter)
        return LLM.over(runner, tokenizer, config, create_policy(scheduler))

    monkeypatch.setattr("octavo.LLM", make, raising=False)


@pytest.fixture(scope="session", autouse=True)
def _own_promises(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of other programs of this user change no test, and no test changes theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path_factory.mktemp("engines")))
        yield


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """A command run in this process sets up the log; the next test must not inherit that."""
    root = logging.getLogger("octavo")
    before = (root.handlers[:], root.propagate, root.level)
    yield
    root.handlers[:], root.propagate = before[0], before[1]
    root.setLevel(before[2])
