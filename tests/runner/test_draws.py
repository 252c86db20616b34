"""A device that draws ahead: the CPU's tokens; no result awaited early, no buffer reused early.

The device is played by the CPU, see `tests.runner.asynchronous`.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from msgspec import to_builtins
from msgspec.structs import replace
from tests import kit
from tests.engine.test_engine_overlap import Workload
from tests.runner.asynchronous import Asynchronous, LateEvent, engine_of, watch

from octavo import devices
from octavo.config import EngineConfig
from octavo.core.plan import NOT_DRAWN, PlanRow, SampleSpec, StepPlan
from octavo.errors import EngineDeadError, EngineError
from octavo.params import SamplingParams
from octavo.runner.device import DrawsAhead, create_device
from octavo.runner.model_runner import ModelRunner

OPTIONS = {"dtype": "float32", "load_progress": False, "max_model_len": 96, "block_size": 8,
           "num_gpu_blocks_override": 60, "swap_space": 0.002}  # fmt: skip


@pytest.fixture(autouse=True)
def _devices(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {})
    devices.register("asynchronous", Asynchronous)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kit.tiny(tmp_path_factory.mktemp("toy"), num_layers=1)


def make(folder, device, **options):
    return ModelRunner(EngineConfig(model=str(folder), device=device, **(OPTIONS | options)))


@pytest.fixture
def runners(folder):
    """On the CPU, and on the device."""
    devices.register("asynchronous", Asynchronous)
    return make(folder, "cpu"), make(folder, "asynchronous")


def test_the_device_draws_ahead():
    assert isinstance(create_device(EngineConfig(device="asynchronous")), DrawsAhead)


def test_random_workloads_have_the_cpus_answers(runners):
    check(runners, range(6))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_more_random_workloads(folder, runners):
    """Also without captured steps."""
    check(runners, range(100, 160))
    eager = make(folder, "asynchronous", enforce_eager=True)
    check((runners[0], eager), range(200, 260))


def check(runners, seeds):
    cpu, device = runners
    met = Counter()
    for seed in seeds:
        workload = Workload(seed)
        expected = workload.run(engine_of(cpu, workload))
        engine = engine_of(device, workload)
        watch(engine, device, device.device.copies)
        assert workload.run(engine) == expected, seed
        scheduler = engine.scheduler
        met += Counter(
            preempted=scheduler.num_preemptions, swapped=scheduler.num_swap_outs,
            discarded=scheduler.num_discarded_tokens, taken=device.device.taken,
            chosen=sum(params.n > 1 for _, _, params in workload.requests),
            penalized=sum(params.needs_history for _, _, params in workload.requests),
            **Counter(str(reason) for _, reason, _ in expected.values()),
        )  # fmt: skip
        device.device.taken = 0
    everything = {"preempted", "swapped", "discarded", "chosen", "penalized", "stopped", "aborted"}
    assert everything <= met.keys(), met
    assert met["taken"] > 10 * len(seeds)


def lose_a_buffer(monkeypatch):
    query = LateEvent.query
    monkeypatch.setattr(LateEvent, "query", lambda self: bool(self.place) or query(self))


def read_at_once(monkeypatch):
    monkeypatch.setattr(LateEvent, "synchronize", lambda self: None)


def finish_first(monkeypatch):
    monkeypatch.setattr(ModelRunner, "_may_follow", lambda self, last: False)


@pytest.mark.parametrize(
    ("fault", "says"),
    [(lose_a_buffer, "written while a copy reads it"),
     (read_at_once, "IndexError|OverflowError|KeyError|AssertionError|ValueError"),
     (finish_first, "awaited before the next step is launched")],
)  # fmt: skip
def test_faults_of_the_host_are_seen(runners, monkeypatch, fault, says):
    _, device = runners
    workload = Workload(1)
    engine = engine_of(device, workload)
    watch(engine, device, device.device.copies)
    fault(monkeypatch)
    with pytest.raises((EngineDeadError, AssertionError), match=says):
        workload.run(engine)


def spec(position, output_ids=(), index=0, **params):
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, **params})
    prompt = tuple(range(20)) if params.needs_history else ()
    return SampleSpec(params, 5, index, position, prompt, output_ids)


def row(samples, ids=tuple(range(20)), start=0, **more):
    return PlanRow("a", ids, start, ((1, 2, 3, 4),), tuple(samples), **more)


FOLLOWING = row([spec(1)], (NOT_DRAWN,), 20, from_draw=0)


def test_a_step_that_draws_nothing_is_awaited(runners):
    """Else the host would submit a whole prompt, and measure nothing."""
    _, device = runners
    copies = device.device.copies
    result = device.submit(StepPlan(1, (row([]),)))
    assert copies.in_flight
    assert result().rows[0].choices == ()
    assert not copies.in_flight


def test_a_token_of_a_step_that_drew_none_is_refused(runners):
    """A GPU would read outside of the embedding, which ends its process."""
    _, device = runners
    device.submit(StepPlan(1, (row([]),)))
    with pytest.raises(EngineError, match="step 2 takes a token of a step that drew none"):
        device.submit(StepPlan(2, (FOLLOWING,)))


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0}, {"logprobs": 3}, {"repetition_penalty": 1.5, "logprobs": 1},
     {"logit_bias": {3: 4.0}}, {"allowed_token_ids": [5, 6, 7]}, {"presence_penalty": 1.0},
     {"bad_words": ["x"]}, {"prompt_logprobs": 2}],
    ids=str,
)  # fmt: skip
def test_results_are_the_cpus(runners, params):
    asked = {"num_prompt_logprobs": 2, "prompt_targets": tuple(range(1, 20))}
    more = asked if "prompt_logprobs" in params else {}
    samples = [spec(0, index=i, **params) for i in range(2)]
    looks_back = spec(0).params.with_(**params).needs_history
    found = []
    for runner in runners:
        first = runner.submit(StepPlan(1, (row(samples, **more), row([spec(0, **params)]))))
        ahead = row([spec(1, **params)], (NOT_DRAWN,), 20, from_draw=2)
        second = runner.submit(StepPlan(2, (ahead,)))
        found += [plain(first()), plain(second())]
    assert same(found[:2], found[2:])
    token = found[0][1]["choices"][0][0]
    known = row([spec(1, (token,) if looks_back else (), **params)], (token,), 20)
    for runner in runners:
        assert same(plain(runner.execute(StepPlan(3, (known,)))), found[1])


class Mask:
    """Every third token."""

    def words(self):
        return np.array([sum(1 << bit for bit in range(32) if (32 * word + bit) % 3 == 0)
                         for word in range(9)], np.uint32).view(np.int32)  # fmt: skip


@pytest.mark.parametrize("params", [{}, {"logprobs": 3}, {"presence_penalty": 1.0}], ids=str)
def test_masks_of_grammars_close_what_they_close_on_the_cpu(runners, params):
    samples = [replace(spec(0, index=i, **params), mask=Mask()) for i in range(2)]
    plan = StepPlan(1, (row(samples), other(0)))
    one, two = (plain(runner.execute(plan)) for runner in runners)
    assert same(one, two)
    assert all(token % 3 == 0 for choice in one[0]["choices"] for token in choice)


def plain(result):
    return to_builtins(result.rows)


def same(one, other):
    """Log-probabilities may be rounded differently by two libraries."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return abs(one - other) < 1e-5 if isinstance(one, float) else one == other


def test_a_row_that_follows_a_failed_one_is_computed_and_harms_nobody(runners):
    cpu, device = runners
    expected = cpu.execute(StepPlan(1, (other(0),))), cpu.execute(StepPlan(2, (other(1),)))
    impossible = replace(spec(0, allowed_token_ids=[5]), min_tokens_left=1, stop_ids=(5,))
    first = device.submit(StepPlan(1, (row([impossible]), other(0))))
    second = device.submit(StepPlan(2, (FOLLOWING, other(1))))
    failed, ok = first().rows
    assert "no token is left to draw" in failed.error
    assert (ok,) == expected[0].rows
    assert second().rows[1:] == expected[1].rows


def other(number):
    return PlanRow("b", (7, 8, 9), 0, ((5,),), (spec(0, index=number),))


def test_logits_that_are_not_numbers_are_reported_one_step_late(runners):
    """The request fails with the token whose logits they are, as step by step."""
    found = []
    for runner in runners:
        workload = Workload(3)
        weight = runner.model.embed.__self__.weight
        weight[11] = float("nan")
        found.append(workload.run(engine_of(runner, workload)))
    assert found[0] == found[1]
    assert "error" in {reason for _, reason, _ in found[0].values()}


@pytest.mark.parametrize("late", [False, True])
def test_out_of_memory_in_a_step_ahead(runners, late, monkeypatch):
    """Also where it is the draws that do not fit, after the model has run."""
    cpu, device = runners
    workload = Workload(8)
    expected = workload.run(engine_of(cpu, workload))
    engine = engine_of(device, workload)
    if late:
        launch, count = device.device.launch_draws, iter(range(10**6))

        def launch_draws(logits, items):
            if next(count) % 5 == 4 and len(items) > 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return launch(logits, items)

        monkeypatch.setattr(device.device, "launch_draws", launch_draws)
    else:
        device.device.most = 5
    assert workload.run(engine) == expected
    assert "release" in device.device.calls
