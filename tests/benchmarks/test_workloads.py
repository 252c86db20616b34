"""The workloads are fixed: saved rows of different days compare only if they are."""

import hashlib
import json

from benchmarks.peers.transformers_static import kv_account
from benchmarks.prompts import chat_prompts
from benchmarks.workloads import WORKLOADS, Job


def digest(jobs: list[Job]) -> str:
    text = json.dumps([[job.prompt, job.max_tokens] for job in jobs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_work_does_not_change() -> None:
    assert {name: digest(make(1)) for name, make in WORKLOADS.items()} == {
        "W1": "f6540cc245178918",
        "W2": "6ae5490262e992a7",
        "W3": "57d26a2178ce6a65",
        "W4": "97de95bce2af3a9a",
        "W5": "60e199a282bc3b69",
        "W6": "d4735dce318db59a",
        "W7": "c08d78f2fefc47de",
    }


def test_w1_is_as_large_as_the_published_figures_say() -> None:
    jobs = WORKLOADS["W1"](0)
    assert sum(len(job.prompt) for job in jobs) == 15_302
    assert sum(job.max_tokens for job in jobs) == 8_075
    assert WORKLOADS["W1"](0) == WORKLOADS["W1"](5)


def test_w6_is_the_beginning_of_w1() -> None:
    jobs = WORKLOADS["W6"](3)
    assert jobs == WORKLOADS["W1"](0)[:16]
    assert sum(len(job.prompt) for job in jobs) == 3_564
    assert sum(job.max_tokens for job in jobs) == 2_116


def test_w3_shares_its_first_512_tokens_and_no_more() -> None:
    prompts = [tuple(job.prompt) for job in WORKLOADS["W3"](0)]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512] for prompt in prompts}) > 1
    assert WORKLOADS["W3"](0)[0].prompt[0] != WORKLOADS["W3"](1)[0].prompt[0]


def test_the_demonstration_has_48_different_prompts_of_mixed_lengths() -> None:
    prompts = chat_prompts()
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 48
    lengths = [len(prompt.text) for prompt in prompts]
    assert max(lengths) > 20 * min(lengths)
    assert max(p.max_tokens for p in prompts) > 10 * min(p.max_tokens for p in prompts)


def test_static_batching_s_slots_are_counted_per_step() -> None:
    # Two rows padded to 4. Step 0: 8 slots held, 2 + 4 of use. Then the first row is done, but
    # stays: 10 and 12 held, 5 and 6 of use.
    account = kv_account([[Job([1] * 2, 1), Job([1] * 4, 3)]])
    assert account["kv"]["use"] == 17 / 30
    assert account["kv"]["most_held_slots"] == 12
    assert account["in_flight"] == 4 / 3
