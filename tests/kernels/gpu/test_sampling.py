"""Draws on the device against the specification: the same tokens from the same logits."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.core.plan import SampleSpec
from octavo.kernels.gpu import sampling_call
from octavo.kernels.gpu.graph import ReplayedPython
from octavo.kernels.sampling import (
    EDIT,
    EMPTY,
    ITEM,
    NOT_FINITE,
    OK,
    Items,
    ReferenceSampling,
    kept_tokens,
    race_states,
    split_mix,
)
from octavo.params import SamplingParams
from octavo.runner import sampler

REFERENCE = ReferenceSampling()
slow = pytest.mark.slow
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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=slow)]
)
def test_draws_agree(dtype: torch.dtype) -> None:
    found = compare(rows(len(SETTINGS), 259).to(dtype), **settings())
    assert len(set(found["token"].tolist())) > 6


@slow
def test_equal_logits_are_kept_by_rising_id() -> None:
    """Multiples of a half, and both zeros: the filters cut among equals."""
    logits = rows(len(SETTINGS), 259).mul_(2).round_().div_(2)
    assert (logits == 0).any()
    logits[(logits == 0) & (torch.rand(logits.shape) < 0.5)] = -0.0
    compare(logits, **settings())


def at_the_edge(logits: torch.Tensor, fields: dict[str, float]) -> Items:
    """Two items of row 0: one draws the last token that the filters keep; the other would draw the
    next one, were it kept."""
    x = logits[0].double().numpy()
    made = items(2, row=0, temperature=1.0, **fields)
    kept, _ = kept_tokens(x, made[0])
    order = np.argsort(-x, kind="stable")[: len(kept) + 1]
    assert order[:-1].tolist() == kept.tolist()
    seeds = items(20000, seed=np.arange(20000))
    times = exponentials(seeds, order) / np.exp(x[order])
    for item, count in zip(made, (len(kept), len(kept) + 1), strict=True):
        item["seed"] = np.flatnonzero(times[:, :count].argmin(1) == count - 1)[0]
    return made


def exponentials(made: Items, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """[items, tokens]"""
    outputs = [split_mix(race_states(made), np.full(len(made), token)) for token in tokens]
    bits = np.stack(outputs, 1) >> np.uint64(11)
    return np.asarray(-np.log1p(-(bits + 0.5) * 2.0**-53))


# With few pieces only the first of each line.
FILTERS = [
    {"top_k": 30}, {"top_k": 3},
    {"top_p": 0.05}, {"top_p": 0.4},
    {"top_p": 0.4, "min_p": 0.5}, {"top_k": 30, "min_p": 0.4},
    {"min_p": 0.1}, {"top_k": 30, "top_p": 0.4},
]  # fmt: skip


# With 4 pieces of 11 some items are drawn from the whole row.
@pytest.mark.parametrize(
    ("equals", "few"),
    [
        pytest.param(True, 4, marks=slow),
        (False, 64),
        pytest.param(True, 64, marks=slow),
        pytest.param(False, 4, marks=slow),
    ],
)
def test_filters_keep_exactly_their_tokens(
    equals: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_call, "FEW", few)
    monkeypatch.setattr(sampling_call, "ROW_TILE", 512)
    monkeypatch.setattr(sampling_call, "PART", 1024 if equals else 256)
    logits = rows(1, 700, 0.8, seed=3)
    if equals:  # with both zeros
        logits = logits.mul_(4).round_().div_(4)
        logits[0, ::2] = torch.where(logits == 0, -logits, logits)[0, ::2]
    made = np.concatenate(
        [at_the_edge(logits, fields) for fields in FILTERS[:: 2 if few == 4 else 1]]
    )
    expected = made.copy()
    sampling_call.draw(to_device, logits, made)
    REFERENCE.draw(logits, expected)
    assert made["token"].tolist() == expected["token"].tolist()


@slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", FLOATS)
def test_draws_of_the_vocabulary_of_llama_3(dtype: torch.dtype) -> None:
    logits = rows(3, 128256, 2.0).to(dtype)
    fields = {"temperature": 1.0, "top_k": [0, 50, 0], "top_p": [1.0, 0.9, 0.8]}
    compare(logits, **fields)


@slow
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


def test_zeros_are_equal() -> None:
    assert compare(torch.tensor([[-1.0, -0.0, 0.0], [0.0, -0.0, -1.0]]))["token"].tolist() == [1, 0]


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


def test_nothing_waits_for_the_device_before_tokens_are_read() -> None:
    """Edits and draws could be captured: `ReplayedPython` refuses what reads device memory."""
    made = items(2, temperature=1.0, top_k=3)
    edits = np.array([(5, 1.5, 0.0, 0.25), (70, 0.0, 0.0, 0.0)], EDIT)
    logits, closed = rows(2, 70), np.array([True, False])

    def run() -> torch.Tensor:
        copies = sampling_call.edited(to_device, logits, made["row"].copy(), closed, edits)
        return sampling_call.submit(to_device, copies, made)

    assert ReplayedPython(run).replay(2)[0].tolist() == [5, OK]


@pytest.mark.parametrize("count", [1, 5, 1024, 1500])
def test_tokens_of_the_step_before_replace_their_numbers(count: int) -> None:
    """A draw that failed gives token 0: every id must have an embedding."""
    chance = np.random.default_rng(count)
    drawn = torch.from_numpy(chance.integers(-1, 100, (7, 2)))
    drawn[3, 0] = -1
    ids = chance.integers(-7, 50, count)
    ids[0] = -1 - 3
    guarded = torch.full((count + 8,), -1)  # what is behind is not replaced
    guarded[:count] = torch.from_numpy(ids)
    sampling_call.take_drawn(guarded[:count], drawn)
    expected = [max(0, int(drawn[-1 - i, 0])) if i < 0 else i for i in ids.tolist()]
    assert guarded.tolist() == [*expected, *[-1] * 8]
