"""What is compiled at start serves every later step: the launches of steps, specialized as Triton
does it, without a GPU and without running a kernel."""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

import kit
from models import toys
from octavo import devices
from octavo.attention.triton import TritonAttention
from octavo.config import EngineConfig
from octavo.core.plan import PlanRow, SampleSpec, StepPlan
from octavo.kernels.gpu import linear
from octavo.kernels.gpu.device import WARM_UP_SIZES, InterpretDevice
from octavo.kernels.gpu.staging import Staging
from octavo.kernels.sampling import OK, Items
from octavo.params import SamplingParams
from octavo.runner import steps
from octavo.runner.model_runner import ModelRunner

Keys = dict[tuple[str, str], list[Any]]


class Recorded(InterpretDevice):
    """A GPU on which kernels are launched and nothing happens."""

    warm_up_sizes = WARM_UP_SIZES

    def __init__(self, config: EngineConfig) -> None:
        self._graph_sizes = config.graph_sizes

    def launch_draws(self, logits: torch.Tensor, items: Items) -> torch.Tensor:
        return super().launch_draws(logits, items).fill_(OK)  # not what no kernel has written

    def take_drawn(self, token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
        super().take_drawn(token_ids, drawn)
        token_ids.clamp_(min=0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Keys:
    """The keys under which Triton would look for compiled kernels."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binders: dict[Any, Callable[..., Any]] = {}
    keys: Keys = {}

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel not in binders:
            binders[kernel] = jit.create_function_from_signature(
                kernel.signature, kernel.params, backend
            )
        _, specialization, rest = binders[kernel](*args, **options)
        keys[kernel.__name__, f"{specialization} {rest}"] = [*args]

    monkeypatch.setattr(jit.JITFunction, "run", run)
    monkeypatch.setattr(steps, "_replays", lambda *_: True)
    monkeypatch.setattr(
        TritonAttention, "capabilities",
        dataclasses.replace(TritonAttention.capabilities, devices=("cpu",)),
    )  # fmt: skip
    monkeypatch.setattr(devices, "_registered", {"recorded": Recorded})
    return keys


def plans(blocks: int) -> Iterator[StepPlan]:
    """Steps of any number of rows and tokens, drawn in any way."""
    chance = random.Random(0)
    ways = [{"temperature": 0}, {"temperature": 1}, {"top_k": 3, "min_p": 0.1}, {"top_p": 0.5},
            {"temperature": 0, "logprobs": 5}, {"presence_penalty": 1.0}]  # fmt: skip
    for number, count in enumerate((1, 1, 2, 3, 7, 15, 16, 17, 33, 64)):
        rows = []
        for name in range(count):
            tokens = 1 if number % 2 else chance.choice((1, 2, 5, 16, 31, 100 // count))
            start = chance.choice((0, 1, 15, 16, 40, 300))
            table = tuple(chance.randrange(1, blocks) for _ in range(-(-(start + tokens) // 16)))
            spec = SampleSpec(SamplingParams(**chance.choice(ways)), name, 0, 0)
            samples = chance.choice(((spec,), (), (spec, _choice(spec, 1))))
            rows.append(PlanRow(str(name), (1,) * tokens, start, (table,), samples))
        yield StepPlan(number, tuple(rows))


def _choice(spec: SampleSpec, index: int) -> SampleSpec:
    return SampleSpec(spec.params, spec.seed, index, spec.position)


def make(target: Path, folder: Path | None = None, **options: Any) -> ModelRunner:
    """Of the toy in `folder`; else of one that is written to `target`."""
    fixed: dict[str, Any] = {
        "device": "recorded", "dtype": "float16", "max_model_len": 512,
        "num_gpu_blocks_override": 40, "load_progress": False, "cuda_graph_sizes": "1,2,8",
    }  # fmt: skip
    return ModelRunner(EngineConfig(model=str(folder or kit.tiny(target)), **(fixed | options)))


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"quantization": "int4"},
     {"quantization": "int8", "kv_cache_dtype": "int8"}, {"quantization": "fp8"},
     {"deterministic": True, "enforce_eager": True}],
    ids=["plain", "bfloat16", "int4", "int8", "fp8", "deterministic"],
)  # fmt: skip
def test_nothing_is_compiled_while_serving(
    tmp_path: Path, launched: Keys, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(linear, "parts_of", lambda outputs, inputs: 2)
    runner = make(tmp_path, **options)
    ready = dict(launched)
    once = Counter(name for name, _ in ready)
    assert (once["attend"], once["join"], once["rotate_and_write"]) == (2, 1, 1)
    for plan in plans(40):
        runner.execute(plan)
    assert not {key: args for key, args in launched.items() if key not in ready}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_nothing_is_compiled_while_serving_a_mixture_of_experts(
    tmp_path: Path, launched: Keys, quantization: str | None
) -> None:
    vocabulary = kit.write_tokenizer(tmp_path)
    toys.save(toys.make("qwen3_moe", vocab_size=vocabulary), tmp_path)
    runner = make(tmp_path, folder=tmp_path, quantization=quantization)
    ready = dict(launched)
    once = Counter(name for name, _ in ready)
    assert (once["multiply_experts"], once["sort_pairs"], once["route"]) == (6, 3, 1)
    for plan in plans(40):
        runner.execute(plan)
    assert not {key: args for key, args in launched.items() if key not in ready}


def test_without_a_warm_up_kernels_would_be_compiled_while_serving(
    tmp_path: Path, launched: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above can fail."""
    monkeypatch.setattr(Recorded, "warm_up_sizes", ())
    runner = make(tmp_path, quantization="int4")
    ready = dict(launched)
    for plan in plans(40):
        runner.execute(plan)
    assert {name for name, _ in launched.keys() - ready.keys()} >= {"multiply_codes"}


def test_a_step_launches_what_its_rows_need(
    tmp_path: Path, launched: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention: one launch a layer for rows of few queries and few keys, which are not joined.
    A captured step also joins, and has large tiles where a row could be long enough for them."""
    runner = make(tmp_path, num_gpu_blocks_override=80, cuda_graph_sizes="2,64")
    layers, run, send = len(runner.model.attention_specs), jit.JITFunction.run, Staging._send
    counts: Counter[str] = Counter()

    def counted(kernel: Any, *args: Any, **options: Any) -> None:
        counts[kernel.__name__] += 1
        run(kernel, *args, **options)

    def sent(staging: Staging, *args: Any) -> None:
        counts["copies to the device"] += 1
        send(staging, *args)

    monkeypatch.setattr(jit.JITFunction, "run", counted)
    monkeypatch.setattr(Staging, "_send", sent)

    def launches(rows: int, start: int, captured: Any) -> Counter[str]:
        runner.captured = captured
        spec = SampleSpec(SamplingParams(temperature=0), 0, 0, 0)
        table = ((1,) * (start // 16 + 1),)
        runner.submit(StepPlan(1, (PlanRow("0", (1,), start, table, (spec,)),)))
        counts.clear()
        ahead = [PlanRow(str(n), (-1,), start, table, (spec,), from_draw=0) for n in range(rows)]
        runner.submit(StepPlan(2, tuple(ahead)))
        return counts

    captured = runner.captured
    for rows, start, how, attends, joins in (
        (64, 255, None, 1, 0), (64, 256, None, 1, 1), (2, 20, captured, 1, 1),
        (64, 20, captured, 2, 1),
    ):  # fmt: skip
        found = launches(rows, start, how)
        assert (found["attend"], found["join"]) == (layers * attends, layers * joins)
        assert found["take_drawn"] == found["survey"] == found["draw"] == 1
        assert found["copies to the device"] == 3  # inputs, work lists, draws


class _NoWaits(TorchFunctionMode):
    """Raises for a copy between the host and a device that waits for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        moved = func is torch.Tensor.to and any(isinstance(a, str | torch.device) for a in args)
        # Memory of copies are bytes.
        read = func is torch.Tensor.numpy and args[0].dtype != torch.uint8
        assert not moved, func
        assert not read, func
        assert func not in (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist), func
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass
class _Mask:
    size: int

    def words(self) -> Any:
        return np.full(self.size, 0x55555555, np.int32)


def test_launching_a_step_waits_for_no_copy(tmp_path: Path, launched: Keys) -> None:
    """Whatever its rows ask for, captured or not."""
    runner = make(tmp_path)
    mask = _Mask(-(-runner.limits.vocab_size // 32))
    ways: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"logprobs": 2}, {"top_p": 0.5, "top_k": 3},
        {"repetition_penalty": 1.2, "logprobs": 1}, {"allowed_token_ids": [1, 2]},
        {"logit_bias": {5: 1.0}},
    ]  # fmt: skip
    for masked in (None, mask):
        rows = []
        for name, way in enumerate(ways):
            spec = SampleSpec(SamplingParams(**way), name, 0, 0, mask=masked)
            rows.append(PlanRow(str(name), (1,), 20, ((1 + 2 * name, 2 + 2 * name),), (spec,)))
        targets = PlanRow("p", (1, 2, 3), 0, ((30,),), (), 2, (2, 3))
        for tokens in (rows[:2], rows, [*rows, targets]):
            with _NoWaits():  # type: ignore[no-untyped-call]
                runner.submit(StepPlan(1, tuple(tokens)))
