"""The specification of sampling and the CPU's kernels agree on tokens and log-probabilities."""

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import sampling_call
from octavo.kernels.sampling import EMPTY, ITEM, NOT_FINITE, OK, ReferenceSampling

REFERENCE = ReferenceSampling()


def items(count, **fields):
    made = np.zeros(count, ITEM)
    made["row"], made["top_p"], made["token"] = np.arange(count), 1.0, -1
    made["seed"], made["position"], made["index"] = 7919 * np.arange(count), 3, 1
    for name, value in fields.items():
        made[name] = value
    return made


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 0.8, "min_p": 0.05},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_agree(fields, dtype):
    logits = (3 * torch.randn(40, 333, generator=torch.Generator().manual_seed(1))).to(dtype)
    found, expected = items(40, **fields), items(40, **fields)
    REFERENCE.draw(logits, found)
    sampling_call.draw(logits, expected)
    assert found.tolist() == expected.tolist()
    assert len(set(found["token"].tolist())) > 20


def test_log_probabilities_agree():
    logits = torch.randn(9, 100, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    made = [items(9, token=np.arange(9) * 11, top_k=np.arange(9) % 4) for _ in range(2)]
    ids, values = REFERENCE.logprobs(logits, made[0])
    wanted_ids, wanted = sampling_call.logprobs(logits, made[1])
    assert made[0]["rank"].tolist() == made[1]["rank"].tolist()
    for row, k in enumerate(made[0]["top_k"]):
        assert ids[row, : k + 1].tolist() == wanted_ids[row, : k + 1].tolist()
    np.testing.assert_allclose(values, wanted, atol=1e-6)


def test_rows_that_cannot_be_drawn_from_say_why():
    logits = torch.zeros(4, 70)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), float("-inf")
    made = items(4, temperature=1.0)
    REFERENCE.draw(logits, made)
    assert made["status"].tolist() == [NOT_FINITE, NOT_FINITE, EMPTY, OK]
    assert (made["token"] < 0).tolist() == [True, True, True, False]
