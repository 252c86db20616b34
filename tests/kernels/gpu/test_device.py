"""A toy model on the path of a GPU: the CPU's tokens, captured, chunked, cached, swapped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_engine_overlap import Workload
from tests.runner.asynchronous import LateCopies, engine_of, watch

import kit
from models import toys
from models.test_loader_quantized import fp8
from octavo import LLM, SamplingParams
from octavo.attention import triton
from octavo.config import EngineConfig
from octavo.kernels.gpu import device as gpu
from octavo.kernels.gpu.device import InterpretDevice
from octavo.models.registry import FAMILIES
from octavo.planner.plan import make_plan
from octavo.planner.target import CardDevice, Target
from octavo.runner.memory import PartOfMemory
from octavo.runner.model_runner import ModelRunner

PROMPTS = [[(7 * i + n) % 256 for i in range(n)] for n in (14, 15, 30, 31)]


def make(folder: Path, device: str, **options: Any) -> LLM:
    fixed = {"max_model_len": 64, "num_gpu_blocks_override": 20, "swap_space": 0}
    fixed |= {"dtype": "float32", "load_progress": False, "max_num_batched_tokens": 64}
    return LLM(str(folder), device=device, **(fixed | options))


def ask(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=t, seed=3, max_tokens=6, ignore_eos=True)
              for t in (0, 0.8, 0, 0.8)]  # fmt: skip
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def answers(folder: Path, device: str, **options: Any) -> tuple[list[list[int]], LLM]:
    llm = make(folder, device, **options)
    return ask(llm), llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.tiny(tmp_path_factory.mktemp("toy"), num_layers=2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers(folder, "cpu")[0]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    """All copies between host and device are made late, as a GPU may make them."""
    late = LateCopies()
    late.loading = True
    for module in (gpu, triton):
        monkeypatch.setattr(module, "copies_of", lambda _: late)
    return late


def test_replayed_steps_give_the_cpus_tokens(
    folder: Path, expected: list[list[int]], copies: LateCopies
) -> None:
    """Steps of 3 tokens and fewer are padded. No memory is used while a copy needs it."""
    llm = make(folder, "interpret", cuda_graph_sizes="2,4")
    copies.complete(copies.issued)  # what captured steps were made with
    copies.loading, copies.most = False, 0
    assert ask(llm) == expected
    assert copies.most == 2
    explained = llm.engine.executor.explain()
    assert explained["attention"] == "triton"
    assert explained["steps"] == "captured up to 4 tokens"
    assert llm.engine.executor.limits.device == "interpret"
    assert llm.engine.scheduler.plans_ahead


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"cuda_graph_sizes": "2,4", "async_scheduling": False},
        {"cuda_graph_sizes": "1,8", "max_num_batched_tokens": 8},
        {"cuda_graph_sizes": "4", "num_gpu_blocks_override": 6, "swap_space": 1,
         "preemption_mode": "swap"},
        {"cuda_graph_sizes": "4", "num_gpu_blocks_override": 6, "preemption_mode": "recompute"},
    ],
    ids=["eager", "step by step", "chunked", "swapped", "recomputed"],
)  # fmt: skip
def test_every_mode_gives_the_cpus_tokens(
    folder: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    found, llm = answers(folder, "interpret", **options)
    assert found == expected
    if "preemption_mode" in options:
        assert llm.engine.stats.preemptions > 0


@pytest.mark.slow
def test_memory_is_measured_by_a_full_step_and_captured_steps_are_a_term(
    folder: Path, expected: list[list[int]]
) -> None:
    options = {"num_gpu_blocks_override": None, "cuda_graph_sizes": "2", "max_num_seqs": 8}
    found, llm = answers(folder, "interpret", **options)
    assert found == expected
    terms = llm.engine.executor.limits.memory
    assert terms["step_peak"] == 2**26
    assert terms["captured"] > 2**26 * 2 // 64


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_each_family_gives_the_cpus_tokens(family: str, tmp_path: Path) -> None:
    """Captured, padded and chunked, with a cached prefix."""
    vocabulary = kit.write_tokenizer(tmp_path)
    folder = toys.save(toys.make(family, vocab_size=vocabulary), tmp_path)
    found = []
    for device in ("cpu", "interpret"):
        llm = LLM(
            str(folder), device=device, dtype="float32", load_progress=False, max_model_len=64,
            num_gpu_blocks_override=30, swap_space=0, max_num_batched_tokens=24,
            cuda_graph_sizes="" if device == "cpu" else "2,4",
        )  # fmt: skip
        prompts = [{"prompt_token_ids": toys.prompt(n)} for n in (5, 21, 40)]
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        answers = []
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
        assert answers[0] == answers[1]
        found.append(answers[0])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_random_workload_has_the_cpus_answers(folder: Path, copies: LateCopies) -> None:
    """Stopped and aborted requests, choices, penalties, log-probabilities, swapped blocks; and no
    result is awaited while the next step could be launched."""
    options: dict[str, Any] = {"max_model_len": 96, "block_size": 8, "swap_space": 0.002,
                               "num_gpu_blocks_override": 60}  # fmt: skip
    workload = Workload(4)
    found = []
    for name, sizes in (("cpu", ""), ("interpret", "2,8")):
        runner = make(folder, name, **options, cuda_graph_sizes=sizes).engine.executor
        engine = engine_of(runner, workload)
        if name == "interpret":
            copies.loading = False
            watch(engine, runner, copies)
        found.append(workload.run(engine))
    assert found[0] == found[1]
    assert copies.most > 1


@pytest.mark.slow
def test_a_checkpoint_in_fp8_gives_the_tokens_of_its_expanded_weights(tmp_path: Path) -> None:
    folder = fp8(tmp_path)
    kit.write_tokenizer(folder)
    expected = answers(folder, "cpu")[0]
    found, llm = answers(folder, "interpret", cuda_graph_sizes="2")
    assert found == expected
    assert "products on codes" in str(llm.engine.explain())


def test_inputs_are_copies() -> None:
    device = InterpretDevice(EngineConfig(device="interpret"))
    array = np.arange(3)
    tensor = device.tensor("positions", array)
    array[:] = 9
    assert torch.equal(tensor, torch.arange(3))


class SameMemory(Target):
    """Whatever is loaded, as `InterpretDevice.memory` has it."""

    def after(self, loaded: int) -> PartOfMemory:
        return self.before


@pytest.mark.slow
def test_a_plan_for_a_gpu_has_the_sums_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps and pools included, given the peak that is measured."""
    config = EngineConfig(
        model=str(kit.tiny(tmp_path)), device="interpret", load_progress=False, max_num_seqs=2,
        max_num_batched_tokens=4, cuda_graph_sizes="2", swap_space=0.001, dtype="float32",
    )  # fmt: skip
    runner = ModelRunner(config)
    limits = runner.limits
    runner.close()
    monkeypatch.setattr("octavo.planner.estimates._step_bytes", lambda *_: 2**26)
    found = InterpretDevice(config).memory()
    before = PartOfMemory(found.total, found.free, found.used)
    plan = make_plan(config, SameMemory("a card", CardDevice(config.graph_sizes), before))
    assert plan.memory == limits.memory
    assert plan.captured == limits.memory["captured"] > 2**24
    sizes = (plan.num_blocks + 1, plan.num_host_blocks, plan.block_bytes, plan.max_model_len)
    assert sizes == (
        limits.num_blocks, limits.num_host_blocks, limits.block_bytes, limits.max_model_len
    )  # fmt: skip
