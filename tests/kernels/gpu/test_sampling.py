"""Draws on the device against the specification: the same tokens from the same logits."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.core.plan import SampleSpec
from octavo.kernels.gpu import sampling_call
from octavo.kernels.sampling import EMPTY, ITEM, NOT_FINITE, OK, Items, ReferenceSampling
from octavo.params import SamplingParams
from octavo.runner import sampler

REFERENCE = ReferenceSampling()
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def to_device(name: str, array: NDArray[np.generic]) -> torch.Tensor:
    return torch.tensor(array)


def items(count: int, **fields: Any) -> Items:
    made = np.zeros(count, ITEM)
    made["row"], made["top_p"], made["token"] = np.arange(count), 1.0, -1
    made["seed"], made["position"], made["index"] = 7919 * np.arange(count), 3, 1
    for name, value in fields.items():
        made[name] = value
    return made


def rows(count: int, vocab: int, spread: float = 3.0, seed: int = 1) -> torch.Tensor:
    return spread * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


def compare(logits: torch.Tensor, **fields: Any) -> Items:
    """The items of logits, drawn; and asserted to be as the specification draws them."""
    count = fields.pop("count", len(logits))
    found, expected = items(count, **fields), items(count, **fields)
    sampling_call.draw(to_device, logits, found)
    REFERENCE.draw(logits, expected)
    assert found["token"].tolist() == expected["token"].tolist()
    assert found["status"].tolist() == expected["status"].tolist()
    return found


# (temperature, top_k, top_p, min_p), one of each row.
SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.8, 7, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (0.8, 0, 1.0, 0.05),
    (0.8, 40, 0.8, 0.1),
    (1.0, 1, 1.0, 0.0),
    (5.0, 0, 1e-9, 0.0),
    (1.0, 0, 1.0, 1.0),
    (1e-6, 0, 1.0, 0.0),
    (1e6, 0, 0.999, 0.0),
    (1.0, 100000, 1.0, 0.0),
    (1e-6, 3, 0.5, 0.5),
    (1.0, 200, 0.9, 0.0),
]


def settings() -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p")
    return dict(zip(names, map(list, zip(*SETTINGS, strict=True)), strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_draws_agree(dtype: torch.dtype) -> None:
    found = compare(rows(len(SETTINGS), 259).to(dtype), **settings())
    assert len(set(found["token"].tolist())) > 6


def test_equal_logits_are_kept_by_rising_id() -> None:
    """Multiples of a half, and both zeros: the filters cut among equals."""
    logits = rows(len(SETTINGS), 259).mul_(2).round_().div_(2)
    assert (logits == 0).any()
    logits[(logits == 0) & (torch.rand(logits.shape) < 0.5)] = -0.0
    compare(logits, **settings())


# What the pieces with the largest logits do not settle is drawn from the whole row.
@pytest.mark.parametrize(("spread", "few"), [(0.3, 4), (0.3, 64), (4.0, 4)])
def test_draws_of_a_wide_vocabulary(
    spread: float, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_call, "FEW", few)
    fields = {
        "temperature": [1.0, 1.0, 0.7, 1.0, 1.0, 1.0, 1.0, 0.0],
        "top_k": [0, 3, 200, 0, 0, 5000, 4, 1],
        "top_p": [1.0, 1.0, 0.9, 0.95, 0.3, 1.0, 0.5, 1.0],
        "min_p": [0.0, 0.0, 0.0, 0.0, 0.0, 1e-3, 0.2, 0.0],
    }
    logits = rows(8, 5003, spread)
    if spread > 1:  # equal logits, of which some pieces are chosen
        logits = logits.round_()
    compare(logits, **fields)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", FLOATS)
def test_draws_of_the_vocabulary_of_llama_3(dtype: torch.dtype) -> None:
    logits = rows(3, 128256, 2.0).to(dtype)
    fields = {"temperature": 1.0, "top_k": [0, 50, 0], "top_p": [1.0, 0.9, 0.8]}
    compare(logits, **fields)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [259, 5003])
@pytest.mark.parametrize("dtype", FLOATS)
def test_more_draws(dtype: torch.dtype, vocab: int) -> None:
    for number, setting in enumerate(SETTINGS):
        names = ("temperature", "top_k", "top_p", "min_p")
        logits = rows(20, vocab, 1 + number % 4, seed=number).to(dtype)
        compare(logits, **dict(zip(names, setting, strict=True)))


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
def test_argmax_takes_the_lowest_id_of_equals(vocab: int) -> None:
    logits = torch.randint(-9, 9, (5, vocab), generator=torch.Generator().manual_seed(vocab)) / 4
    found = compare(logits)
    assert found["token"].tolist() == [row.index(max(row)) for row in logits.tolist()]
    compare(logits, temperature=1.0)


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((4, 300), -torch.inf)
    logits[:, [3, 77, 299]] = torch.tensor([0.0, -1.0, 1.0])
    fields = {"temperature": 1.0, "top_k": [0, 2, 9, 0], "top_p": [1.0, 1.0, 0.9, 1.0]}
    assert set(compare(logits, **fields)["token"].tolist()) <= {3, 77, 299}


def test_rows_that_cannot_be_drawn_from_say_why() -> None:
    logits = torch.zeros(5, 70)
    logits[0, 3], logits[1, 69], logits[2], logits[3, 9] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.nan,
    )
    for temperature in (0.0, 1.0):
        found = compare(logits, temperature=temperature)
        assert found["status"].tolist() == [NOT_FINITE, NOT_FINITE, EMPTY, NOT_FINITE, OK]


def test_an_item_has_its_token_in_any_company() -> None:
    """And items may share a row."""
    logits = rows(3, 259)
    made = items(
        6, row=[2, 0, 2, 1, 1, 0], temperature=[1, 1, 0.5, 0, 2, 1], top_k=[0, 9, 5, 0, 0, 0]
    )
    alone = made.copy()
    sampling_call.draw(to_device, logits, made)
    for i in range(6):
        sampling_call.draw(to_device, logits, alone[i : i + 1])
    assert made.tolist() == alone.tolist()
    REFERENCE.draw(logits, alone)
    assert made.tolist() == alone.tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_log_probabilities_agree(dtype: torch.dtype) -> None:
    logits = rows(9, 100).round(decimals=1).to(dtype)
    logits[4, 3], logits[5, 60:] = torch.nan, -torch.inf
    made = [items(9, token=np.arange(9) * 11, top_k=np.arange(9) % 4) for _ in range(2)]
    found = sampling_call.logprobs(to_device, logits, made[0])
    expected = REFERENCE.logprobs(logits, made[1])
    assert made[0].tolist() == made[1].tolist()
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)


def test_items_outside_the_logits_are_refused() -> None:
    for row in (-1, 2):
        with pytest.raises(AssertionError, match="no such row"):
            sampling_call.draw(to_device, torch.zeros(2, 6), items(1, row=row))


class Device(ReferenceSampling):
    """Draws and edits as a GPU does."""

    def draw(self, logits: torch.Tensor, items: Items) -> None:
        sampling_call.draw(to_device, logits, items)

    def edited(self, *arguments: Any) -> torch.Tensor:
        return sampling_call.edited(to_device, *arguments)


def test_penalties_and_masks_are_applied_on_the_device() -> None:
    """The tokens of rows changed in host memory; and the error of one row is its own."""
    changes: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5, "top_k": 5},
        {"frequency_penalty": 2.0, "presence_penalty": 0.5},
        {"allowed_token_ids": [4, 5, 6]},
        {"logit_bias": {8: 30.0}, "top_p": 0.9},
        {"logit_bias": {400: 1.0}},
    ]
    specs = [
        SampleSpec(SamplingParams(**change), 7, i, 3, (1, 2, 2), (3, 3, 4), 1, (9,))
        for i, change in enumerate(changes * 2)
    ]
    logits, at = rows(4, 259), [i % 4 for i in range(len(specs))]
    found = sampler.sample(Device(), logits, specs, at)
    assert found == sampler.sample(REFERENCE, logits, specs, at)
    assert [i for i, each in enumerate(found) if each.error] == [5, 11]
    assert found[4].token_id == 8
