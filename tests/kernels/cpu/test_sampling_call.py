"""How the sampling kernels are called: items, threads, and a start from the cache."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import openmp
from octavo.kernels.cpu import sampling_call as ops


def some_items(count):
    made = np.zeros(count, ops.ITEM)
    made["row"] = np.arange(count)[::-1]
    made["temperature"], made["top_p"] = np.arange(count) % 3 / 2, 0.5 + np.arange(count) % 2 / 2
    made["seed"] = np.arange(count)
    return made


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_results_do_not_depend_on_threads(monkeypatch, threads):
    logits = torch.randn(23, 9_000, generator=torch.Generator().manual_seed(0))
    alone = some_items(23)
    for i in range(23):
        ops.draw(logits, alone[i : i + 1])
    made = some_items(23)
    monkeypatch.setattr(openmp, "threads", lambda: threads)
    ops.draw(logits, made)
    assert made.tolist() == alone.tolist()
    made["top_k"] = 5
    ids, values = ops.logprobs(logits, made)
    monkeypatch.setattr(openmp, "threads", lambda: 1)
    again = ops.logprobs(logits, made)
    assert np.array_equal(ids, again[0])
    assert np.array_equal(values, again[1])


def test_items_may_share_a_row_and_ask_for_different_counts():
    logits = torch.arange(6.0).repeat(2, 1)
    made = np.zeros(3, ops.ITEM)
    made["row"], made["top_k"], made["token"] = [1, 1, 0], [0, 2, 1], [5, 0, 3]
    ids, values = ops.logprobs(logits, made)
    assert ids[:, 0].tolist() == [5, 0, 3]
    assert ids[1].tolist() == [0, 5, 4]
    assert np.isnan(values).tolist() == [[False, True, True], [False] * 3, [False, False, True]]


@pytest.mark.parametrize(
    ("field", "value"), [("row", 2), ("row", -1), ("token", 6), ("token", -1), ("top_k", 7)]
)
def test_items_outside_the_logits_are_refused(field, value):
    """The kernels read memory by these numbers, unchecked."""
    made = np.zeros(1, ops.ITEM)
    made[field] = value
    with pytest.raises(AssertionError):
        ops.logprobs(torch.zeros(2, 6), made)


def test_logits_of_another_form_are_refused():
    for logits in (torch.zeros(6, 2).t(), torch.zeros(2, 6, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            ops.draw(logits, np.zeros(1, ops.ITEM))


def test_a_later_start_needs_no_numba():
    """What Numba links in at run time is not there when object code comes from the cache."""
    for kernel in ops.kernels():
        kernel.load()
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np, torch\n"
        "from octavo.kernels.cpu import sampling_call as ops\n"
        "made = np.zeros(2, ops.ITEM)\n"
        "made['temperature'], made['top_p'], made['top_k'] = 1.0, 0.5, [0, 3]\n"
        "logits = torch.arange(200.0).reshape(1, 200)\n"
        "ops.draw(logits, made)\n"
        "print(made['token'].tolist(), ops.logprobs(logits, made)[0][1].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[199, 199] [199, 199, 198, 197]", done.stderr
