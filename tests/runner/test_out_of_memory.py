"""A device that is out of memory: a refusal at start, a step in parts later."""

import logging

import msgspec
import pytest
import torch
from tests import kit
from tests.runner.accelerator import FakeAccelerator

from octavo import LLM, SamplingParams, devices
from octavo.config import EngineConfig
from octavo.core.plan import BlockCopy, PlanRow, SampleSpec, StepPlan
from octavo.errors import EngineError, NotEnoughMemoryError
from octavo.kernels.gpu import memory
from octavo.runner import model_runner
from octavo.runner.device import Accelerator, create_device
from octavo.runner.model_runner import ModelRunner
from octavo.runner.out_of_memory import halves, joined


@pytest.fixture(autouse=True)
def _devices(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {})
    devices.register("accelerator", FakeAccelerator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.tiny(tmp_path_factory.mktemp("toy"), num_layers=2)


OPTIONS = {"device": "accelerator", "dtype": "float32", "load_progress": False,
           "max_model_len": 128, "max_num_seqs": 8, "swap_space": 0.001}  # fmt: skip


def make(folder, **more):
    return ModelRunner(EngineConfig(model=str(folder), **{**OPTIONS, **more}))


def row(name, count, first_block, samples=1, start=0, **more):
    specs = tuple(SampleSpec(SamplingParams(temperature=1, seed=n), n, n, 0)
                  for n in range(samples))  # fmt: skip
    ids = tuple((7 * n + first_block) % 250 for n in range(start, start + count))
    table = tuple(range(first_block, first_block + -(-(start + count) // 16)))
    return PlanRow(name, ids, start, (table,), specs, **more)


def test_the_fake_is_an_accelerator():
    assert isinstance(create_device(EngineConfig(device="accelerator")), Accelerator)
    assert not isinstance(kit.cpu_device(), Accelerator)


def test_a_step_that_does_not_fit_is_computed_in_parts_with_the_same_results(folder, caplog):
    runner = make(folder, num_gpu_blocks_override=20)
    device = runner.device
    targets = {"num_prompt_logprobs": 2, "prompt_targets": tuple(range(1, 40))}
    plan = StepPlan(3, (row("a", 3, 1), row("b", 40, 2, 3, **targets), row("c", 17, 6, 0)))
    for layer in runner.cache.layers:
        layer.zero_()
    runner.execute(StepPlan(1, (row("z", 16, 12, 0),)))
    whole = runner.execute(plan)
    kept = [layer.clone() for layer in runner.cache.layers]
    for layer in runner.cache.layers:
        layer[1:10] = 0
    device.calls.clear()
    device.most = 20
    copies = (BlockCopy("copy", 12, 13), BlockCopy("out", 12, 0))
    with caplog.at_level(logging.WARNING):
        parts = runner.execute(StepPlan(3, plan.rows, copies))
    assert parts == whole
    for layer, before in zip(runner.cache.layers, kept, strict=True):
        assert torch.allclose(layer[1:10], before[1:10], atol=1e-6)
    # 60 tokens fail, after which 30 are the most of a part; each copy is made once.
    assert device.calls[:3] == [[(12, 13)], [(12, 0)], 60]
    assert device.calls.count("release") == caplog.text.count("out of memory in a step") == 1
    assert [n for n in device.calls if isinstance(n, int)] == [60, 3, 20, 20, 17]
    assert device.calls.count("synchronize") == 2  # parts that draw nothing
    device.calls.clear()
    runner.execute(StepPlan(4, plan.rows))  # now known
    assert "release" not in device.calls


def test_a_step_of_one_token_that_does_not_fit_says_what_to_change(folder):
    runner = make(folder, num_gpu_blocks_override=20)
    runner.device.most = 0
    with pytest.raises(EngineError, match="step of 1 token; start with a lower gpu_memory_utiliz"):
        runner.execute(StepPlan(1, (row("a", 2, 1),)))


def test_the_engine_answers_as_if_nothing_had_happened(folder):
    options = {**OPTIONS, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 64}
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=5, ignore_eos=True)
    prompts = [[n, *range(30)] for n in range(6)]
    llm = LLM(str(folder), **options)

    def answers():
        found = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in found]

    expected = answers()
    llm.reset_prefix_cache()
    device = llm.engine.executor.device
    device.most = 33
    assert answers() == expected
    assert "release" in device.calls


def test_drafts_stay_with_the_token_before_them():
    samples = tuple(SampleSpec(SamplingParams(), 0, 0, n, offset=2 - n) for n in range(3))
    drafted = PlanRow("a", (1, 2, 3), 5, ((1,),), samples)
    assert halves((drafted,)) == ((), (drafted,))
    longer = msgspec.structs.replace(drafted, token_ids=tuple(range(9)))
    (first,), (second,) = halves((longer,))
    assert (first.token_ids, first.samples) == (tuple(range(4)), ())
    assert (second.token_ids, second.start, second.samples) == (tuple(range(4, 9)), 9, samples)


def test_rows_are_divided_by_their_tokens():
    rows = tuple(row(name, count, 1) for name, count in (("a", 1), ("b", 1), ("c", 9), ("d", 1)))
    first, second = halves(rows)
    assert [r.request_id for r in first] == ["a", "b"]
    assert first + second == rows
    results = tuple(model_runner.RowResult(r.request_id) for r in rows)
    assert joined(results[:2], results[2:]) == results


def test_an_accelerator_measures_a_full_step_and_warms_up(folder):
    runner = make(folder, max_num_batched_tokens=70, num_gpu_blocks_override=None,
                  kv_cache_memory_bytes=None)  # fmt: skip
    tokens = [n for n in runner.device.calls if isinstance(n, int)]
    assert tokens[0] == 70  # by eight rows
    assert tokens[-6:] == [1, 1, 1, 5, 5, 1]
    assert runner.limits.memory["step_peak"] > 0


@pytest.mark.parametrize(
    ("phase", "says"),
    [
        ("load", r"too little memory for the weights of .*2.00 GiB\); set quantization='int8'"),
        ("_size", r"a step of max_num_batched_tokens=64 and max_num_seqs=8 .* to 32 or less"),
        ("_capture", r"the KV cache and captured steps .*set gpu_memory_utilization below 0.9, or"),
    ],
)
def test_at_start_the_option_to_change_is_named(folder, monkeypatch, phase, says):
    def exhausted(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(model_runner if phase == "load" else ModelRunner, phase, exhausted)
    with pytest.raises(NotEnoughMemoryError, match=says):
        make(folder, max_num_batched_tokens=64)


def test_what_says_that_memory_is_exhausted():
    assert memory.is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert memory.is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling ..."))
    assert not memory.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not memory.is_out_of_memory(ValueError("CUBLAS_STATUS_ALLOC_FAILED"))
