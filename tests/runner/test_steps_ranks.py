"""Captured steps of two tensor-parallel ranks, whose sums are kernels: the bits of ordinary ones.

The ranks are threads of this process, which share memory as processes do.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests import kit
from tests.models import toys
from tests.runner.test_steps import answers, rows, steps

from octavo import LLM
from octavo.config import EngineConfig
from octavo.dist import shared_memory
from octavo.dist.base import SINGLE
from octavo.dist.shared_memory import SharedMemoryGroup
from octavo.models.loader import load_model
from octavo.runner import steps as runner_steps
from octavo.runner.batch import BatchBuilder
from octavo.runner.kv_cache import KVCache

pytestmark = pytest.mark.skipif(not shared_memory.is_available(), reason="needs memfd (Linux)")

CPU = kit.cpu_device()
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
PLANS = (
    rows((0, 1)), rows((0, 60)), rows((0, 30), (0, 1), (0, 50)), rows((30, 1), (1, 8), (50, 1)),
    rows(*[(40, 1)] * 6),
)  # fmt: skip


@torch.inference_mode()
def states(folder, dtype, group):
    """Of each plan, the hidden states of an ordinary step, and of a replay if there is one."""
    # With integers, all products are kernels whatever the processor.
    config = EngineConfig(model=str(folder), load_progress=False, quantization="int8")
    model = load_model(config, CPU, dtype, group)
    cache = KVCache(model.backend, model.attention_specs, 30, 16, dtype, CPU)
    builder = BatchBuilder(16, 20, CPU)
    for layer in cache.layers:
        layer.zero_()
    captured = runner_steps.capture_steps(CPU, model, cache, builder, 100)
    found = []
    for plan in PLANS:
        step = builder.build(plan)
        replayed = captured and captured.forward(step.token_ids, step.metas).clone()
        ordinary = model.forward(step.token_ids, cache.per_layer(step.metas), cache.layers)
        found.append((ordinary.clone(), replayed))
    return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float32), ("olmo2", torch.bfloat16)],
)
def test_a_captured_step_of_two_ranks_gives_the_bits_of_an_ordinary_one(tmp_path, family, dtype):
    """olmo2: rows of queries and keys, which the ranks divide, have a norm."""
    folder = toys.save(toys.make(family, **SIZES), tmp_path)
    first = SharedMemoryGroup.create(2)
    groups = [first, SharedMemoryGroup.join(first.path, 1, 2)]

    def rank(group):
        try:
            return states(folder, dtype, group)
        except BaseException:
            group.abort()
            raise

    with toys.one_thread(), ThreadPoolExecutor(2) as pool:
        both = list(pool.map(rank, groups))
    alone = states(folder, dtype, SINGLE)
    for group in groups:
        group.close()
    for (ordinary, replayed), (other, other_replayed), (whole, _) in zip(*both, alone, strict=True):
        assert torch.equal(replayed, ordinary)
        assert torch.equal(other_replayed, other)
        assert torch.equal(ordinary, other)  # all ranks have the whole sums
        distance = (ordinary.float() - whole.float()).norm() / whole.float().norm()
        assert distance < 0.2  # an int8 scale is that of the rank's part of a row


@pytest.mark.slow
def test_captured_ranks_of_an_engine_give_the_answers_of_ordinary_steps(tmp_path):
    """Of two processes: tokens and log-probabilities are the same bits."""
    folder = kit.tiny(tmp_path)
    options = {"dtype": "bfloat16", "quantization": "int8", "num_gpu_blocks_override": 64,
               "tensor_parallel_size": 2, "load_progress": False, "device": "cpu"}  # fmt: skip
    with LLM(str(folder), **options) as llm:
        assert steps(llm).startswith("captured up to")
        assert llm.engine.explain()["tensor parallel"] == "2 ranks over shared memory"
        captured = answers(llm)
    with LLM(str(folder), enforce_eager=True, **options) as llm:
        assert steps(llm) == "not captured"
        assert answers(llm) == captured
