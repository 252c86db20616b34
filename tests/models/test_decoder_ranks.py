"""Every family on several ranks: logits of one rank to float32 rounding, and the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import toys
from tests.models.test_decoder import VARIANTS
from tests.models.test_gguf_config import IN_FILES
from tests.models.test_loader_quantized import fp8, quantized
from tests.ranks import ThreadGroup, on_ranks

import kit
from octavo.config import EngineConfig
from octavo.core.plan import SampleSpec
from octavo.dist.base import SINGLE, Group
from octavo.kernels.cpu.device import CpuDevice
from octavo.models.loader import load_model
from octavo.models.registry import FAMILIES
from octavo.params import SamplingParams
from octavo.runner.sampler import sample

TOLERANCE = {"rtol": 0, "atol": 2e-4}
SIZES: dict[str, Any] = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96,
}  # fmt: skip
GREEDY, SEEDED = SamplingParams(temperature=0), SamplingParams(temperature=0.9, seed=5)
PROMPTS = {"greedy": toys.prompt(40), "seeded": toys.prompt(21, 1)}
# A variant of each family, and the number of its ranks in the fast tests: with as many ranks as KV
# heads, and with more.
QUICK = {
    "llama-biases": 4, "mistral-window": 2, "qwen2": 4, "qwen3-bias": 4, "gemma2-untied": 2,
    "gemma3": 4, "phi3-partial-tied": 4, "olmo2": 4, "olmo3": 2, "granite-biases": 2,
    "smollm3-windows": 4, "ministral3": 2, "mixtral": 2, "qwen3-moe": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with toys.one_thread():
        yield


def answers(model: Any, count: int = 12) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits of all tokens and the ids drawn, of one prompt in two chunks and one beside it."""
    paged, device = toys.Paged(model), kit.cpu_device()
    prompts = [[i % model.spec.num_ids for i in ids] for ids in PROMPTS.values()]
    logits = [*paged.step([("greedy", prompts[0][:17])])]
    rows = [prompts[0][17:], prompts[1]]
    drawn: list[list[int]] = [[], []]
    for position in range(count):
        found = paged.step(list(zip(PROMPTS, rows, strict=True)))
        logits += found
        specs = [
            SampleSpec(params, 5, 0, position, output_ids=tuple(ids))
            for params, ids in zip((GREEDY, SEEDED), drawn, strict=True)
        ]
        last = torch.stack([row[-1] for row in found])
        for ids, one in zip(drawn, sample(device, last, specs), strict=True):
            assert one.error is None
            ids.append(one.token_id)
        rows = [[ids[-1]] for ids in drawn]
    return torch.cat(logits), drawn


def loaded(path: Path, group: Group = SINGLE, **options: Any) -> Any:
    config = EngineConfig(model=str(path), load_progress=False, **options)
    return load_model(config, kit.cpu_device(), torch.float32, group)


def holds(path: Path, *sizes: int, **options: Any) -> None:
    """So many ranks say what one says."""
    wanted, ids = answers(loaded(path, **options))

    def run(group: ThreadGroup) -> tuple[torch.Tensor, list[list[int]]]:
        return answers(loaded(path, group, **options))

    for size in sizes:
        for logits, found in on_ranks(size, run):
            assert found == ids
            torch.testing.assert_close(logits, wanted, **TOLERANCE)


def toy(variant: str, folder: Path, **changes: Any) -> Path:
    family, own = VARIANTS[variant]
    return toys.save(toys.make(family, **{**own, **SIZES, **changes}), folder)


@pytest.mark.parametrize("variant", QUICK)
def test_every_family(variant: str, tmp_path: Path) -> None:
    holds(toy(variant, tmp_path), QUICK[variant])


def test_no_family_is_left_out() -> None:
    assert {VARIANTS[v][0] for v in QUICK} == {family.name for family in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str, tmp_path: Path) -> None:
    holds(toy(variant, tmp_path / "8"), 2, 4, 8)
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    holds(toy(variant, tmp_path / "6", **heads), 3, 6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", IN_FILES)
def test_every_gguf(variant: str, tmp_path: Path) -> None:
    family, own = VARIANTS[variant]
    reference = toys.make(family, **{**own, **IN_FILES[variant], **SIZES})
    holds(toys.write_gguf(reference, tmp_path / "m.gguf"), 2, 4)


def blocks(kind: str, path: Path) -> Path:
    """A toy of `kind` with rows of three or more blocks, which two ranks tear in the middle."""
    size = 768 if kind.endswith("_K") else 96
    model = toys.make(
        "llama", hidden_size=size, intermediate_size=size, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=2, head_dim=size // 8,
    )  # fmt: skip
    return toys.write_gguf(model, path, kind)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_that_are_torn_are_read_and_trimmed(kind: str, tmp_path: Path) -> None:
    holds(blocks(kind, tmp_path / "m.gguf"), 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16"])
def test_blocks_of_every_kind(kind: str, tmp_path: Path) -> None:
    holds(blocks(kind, tmp_path / "m.gguf"), 2, 4)


# Two and four ranks cut all products of it between groups of 32.
DIVISIBLE = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
}  # fmt: skip


def any_order(inputs: int) -> torch.Tensor:
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) % (inputs // 32)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("awq", {}),
        ("gptq", {}),
        ("gptq", {"bits": 8}),
        ("gptq", {"order": any_order}),
        ("fp8", {}),
    ],
    ids=["awq", "gptq", "gptq of 8 bits", "gptq with desc_act", "fp8 in blocks"],
)
def test_stored_groups_stay_whole(method: str, options: Any, tmp_path: Path) -> None:
    """Each rank has the stored values of its part: dequantized, so that nothing else rounds."""
    if method == "fp8":
        folder = fp8(tmp_path, sizes={**DIVISIBLE, "head_dim": 32})
    else:
        folder = quantized(tmp_path, method, DIVISIBLE, **options)
    wanted, ids = answers(loaded(tmp_path / "plain"))

    def run(group: ThreadGroup) -> tuple[torch.Tensor, list[list[int]]]:
        return answers(loaded(folder, group, quantization_override="*=none"))

    for size in (2, 4):
        for logits, found in on_ranks(size, run):
            assert found == ids
            torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3)


def error_of(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


@pytest.mark.parametrize("quantization", ["awq", "gptq", "int8", "int4", "Q4_1", "stored"])
def test_integers_are_as_exact_on_two_ranks(quantization: str, tmp_path: Path) -> None:
    """Not equal: each rank rounds the inputs of products by their largest value on it."""
    options: dict[str, Any] = {}
    dequantized: dict[str, Any] = {}
    if quantization in ("awq", "gptq"):
        folder = quantized(tmp_path, quantization, DIVISIBLE)
        plain = tmp_path / "plain"
    elif quantization in ("Q4_1", "stored"):
        _, folder = toys.blocks_of("Q4_1", tmp_path / "m.gguf")
        plain, dequantized = folder, {"quantization": "none"}
        if quantization == "Q4_1":
            options = {"quantization": "int4", "quantization_override": "lm_head=int4"}
    else:
        plain = folder = kit.tiny(tmp_path, **DIVISIBLE)
        options = {"quantization": quantization}

    def first(path: Path, group: Group = SINGLE, **options: Any) -> torch.Tensor:
        ids = [i % 100 for i in PROMPTS["greedy"]]
        return toys.Paged(loaded(path, group, **options)).step([("a", ids)])[0]

    exact, whole = first(plain, **dequantized), first(folder, **options)
    found = on_ranks(2, lambda group: first(folder, group, **options))
    assert torch.equal(found[0], found[1])
    assert error_of(found[0], exact) < 1.1 * error_of(whole, exact) + 2e-6  # of float32
    assert 0 < error_of(found[0], whole) < 0.05


class RoundedWeights(CpuDevice):
    """A device that rounds weights to 255 levels per output, and nothing else."""

    quantization = ("int8",)

    def products(self, dtype: torch.dtype, max_rows: int, deterministic: bool) -> Any:
        plain = super().products(dtype, max_rows, deterministic)

        class Rounding:
            explain, unstable = plain.explain, plain.unstable

            def make(
                self, weight: Any, bias: Any = None, max_rows: Any = None, method: str = "none",
                largest: Any = None,
            ) -> Any:  # fmt: skip
                if method == "int8":
                    most = weight.abs().amax(1) if largest is None else largest
                    step = most.clamp(min=1e-30).unsqueeze(1) / 127
                    weight = (weight / step).round() * step
                return plain.make(weight, bias, max_rows)

        return Rounding()


def test_weights_are_rounded_as_on_one_rank(tmp_path: Path) -> None:
    """Where inputs are divided, a scale is that of the whole: one and four ranks agree."""
    folder = kit.tiny(tmp_path, **DIVISIBLE)
    config = EngineConfig(model=str(folder), load_progress=False, quantization="int8")

    def run(group: Group) -> tuple[torch.Tensor, list[list[int]]]:
        return answers(load_model(config, RoundedWeights(config), torch.float32, group))

    wanted, ids = run(SINGLE)
    for logits, found in on_ranks(4, run):
        assert found == ids
        torch.testing.assert_close(logits, wanted, **TOLERANCE)
    exact = answers(loaded(folder))[0]
    assert error_of(wanted[:40], exact[:40]) > 1e-3


def test_a_row_is_the_same_in_any_company(tmp_path: Path) -> None:
    """Sums are in rank order, so that the rows of a step do not move a bit of one another."""
    folder = toy("olmo2", tmp_path)

    def alone_and_together(group: ThreadGroup) -> bool:
        model = loaded(folder, group)
        rows = list(PROMPTS.items())
        together = toys.Paged(model).step(rows)
        alone = [toys.Paged(model).step([row])[0] for row in rows]
        return all(map(torch.equal, together, alone))

    assert on_ranks(2, alone_and_together) == [True, True]


class Silent:
    """A group of one that must not be asked for anything."""

    rank, size = 0, 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a model of one rank asked its group for {name}")


def test_one_rank_communicates_nothing_and_has_the_same_bits(tmp_path: Path) -> None:
    folder = toy("olmo2-bias-tied", tmp_path)
    group: Any = Silent()
    (logits, ids), wanted = answers(loaded(folder, group)), answers(loaded(folder))
    assert torch.equal(logits, wanted[0])
    assert ids == wanted[1]


@pytest.mark.parametrize(("variant", "times"), [("llama-biases", 2), ("olmo2", 3)])
def test_ranks_meet_twice_in_a_layer_and_once_for_logits(
    variant: str, times: int, tmp_path: Path
) -> None:
    """Once more where rows of queries and keys have a norm."""
    folder = toy(variant, tmp_path)

    def count(group: ThreadGroup) -> int:
        model = loaded(folder, group)
        assert group.meeting.calls == 0
        toys.Paged(model).step([("a", PROMPTS["greedy"])])
        group.min(0)
        return group.meeting.calls - 1

    layers = loaded(folder).spec.num_layers
    assert on_ranks(2, count)[0] == times * layers + 1
