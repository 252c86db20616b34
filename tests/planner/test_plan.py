"""Plans agree with engines to the byte, and say what fits."""

from dataclasses import dataclass

import pytest
import torch
from tests import kit
from tests.models import toys
from tests.test_kv_groups import mixed

from octavo import LLM
from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.kernels.cpu.device import CpuDevice
from octavo.kernels.cpu.quantize import pack_weight_only
from octavo.models.loader import load_model
from octavo.planner import estimates
from octavo.planner.estimates import Estimates
from octavo.planner.plan import make_plan
from octavo.planner.target import Target, target
from octavo.runner.memory import GIB, PartOfMemory
from octavo.runner.model_runner import ModelRunner

TOYS = {
    "grouped heads": {},
    "all heads": {"num_key_value_heads": 4},
    "one window": {"architectures": ["MistralForCausalLM"], "sliding_window": 40},
    "tied": {"tie_word_embeddings": True},
    "padded heads": {"head_dim": 24},
}
GIVEN = {"kv_cache_memory_bytes": 3_333_333, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTAVO_RUNTIME_DIR", str(tmp_path / "engines"))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("toy")
            if name == "window groups":
                made[name] = mixed(folder)
                return made[name]
            config = kit.llama_config(kit.write_tokenizer(folder), **TOYS[name])
            tensors = kit.llama_tensors(config)
            if config["tie_word_embeddings"]:
                del tensors["lm_head.weight"]
            made[name] = kit.write_checkpoint(folder, config, tensors)
        return made[name]

    return make


def planned(folder, device="cpu", memory=None, lengths=(), **options):
    config = EngineConfig(model=str(folder), **options)
    return make_plan(config, target(config, device, memory), lengths)


def sizes_of(limits):
    """What an engine reports, in the terms of a plan."""
    return {
        "num_blocks": limits.num_blocks - 1,
        "num_host_blocks": limits.num_host_blocks,
        "block_bytes": limits.block_bytes,
        "kv_tokens": limits.kv_tokens,
        "kv_bytes": (limits.num_blocks - 1) * limits.block_bytes,
        "max_model_len": limits.max_model_len,
        "dtype": limits.dtype,
        "kv_cache_dtype": limits.kv_cache_dtype,
        "windows": [group.window for group in limits.kv_groups],
    }


def sizes(plan):
    found = plan.as_dict()
    found["windows"] = [group["window"] for group in found["groups"]]
    return found


def assert_agree(plan, limits):
    expected = sizes_of(limits)
    found = sizes(plan)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, GIVEN) for name in (*TOYS, "window groups")),
        ("grouped heads", {"max_num_seqs": 3}),  # the default pool
        ("window groups", {"max_num_seqs": 3, "max_model_len": 300}),
        ("grouped heads", {"kv_cache_dtype": "int8", **GIVEN}),
        ("window groups", {"kv_cache_dtype": "fp8", **GIVEN}),
        ("grouped heads", {"num_gpu_blocks_override": 77, "block_size": 32, "swap_space": 0}),
        ("grouped heads", {"quantization": "int8", **GIVEN}),
        ("all heads", {"attention_impl": "torch", "kv_cache_dtype": "float32", **GIVEN}),
        ("grouped heads", {"num_gpu_blocks_override": 9}),  # the window is what the pool holds
    ],
)
def test_an_engine_has_what_was_planned(toy, name, options):
    plan = planned(toy(name), **options)
    assert plan.is_exact
    runner = ModelRunner(EngineConfig(model=str(toy(name)), load_progress=False, **options))
    try:
        assert_agree(plan, runner.limits)
    finally:
        runner.close()


def test_an_llm_reports_what_was_planned(toy):
    with LLM(str(toy("grouped heads")), load_progress=False, **GIVEN) as llm:
        assert_agree(planned(toy("grouped heads"), **GIVEN), llm.engine.limits)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_estimated_scales_cover_those_of_weights_alone(toy, method):
    inputs = 1024  # many for each output, so that terms of groups decide
    form = pack_weight_only(torch.randn(32, inputs), method).form
    stored = form.num_bytes(1, inputs) - inputs * form.bits // 8
    group, each = estimates._CPU_GROUP_TERMS[method]
    assert inputs // group * each == stored
    quantized, plain = (
        planned(toy("grouped heads"), quantization=name, **GIVEN).loaded["scales"]
        for name in (method, method.replace("int", "w") + "a8")
    )
    assert (quantized > plain) == (method == "int8")


@pytest.mark.slow
@pytest.mark.parametrize("options", [GIVEN, {"max_num_seqs": 3}, {"kv_cache_dtype": "int8"}])
def test_two_ranks_have_what_was_planned(toy, options):
    options = {"tensor_parallel_size": 2, **options}
    plan = planned(toy("grouped heads"), **options)
    with LLM(str(toy("grouped heads")), load_progress=False, **options) as llm:
        assert_agree(plan, llm.engine.limits)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"quantization": "int4"}])
def test_smollm2_has_what_was_planned(options):
    given = {"kv_cache_memory_bytes": 2**29, **options}
    plan = planned("smollm2", **given)
    assert plan.is_exact
    with LLM("smollm2", load_progress=False, **given) as llm:
        assert_agree(plan, llm.engine.limits)
    config = EngineConfig(model="smollm2", **options)
    with LLM("smollm2", load_progress=False, gpu_memory_utilization=0.5, **options) as llm:
        terms = llm.engine.limits.memory
    found = make_plan(config, target(config, "cpu", None))
    # Estimates, which docs/plan.md compares: not off by a whole size.
    assert 0.7 < found.memory["used"] / terms["used"] < 1.3


@dataclass
class Memory:
    total: int = 4 * GIB
    free: int = 3 * GIB
    used: int = GIB


class FixedDevice(CpuDevice):
    """Memory and a step's peak that are always the same."""

    peak = 123_456

    def memory(self):
        return Memory()

    def peak_of(self, step):
        step()
        return self.peak


@pytest.mark.parametrize("share", [None, 0.3, 0.9])
def test_with_what_was_measured_every_term_is_the_engine_s(toy, monkeypatch, share):
    """Also where the pool takes all that is left: the sums are the same code."""
    folder = toy("window groups")
    options = {"model": str(folder), "max_num_seqs": 900, "gpu_memory_utilization": share}
    config = EngineConfig(**options, load_progress=False)
    monkeypatch.setattr("octavo.runner.model_runner.create_device", FixedDevice)
    runner = ModelRunner(config)
    limits = runner.limits
    runner.close()
    here = Target("here", FixedDevice(config), PartOfMemory(4 * GIB, 3 * GIB, GIB))
    measured = Estimates({}, limits.memory["step_peak"], 0)
    plan = make_plan(config, here, measured=measured)
    assert plan.memory == limits.memory
    assert_agree(plan, limits)


@pytest.mark.parametrize("name", ["grouped heads", "tied", "window groups"])
def test_weights_by_part_are_all_that_is_loaded(toy, name):
    taken = []

    class Counted(CpuDevice):
        pass

    config = EngineConfig(model=str(toy(name)), dtype="float32", load_progress=False)
    from octavo.models.weights import Weights

    take = Weights.take

    def counted(self, *names, **options):
        found = take(self, *names, **options)
        taken.append(found.numel() * 4)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "take", counted)
        load_model(config, Counted(config), kit.torch.float32)
    plan = planned(toy(name), dtype="float32")
    assert plan.weight_bytes == sum(plan.weights.values()) == sum(taken)
    parts = {"embedding", "norms", "attention", "MLP"}
    assert set(plan.weights) == parts | (set() if name == "tied" else {"output head"})


def test_stored_blocks_take_what_the_plan_says(tmp_path):
    model = toys.make(
        "llama", hidden_size=64, intermediate_size=64, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    path = toys.write_gguf(model, tmp_path / "m.gguf", "Q5_0", others={"v_proj": "Q8_0"})
    forms = {"Q5_0": 22, "Q8_0": 34}  # bytes of 32 values, as in the file
    wanted = 0
    for name, parameter in model.named_parameters():
        each = forms["Q8_0" if "v_proj" in name else "Q5_0"] / 32
        wanted += int(parameter.numel() * (each if parameter.ndim == 2 else 4))
    plan = planned(path, dtype="float32")
    assert plan.weight_bytes == sum(plan.weights.values()) == wanted
    assert plan.quantization == "stored"


def test_a_config_alone_gives_the_plan_of_the_whole_model(toy, tmp_path):
    folder = toy("grouped heads")
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((folder / file).read_text())
    whole, alone = planned(folder, **GIVEN), planned(tmp_path, **GIVEN)
    assert (whole.has_weights, alone.has_weights) == (True, False)
    other = ("model", "has_weights", "loaded", "memory", "command")
    file = planned(tmp_path / "config.json", **GIVEN)
    assert file.command == alone.command == f"octavo serve {tmp_path}"
    assert file.num_blocks == alone.num_blocks
    first, second = ({k: v for k, v in p.as_dict().items() if k not in other}
                     for p in (whole, alone))  # fmt: skip
    assert first == second


# 40 layers, K and V, 40 heads of 128 values of two bytes.
LLAMA_13B_TOKEN = 40 * 2 * 40 * 128 * 2


def test_llama_13b_on_a_card():
    plan = planned("llama-2-13b", "a100-40gb", lengths=((256, 256),))
    assert plan.weight_bytes == 2 * 13_015_864_320
    assert [group.bytes_per_token for group in plan.groups] == [LLAMA_13B_TOKEN]
    assert plan.block_bytes == 16 * LLAMA_13B_TOKEN
    assert plan.kv_bytes == plan.num_blocks * plan.block_bytes
    assert plan.memory["used"] == sum(plan.loaded.values())
    spare = plan.memory["limit"] - plan.memory["used"] - plan.step - plan.captured
    assert 0 <= spare - plan.kv_bytes < plan.block_bytes
    (one,) = plan.lengths
    assert (one.blocks, one.at_their_end) == (32, plan.num_blocks // 32)
    assert one.at_their_end < one.on_average < 2 * one.at_their_end
    assert not plan.is_exact
    assert plan.command == f"octavo serve MODEL --max-num-seqs {one.on_average}"


def test_ranks_divide_weights_and_kv():
    whole, half = (planned("llama-3.1-8b", "l4", tensor_parallel_size=size) for size in (1, 2))
    assert half.block_bytes * 2 == whole.block_bytes
    # The embedding is on every rank, and norms.
    assert half.weights["MLP"] * 2 == whole.weights["MLP"]
    assert half.weights["embedding"] == whole.weights["embedding"]
    assert half.kv_tokens > 2 * whole.kv_tokens


def test_windows_bound_what_a_long_request_takes():
    plan = planned("gemma-3-1b", "l4", lengths=((512, 1), (30000, 1)))
    short, long = plan.lengths
    assert long.blocks < 58 * short.blocks / 3  # of 6 to 7 groups, one grows
    assert [group.window for group in plan.groups].count(None) == 1


def test_quantized_checkpoints_are_planned_from_their_config(tmp_path):
    config = {**kit.llama_config(512, hidden_size=256, intermediate_size=512, head_dim=64),
              "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128,
                                      "zero_point": True, "version": "gemm"}}  # fmt: skip
    (tmp_path / "config.json").write_text(kit.json.dumps(config))
    plan = planned(tmp_path, dtype="float32")
    values = 2 * 3 * 256 * 512
    assert plan.quantization == "awq"
    assert values // 2 < plan.weights["MLP"] < values * 0.56  # codes, and 9 or 10 bits a scale
    assert plan.weights["output head"] == 4 * 512 * 256


@pytest.mark.parametrize(
    ("model", "device", "options", "message"),
    [
        ("llama-3.1-70b", "l4", {},
         r"llama-3.1-70b does not fit on l4 \(22\.03 GiB\): its weights take at least 131\.42 GiB "
         r"in bfloat16.*what fits: --tensor-parallel-size 8, or --tensor-parallel-size 4 "
         r"--quantization fp8, or"),
        ("llama-3.1-8b", "l4", {"max_model_len": 100000},
         r"the KV of max_model_len=100000 tokens; what fits: --max-model-len \d+, or "),
        ("llama-3.1-405b", "l4", {"quantization": "int8"}, "nothing that flags change makes"),
        ("qwen2.5-7b", "rtx-4090", {"max_model_len": 2_000_000}, "made for at most 32768 tokens"),
        ("llama-2-7b", "a100-40gb", {"kv_cache_dtype": "fp8"},
         "needs compute capability 8.9 .* and a100-40gb has 8.0; use kv_cache_dtype='int8'"),
        ("llama-2-7b", "cpu", {"quantization": "fp8"}, "device 'cpu' has no fp8 products"),
        ("qwen2.5-7b", "h100", {"tensor_parallel_size": 3}, "does not divide .*possible: 1, 2, 4"),
        ("llama-2-7b", "described", {}, "a described device needs --memory"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_would(model, device, options, message):
    with pytest.raises(ConfigError, match=message) as found:
        planned(model, device, **options)
    assert "\n" not in str(found.value)


def test_what_is_said_to_fit_fits():
    with pytest.raises(NotEnoughMemoryError) as found:
        planned("llama-3.1-8b", "l4", max_model_len=100000)
    said = int(str(found.value).partition("--max-model-len ")[2].partition(",")[0])
    assert planned("llama-3.1-8b", "l4", max_model_len=said).max_model_len == said
    with pytest.raises(NotEnoughMemoryError):
        planned("llama-3.1-8b", "l4", max_model_len=said + 1024)


def test_lengths_beyond_the_window_are_refused():
    with pytest.raises(ConfigError, match="lengths 4000,97 are 4097 tokens, and max_model_len is"):
        planned("llama-2-7b", "h100", lengths=((4000, 97),))


def test_memory_may_be_described():
    plan = planned("llama-2-13b", "described", memory=80 * GIB)
    assert plan.memory["total"] == 80 * GIB
    more = planned("llama-2-13b", "a100-40gb", memory=80 * GIB)
    assert (more.num_blocks, more.device) == (plan.num_blocks, "a100-40gb with the memory given")
    here = planned("smollm2-135m", "cpu", memory=8 * GIB, gpu_memory_utilization=0.9)
    assert here.memory["total"] == 8 * GIB
