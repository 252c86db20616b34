"""Steps planned ahead: the same answers as step by step, nothing lost, nothing kept."""

import random
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.core.plan import PlanRow, RunnerLimits, SampleSpec, StepPlan, StepResult
from octavo.core.policy import FIFOScheduler, Load, StepLatencies
from octavo.core.policy_registry import create_policy
from octavo.core.scheduler import Update
from octavo.core.submission import Submission
from octavo.engine.admission import admit
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.errors import EngineDeadError
from octavo.params import SamplingParams

VOCAB = 50
EOS = 2

Answers = dict[tuple[str, int], tuple[tuple[int, ...], str | None, int | None]]


def draw(history: Any, spec: SampleSpec) -> int:
    """Depends on all tokens, and on what a sampler that looks back is given."""
    noise = () if spec.params.greedy else (spec.seed, spec.index, spec.position)
    past = (spec.prompt_ids, spec.output_ids) if spec.params.needs_history else ()
    if past:
        assert (*spec.prompt_ids, *spec.output_ids) == tuple(history)
    return hash((tuple(history), noise, past)) % VOCAB


def make(ahead: bool | None, runner: FakeRunner | None = None, **options: Any) -> Engine:
    blocks = options.pop("blocks", 257)
    limits = RunnerLimits(
        num_blocks=blocks, block_size=8, block_bytes=1, max_model_len=min(96, 8 * (blocks - 1)),
        vocab_size=VOCAB, eos_token_ids=(EOS,), num_host_blocks=options.pop("host", 0),
    )  # fmt: skip
    runner = runner or FakeRunner(next_token=draw)
    runner.limits = limits
    config = EngineConfig(block_size=8, async_scheduling=ahead, **options)
    return Engine(config, runner, create_policy(config.scheduler))


def add(engine: Engine, name: str, prompt: Any, params: SamplingParams, **fields: Any) -> None:
    submission = Submission(name, tuple(prompt), params, **fields)
    engine.add_request(admit(submission, engine.capabilities))


class Workload:
    """Random requests, some aborted, and some choices stopped, after a number of their tokens."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.options: dict[str, Any] = {
            "blocks": rng.choice([9, 13, 20, 60]),
            "host": rng.choice([0, 0, 8, 40]),
            "max_num_seqs": rng.choice([2, 4, 16]),
            "max_num_batched_tokens": rng.choice([16, 24, 64]),
            "enable_prefix_caching": rng.random() < 0.7,
            "preemption_mode": rng.choice(["auto", "swap", "recompute"]),
            "scheduler": rng.choice(["fifo", "priority", "priority", "adaptive"]),
        }
        self.window = min(96, 8 * (self.options["blocks"] - 1))
        self.requests = [self._request(rng, number) for number in range(rng.randrange(3, 14))]
        # (request, choice) -> tokens after which it is stopped; 99: of all choices, aborted
        self.stops = {
            (f"r{rng.randrange(14)}", rng.choice([0, 1, 99])): rng.randrange(1, 12)
            for _ in range(rng.randrange(4))
        }
        self.arrivals = [rng.randrange(4) for _ in self.requests]

    def _request(self, rng: random.Random, number: int) -> tuple[str, list[int], SamplingParams]:
        length = rng.randrange(1, min(60, self.window - 1))
        shared = [(7 * i + rng.randrange(2)) % VOCAB for i in range(rng.randrange(length))]
        prompt = [*shared, *rng.choices(range(VOCAB), k=length - len(shared))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 3]),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            max_tokens=rng.randrange(1, min(30, self.window - length) + 1),
            min_tokens=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=rng.choice([None, [3, 4]]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        )
        return f"r{number}", prompt, params

    def run(self, engine: Engine) -> Answers:
        found: Answers = {}
        left = list(zip(self.requests, self.arrivals, strict=True))
        rng = random.Random(1)
        waited = steps = 0
        while left or engine.has_work():
            while left and left[0][1] <= waited:
                (name, prompt, params), _ = left.pop(0)
                heeded = engine.capabilities.heeds_priority
                add(engine, name, prompt, params, priority=rng.choice([0, 1]) if heeded else 0)
                waited = 0
            waited += 1
            steps += 1
            assert steps < 5000, "no progress"
            if engine.has_work():
                self._take(engine, engine.step(), found)
            engine.scheduler.check()
        assert engine.scheduler.num_in_flight == 0
        assert engine.scheduler.kv.pool.num_used == 0
        assert engine.scheduler.num_swapped == 0
        return found

    def _take(self, engine: Engine, updates: list[Update], found: Answers) -> None:
        for update in updates:
            key = (update.request_id, update.index)
            tokens, reason, _ = found.get(key, ((), None, None))
            if reason in ("stopped", "aborted"):
                continue  # another choice of this step ended it
            assert reason is None, "tokens after the end"
            tokens = (*tokens, *update.token_ids)
            found[key] = (tokens, update.finish_reason, update.stop_reason)
            at = self.stops.get(key)
            if update.finish_reason is None and at is not None and len(tokens) >= at:
                engine.finish_choice(*key)
                found[key] = (tokens, "stopped", None)
            at = self.stops.get((update.request_id, 99))
            if update.index == 0 and at is not None and len(tokens) >= at:
                engine.abort(update.request_id)
                # How far its other choices are may differ.
                gone = {(name, index): ((), "aborted", None) for name, index in found
                        if name == update.request_id}  # fmt: skip
                found.update(gone)
                found[key] = (tokens, "aborted", None)


def answers(seed: int) -> tuple[Engine, Answers, Answers]:
    workload = Workload(seed)
    plain = workload.run(make(False, **workload.options))
    engine = make(True, **workload.options)
    return engine, plain, workload.run(engine)


@pytest.mark.parametrize("seed", range(60))
def test_random_workloads_have_the_same_answers(seed: int) -> None:
    engine, plain, overlapped = answers(seed)
    assert overlapped == plain
    assert engine.scheduler.num_discarded_tokens == engine.stats.discarded_tokens


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_more_random_workloads(part: int) -> None:
    for seed in range(1000 + 300 * part, 1300 + 300 * part):
        _, plain, overlapped = answers(seed)
        assert overlapped == plain, seed


GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)


def scripted(*tokens: int) -> FakeRunner:
    return FakeRunner(next_token=lambda history, spec: tokens[min(spec.position, len(tokens) - 1)])


def computed(engine: Engine) -> list[tuple[int, int]]:
    """(step, plans in flight while it is computed), as it is run by the fake as late as it may."""
    found: list[tuple[int, int]] = []
    runner = engine.executor
    assert isinstance(runner, FakeRunner)
    runner.before_step = lambda plan: found.append((plan.step, engine.scheduler.num_in_flight))
    return found


def test_the_next_step_is_planned_before_a_result_is_read() -> None:
    for ahead, in_flight in ((True, 2), (False, 1)):
        engine = make(ahead)
        steps = computed(engine)
        add(engine, "a", range(9), GREEDY)
        engine.step()
        assert steps == [(1, in_flight)]
        while engine.has_work():
            engine.step()
        assert {count for _, count in steps[:-1]} == {in_flight}


def test_a_row_planned_ahead_says_which_draw_it_follows() -> None:
    engine = make(True)
    seen: list[PlanRow] = []
    runner = engine.executor
    assert isinstance(runner, FakeRunner)
    runner.before_step = lambda plan: seen.extend(plan.rows)
    add(engine, "a", range(9), GREEDY.with_(n=2))
    add(engine, "b", range(5), GREEDY)
    while engine.has_work():
        engine.step()
    ahead = [row for row in seen if row.from_draw is not None]
    assert {row.request_id for row in ahead} == {"a", "a#1", "b"}
    assert {row.token_ids for row in ahead} == {(-1,)}
    b = next(row for row in ahead if row.request_id == "b")
    assert b.from_draw == 2  # after the two draws of "a"


def test_max_tokens_and_the_window_are_certain_ends() -> None:
    """No step is planned after them, and none discarded."""
    engine = make(True)
    steps = computed(engine)
    add(engine, "a", range(9), GREEDY)
    add(engine, "b", [1] * 92, GREEDY.with_(max_tokens=None))
    while engine.has_work():
        engine.step()
    assert len(steps) == engine.stats.steps
    assert engine.stats.discarded_tokens == 0


def test_a_stop_discards_one_token_and_says_so() -> None:
    engine = make(True, scripted(7, 8, EOS))
    add(engine, "a", range(9), GREEDY.with_(ignore_eos=False, max_tokens=20))
    updates = [update for _ in range(3) for update in engine.step()]
    assert [update.token_ids for update in updates] == [(7,), (8,), (EOS,)]
    assert not engine.has_work()
    assert engine.scheduler.num_in_flight == engine.scheduler.kv.pool.num_used == 0
    stats = engine.stats
    assert (stats.discarded_tokens, stats.generation_tokens, stats.steps) == (1, 3, 4)
    # The discarded token is none of the prompt's: 8, as the step of the last one gave a token.
    assert 3 * stats.prompt_throughput == pytest.approx(8 * stats.throughput)


def test_blocks_of_a_stopped_request_are_kept_until_the_step_that_writes_them_has_run() -> None:
    engine = make(True, scripted(7, EOS))
    add(engine, "a", range(9), GREEDY.with_(ignore_eos=False))
    add(engine, "b", range(9), GREEDY)
    kv = engine.scheduler.kv
    engine.step()
    engine.step()  # "a" has ended, and the step in flight computes another token of it
    assert kv.pool.num_used == 2 + 2 - 1  # the first block of both is the same
    engine.step()
    assert kv.pool.num_used == 2


class Listening(FIFOScheduler):
    """Counts the steps whose time it is told."""

    heard = 0

    def observe(self, latencies: StepLatencies) -> None:
        self.heard += 1

    def refusal(self, load: Load) -> str | None:
        return None


def test_a_step_that_nobody_waits_for_is_not_measured() -> None:
    policy = Listening()
    engine = Engine(
        EngineConfig(async_scheduling=True), FakeRunner(next_token=lambda *_: EOS), policy
    )
    add(engine, "a", range(9), GREEDY.with_(ignore_eos=False))
    while engine.has_work():
        engine.step()
    assert engine.stats.steps == 2
    assert policy.heard == 1


def test_an_abort_leaves_nothing_in_flight() -> None:
    engine = make(True)
    add(engine, "a", range(9), GREEDY)
    engine.step()
    assert engine.scheduler.num_in_flight == 1
    engine.abort("a")
    assert engine.scheduler.num_in_flight == engine.scheduler.kv.pool.num_used == 0
    assert engine.reset_prefix_cache()
    add(engine, "a", range(9), GREEDY)  # the id may be used again at once
    while engine.has_work():
        engine.step()
    assert engine.stats.finished == {"abort": 1, "length": 1}


def test_a_failed_step_ends_the_engine_and_the_earlier_one_is_still_answered() -> None:
    def explode(plan: StepPlan) -> None:
        if plan.step == 2:
            raise ValueError("no luck")

    engine = make(True, FakeRunner(next_token=draw, before_step=explode))
    add(engine, "a", range(9), GREEDY)
    assert len(engine.step()) == 1
    with pytest.raises(EngineDeadError, match="no luck"):
        engine.step()
    assert not engine.has_work()
    engine.abort("a")
    engine.close()


def test_it_is_the_executors_choice_unless_the_configuration_says_otherwise() -> None:
    for asked, device, expected in (
        (None, True, 2),
        (None, False, 1),
        (True, False, 2),
        (False, True, 1),
    ):
        engine = make(asked, FakeRunner(next_token=draw, runs_ahead=device))
        steps = computed(engine)
        add(engine, "a", range(9), GREEDY)
        engine.step()
        assert steps == [(1, expected)]


def test_a_runner_that_is_not_asked_to_run_ahead_is_never_given_two_steps() -> None:
    class Plain(FakeRunner):
        def submit(self, plan: StepPlan) -> Any:
            raise AssertionError("not asked for")

        def execute(self, plan: StepPlan) -> StepResult:
            return super().execute(plan)

    engine = make(None, Plain(next_token=draw))
    add(engine, "a", range(9), GREEDY)
    while engine.has_work():
        engine.step()
