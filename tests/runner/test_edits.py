"""Rows changed by edits on the device equal rows changed in host memory, to the bit."""

import numpy as np
import pytest
import torch

from octavo.core.plan import SampleSpec
from octavo.kernels.gpu import sampling_call
from octavo.kernels.sampling import EDIT
from octavo.params import SamplingParams
from octavo.runner import sampler
from octavo.runner.edits import edits

VOCAB = 200
PROMPT, OUTPUT = (5, 9, 9, 199), (7, 9, 7, 30, 0)


def spec(stop=(), left=0, bad=(), output=OUTPUT, **params):
    params = SamplingParams(temperature=1.0, **params)
    return SampleSpec(params, 1, 0, len(output), PROMPT, output, left, stop, bad)


SPECS = [
    spec(),
    spec(repetition_penalty=1.7),
    spec(repetition_penalty=0.3, frequency_penalty=0.7, presence_penalty=-0.2),
    spec(frequency_penalty=-1.1, logit_bias={7: 3.3, 199: -100.0, 12: 0.1}),
    spec(allowed_token_ids=[9, 3, 150], logit_bias={3: 2.0, 8: 5.0}, presence_penalty=1.3),
    spec(bad=((4,), (30, 0, 11), (30, 9, 12), (9,)), repetition_penalty=1.1),
    spec(stop=(199, 2), left=3, allowed_token_ids=[2, 17]),
    spec(stop=(199, 2), left=0, logit_bias={2: 1.0}),
    spec(repetition_penalty=1e-38, logit_bias={9: 100.0}),
    spec(repetition_penalty=2.0, frequency_penalty=0.1, stop=(7,), left=1, output=()),
]


def edited(logits, specs):
    made = [edits(s, VOCAB) for s in specs]
    for row, each in enumerate(made):
        each["place"] += row * VOCAB
    closed = np.array([s.params.allowed_token_ids is not None for s in specs])
    return sampling_call.edited(
        lambda _, array: torch.tensor(array), logits, np.arange(len(specs)), closed,
        np.concatenate([np.zeros(0, EDIT), *made]),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_changed_as_in_host_memory(dtype):
    logits = (5 * torch.randn(len(SPECS), VOCAB, generator=torch.Generator().manual_seed(1))).to(
        dtype
    )
    logits[1, 9], logits[2, 7], logits[5, 9], logits[4, 8] = (
        torch.inf,
        torch.nan,
        torch.nan,
        torch.nan,
    )
    logits[3, 7], logits[9, 5], logits[1, 40] = -torch.inf, -torch.inf, torch.inf
    expected = logits.float().numpy().copy()
    for row, each in zip(expected, SPECS, strict=True):
        assert sampler._adjust(row, each) is None
    np.testing.assert_array_equal(edited(logits, SPECS).numpy(), expected)


def test_no_edits():
    logits = torch.randn(2, VOCAB)
    assert torch.equal(edited(logits, SPECS[:1] * 2), logits)


@pytest.mark.parametrize(
    "params", [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": [3, VOCAB]}]
)
def test_an_id_outside_the_vocabulary_is_refused(params):
    with pytest.raises(IndexError):
        edits(spec(**params), VOCAB)
