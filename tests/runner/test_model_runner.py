"""Sizing of the KV cache from a device's memory, and plans executed on a toy model."""

import gc
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from tests import kit

from octavo import devices
from octavo.config import EngineConfig
from octavo.core.plan import NOT_DRAWN, BlockCopy, PlanRow, SampleSpec, StepPlan
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.kernels.cpu.device import CpuDevice
from octavo.params import SamplingParams
from octavo.runner import model_runner, step_memory
from octavo.runner.memory import GIB
from octavo.runner.model_runner import ModelRunner, resolve_dtype
from octavo.runner.promises import Promises
from octavo.runner.sampler import NOT_NUMBERS


@dataclass
class Memory:
    total: int = 4 * GIB
    free: int = 3 * GIB
    used: int = GIB


class FixedDevice(CpuDevice):
    """The CPU with memory that is always the same, and a record of what was asked of it."""

    name = "fixed"
    peak = 1000

    def __init__(self, config):
        super().__init__(config)
        self.calls = []

    def start(self):
        self.calls.append("start")

    def warm_up(self):
        self.calls.append("warm_up")

    def memory(self):
        return Memory()

    def peak_of(self, step):
        self.calls.append("peak_of")
        step()
        return self.peak


class SeparateDevice(FixedDevice):
    """As if the host's memory were another."""

    name = "separate"
    shares_host_memory = False


@pytest.fixture
def folder(tmp_path):
    return kit.tiny(tmp_path)


@pytest.fixture(autouse=True)
def _devices(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "engines"))
    monkeypatch.setattr(devices, "_registered", {})
    for kind in (FixedDevice, SeparateDevice):
        devices.register(kind.name, kind)


def make(folder, **options):
    given = {"device": "fixed", "dtype": "float32", "load_progress": False, "max_model_len": 128,
             "huge_pages": False, "max_num_seqs": 8, **options}  # fmt: skip
    return ModelRunner(EngineConfig(model=str(folder), **given))


def sampled(index=0, **params):
    params.setdefault("temperature", 0)
    return SampleSpec(SamplingParams(**params), seed=index, index=index, position=0)


GREEDY = sampled()


def row(name, tokens, blocks, start=0, samples=(GREEDY,), **more):
    return PlanRow(name, tuple(tokens), start, (tuple(blocks),), tuple(samples), **more)


# --- setting up --------------------------------------------------------------------------------


def test_dtype_auto_is_the_device_s_choice(caplog):
    class Device:
        name, dtypes = "half", (torch.float16,)

        def default_dtype(self):
            return torch.float16

    assert resolve_dtype("auto", Device()) == torch.float16
    assert resolve_dtype("float16", Device()) == torch.float16
    with caplog.at_level(logging.INFO):
        assert resolve_dtype("bfloat16", Device()) == torch.float32
    assert "device half computes bfloat16 in float32" in caplog.text


def test_the_kv_cache_gets_what_memory_leaves(folder):
    runner = make(folder, gpu_memory_utilization=0.5, max_num_batched_tokens=512)
    terms, vocab = runner.limits.memory, runner.limits.vocab_size
    # The probe has 128 of 512 tokens; logits of 8 rows are in float32, four times over.
    each = step_memory.activation_bytes(runner.model.spec, runner.model.attention_specs, 4)
    assert terms["step_peak"] == step_memory.full_peak(1000, 128, 512, each) + 4 * 4 * 8 * vocab
    assert (terms["total"], terms["limit"], terms["used"]) == (4 * GIB, 2 * GIB, GIB)
    budget = GIB - terms["step_peak"]
    assert terms["swap"] == budget // 4
    assert terms["kv"] == budget - budget // 4
    assert runner.limits.num_blocks == 1 + terms["kv"] // runner.limits.block_bytes
    assert runner.limits.device == "fixed"
    assert runner.device.calls == ["start", "peak_of", "warm_up"]


@pytest.mark.parametrize(
    "options", [{"device": "separate"}, {"swap_path": "."}], ids=["device", "disk"]
)
def test_a_swap_pool_elsewhere_takes_nothing_from_the_kv_cache(folder, tmp_path, options):
    if "swap_path" in options:
        options = {"swap_path": str(tmp_path)}
    terms = make(folder, swap_space=0.01, gpu_memory_utilization=0.3, **options).limits.memory
    assert terms["swap"] == int(0.01 * GIB)
    assert terms["kv"] == terms["limit"] - terms["used"] - terms["step_peak"]


def test_a_given_size_measures_nothing(folder):
    for options in ({"num_gpu_blocks_override": 9}, {"kv_cache_memory_bytes": 2**20}):
        runner = make(folder, swap_space=0, max_model_len=64, **options)
        assert runner.limits.memory == {}
        assert "peak_of" not in runner.device.calls
    assert runner.limits.num_blocks == 1 + 2**20 // runner.limits.block_bytes


def test_the_probe_stays_within_the_prepared_positions(folder, monkeypatch):
    """A step of 256 tokens would read past the rotary table of a window of 40."""
    asked = []
    execute = ModelRunner.execute

    def spy(self, plan):
        asked.append(len(plan.rows[0].token_ids))
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", spy)
    make(folder, max_model_len=40)
    assert asked == [40]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu_memory_utilization": 0.001}, "gpu_memory_utilization=0.001 allows 4.10 MiB of 4.00"),
        ({"num_gpu_blocks_override": 4}, "max_model_len is 128 but the KV cache holds 64 tokens"),
        ({"kv_cache_memory_bytes": 10}, "no KV block fits"),
    ],
)
def test_what_cannot_fit_is_refused_before_the_weights_are_read(folder, monkeypatch, options, says):
    monkeypatch.setattr(model_runner, "load", None)
    with pytest.raises(ConfigError, match=says):
        make(folder, **options)
    assert not list(Path(os.environ["OCTAVO_RUNTIME_DIR"]).glob("*.json"))


def test_an_engine_promises_its_memory_until_it_is_closed(folder):
    promises = Promises.of_user()
    first = make(folder, gpu_memory_utilization=0.4)
    (promise,) = promises.others()
    terms = first.limits.memory
    assert promise.model == str(folder)
    assert promise.base == GIB
    held = (first.limits.num_blocks - 1 + first.limits.num_host_blocks) * first.limits.block_bytes
    assert promise.promised == held + terms["step_peak"]
    second = make(folder)  # 3 GiB are free, of which the first has been promised 0.6
    assert second.limits.memory["limit"] == GIB + int(0.9 * (3 * GIB - promise.promised))
    assert len(promises.others()) == 2
    first.close()
    del second
    gc.collect()
    assert promises.others() == []


def test_the_engines_of_one_server_divide_the_memory(folder):
    """Each counts those that have their part; the last does not get what is left over."""
    share = {"gpu_memory_utilization": 0.9, "data_parallel_size": 2}
    first, second = make(folder, **share), make(folder, **share)
    parts = [one.limits.memory["kv"] for one in (first, second)]
    assert parts[0] == pytest.approx(parts[1], rel=0.01)
    first.close()
    again = make(folder, **share)  # started again, beside the second one
    assert again.limits.memory["kv"] == pytest.approx(parts[0], rel=0.01)
    for one in (second, again):
        one.close()


def test_too_little_memory_is_refused_with_its_remedy(folder):
    with pytest.raises(NotEnoughMemoryError, match=r"no KV block fits.*kv_cache_memory_bytes"):
        make(folder, kv_cache_memory_bytes=10)


def test_a_window_beyond_the_kv_cache_is_refused_if_asked_for(folder, caplog):
    with pytest.raises(ConfigError, match="max_model_len is 128 but the KV cache holds 64 tokens"):
        make(folder, num_gpu_blocks_override=4)
    with caplog.at_level(logging.WARNING, logger=model_runner.__name__):
        runner = make(folder, num_gpu_blocks_override=4, max_model_len=None, swap_space=0)
    assert runner.limits.max_model_len == 64
    assert "max_model_len is 64, not the model's" in caplog.text


# --- executing ---------------------------------------------------------------------------------


@pytest.fixture
def runner(folder):
    return make(folder, num_gpu_blocks_override=12, swap_space=0.001)


def tokens_of(result):
    return {r.request_id: r.choices for r in result.rows}


def test_rows_answer_in_the_plan_s_order_and_alone_as_together(runner):
    a = row("a", range(20), (1, 2))
    b = row("b", range(5, 40), (3, 4, 5))
    together = runner.execute(StepPlan(3, (a, b)))
    assert together.step == 3
    assert [r.request_id for r in together.rows] == ["a", "b"]
    alone = tokens_of(runner.execute(StepPlan(4, (b,))))
    assert alone["b"] == tokens_of(together)["b"]


def test_a_row_that_draws_nothing_gives_nothing(runner):
    chunk = row("a", range(16), (1, 2), samples=())
    assert tokens_of(runner.execute(StepPlan(1, (chunk,)))) == {"a": ()}
    rest = row("a", range(16, 20), (1, 2), start=16)
    whole = row("b", range(20), (3, 4))
    found = tokens_of(runner.execute(StepPlan(2, (rest, whole))))
    assert found["a"] == found["b"]


def test_a_plan_without_rows_only_copies(runner):
    runner.execute(StepPlan(1, (row("a", range(16), (1,), samples=()),)))
    result = runner.execute(StepPlan(2, (), (BlockCopy("copy", 1, 5),)))
    assert result.rows == ()
    for layer in runner.cache.layers:
        assert torch.equal(layer[1], layer[5])


def test_choices_of_one_prompt_draw_from_one_row(runner):
    choices = [sampled(index, temperature=2.0, seed=1) for index in range(6)]
    other = row("b", range(30), (3, 4))
    found = tokens_of(
        runner.execute(StepPlan(1, (row("a", range(9), (1,), samples=choices), other)))
    )
    assert len(found["a"]) == 6
    assert len(set(found["a"])) > 1
    assert found["b"] == tokens_of(runner.execute(StepPlan(2, (other,))))["b"]


def test_drafts_are_verified_by_the_draws(runner, monkeypatch):
    """Beside other rows, and with logits in parts: tokens up to the first that is not drafted."""
    prompt, plain = list(range(20)), []
    for step in range(4):
        tokens = prompt if not plain else plain[-1:]
        one = row("a", tokens, (1, 2), start=19 + step if plain else 0)
        plain.append(runner.execute(StepPlan(step, (one,))).rows[0].choices[0][0])
    other, triple = row("b", range(30), (3, 4)), [sampled(index, seed=1) for index in range(3)]
    third = row("c", range(9), (5,), samples=triple)
    expected = tokens_of(runner.execute(StepPlan(5, (other, third))))
    for right in range(4):
        drafts = [*plain[:right], *[(plain[right] + 1) % 250] * (3 - right)]
        samples = [msgspec.structs.replace(GREEDY, position=n, offset=3 - n) for n in range(4)]
        drafted = row("a", [19, *drafts], (1, 2), start=19, samples=samples)
        for size in (step_memory.LOGITS_AT_ONCE, 2 * runner.limits.vocab_size):
            with monkeypatch.context() as patch:
                patch.setattr(step_memory, "LOGITS_AT_ONCE", size)
                found = tokens_of(runner.execute(StepPlan(6, (other, drafted, third))))
            assert found == {"a": (tuple(plain[: right + 1]),), **expected}


def test_a_row_takes_the_token_that_the_step_before_draws(runner, monkeypatch):
    """Also in what penalties look at, and where nobody has read that step's result yet."""
    penalized = {"repetition_penalty": 1.5, "temperature": 1.0, "seed": 5}
    prompt = tuple(range(20))
    choices = [sampled(index, temperature=2.0, seed=1) for index in range(3)]

    def spec(position, output_ids):
        return SampleSpec(SamplingParams(**penalized), 5, 0, position, prompt, output_ids)

    def rows(second):
        first = row("c", range(9), (5,), samples=choices)
        return first, row("a", prompt, (1, 2), samples=[second])

    first = runner.execute(StepPlan(1, rows(spec(0, ()))))
    token = first.rows[1].choices[0][0]
    known = row("a", (token,), (1, 2), start=20, samples=[spec(1, (token,))])
    second = runner.execute(StepPlan(2, (known,)))
    assert runner.runs_ahead is False
    drawn = []
    draw = runner._draw

    def watched(hidden, rows):
        drawn.append(len(rows))
        return draw(hidden, rows)

    monkeypatch.setattr(runner, "_draw", watched)
    earlier = runner.submit(StepPlan(1, rows(spec(0, ()))))
    assert drawn == []  # it is drawn when the result is asked for, or the next step begins
    ahead = row("a", (NOT_DRAWN,), (1, 2), start=20, samples=[spec(1, ())], from_draw=3)
    later = runner.submit(StepPlan(2, (ahead,)))
    assert drawn == [2]
    assert later() == second
    assert earlier() == first
    assert drawn == [2, 1]
    runner.submit(StepPlan(3, (known,)))  # and is never asked for
    assert runner.execute(StepPlan(4, (known,))).rows == second.rows


def test_logits_in_parts_give_what_all_at_once_gives(runner, monkeypatch):
    rows = tuple(row(str(n), range(n, n + 10), (1 + n,)) for n in range(5))
    targets = row("p", range(20), (7, 8), num_prompt_logprobs=2, prompt_targets=tuple(range(1, 20)))
    plan = StepPlan(1, (*rows, targets))
    whole = runner.execute(plan)
    monkeypatch.setattr(step_memory, "LOGITS_AT_ONCE", 2 * runner.limits.vocab_size)
    assert runner.execute(plan) == whole
    assert len(whole.rows[-1].prompt_logprobs) == 19


def test_a_row_whose_logits_are_not_numbers_fails_alone(runner):
    good = row("a", range(20), (1, 2))
    expected = tokens_of(runner.execute(StepPlan(1, (good,))))["a"]
    runner.execute(StepPlan(2, (row("bad", range(16), (3, 4), samples=()),)))
    for layer in runner.cache.layers:
        layer[3].fill_(float("nan"))
    bad = row("bad", (16,), (3, 4), start=16)
    found = runner.execute(StepPlan(3, (good, bad)))
    assert found.rows[0].choices == expected
    assert found.rows[1].error == NOT_NUMBERS


def test_it_says_what_computes_what(runner):
    said = runner.explain()
    assert said["attention"] == "cpu"
    assert {"linear", "rms_norm", "steps"} <= said.keys()
