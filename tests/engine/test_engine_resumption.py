"""A request that an engine has begun goes on in another one, with the same answer from any step on.

Over the strict runner without weights, and over a toy with weights, whose log-probabilities show
what its attention reads.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from octavo import LLM
from octavo.config import EngineConfig
from octavo.core.plan import CacheSpec, RunnerLimits, SampleSpec, TokenLogprobs
from octavo.core.policy_registry import create_policy
from octavo.core.scheduler import Update
from octavo.core.submission import Continuation, Submission
from octavo.engine.admission import admit
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.engine.seeds import SeedSource
from octavo.errors import ContextLengthError, QueueFullError, RequestError
from octavo.params import SamplingParams

VOCAB = 50
EOS = 2
FULL, WINDOW = CacheSpec(), CacheSpec("window", 20)


@dataclass
class Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    end: tuple[str | None, int | None] = (None, None)


class Caller:
    """What a caller has of its requests. stops: choices to stop, after how many tokens."""

    def __init__(
        self, requests: Iterable[Submission], stops: dict[tuple[str, int], int] | None = None
    ) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.stops = stops or {}
        self.choices = {
            (name, index): Choice()
            for name, request in self.requests.items()
            for index in range(request.params.n)
        }
        self.prompts: dict[str, tuple[TokenLogprobs, ...]] = {}

    def send(self, engine: Engine) -> None:
        for request in self.requests.values():
            engine.add_request(admit(request, engine.capabilities))

    def resend(self, engine: Engine) -> None:
        """As the client does when an engine has died."""
        for name, request in self.requests.items():
            choices = [self.choices[name, index] for index in range(request.params.n)]
            left = [None if one.end[0] else tuple(one.tokens) for one in choices]
            if any(tokens is not None for tokens in left):
                far = Continuation(tuple(left) if any(one.tokens for one in choices) else ())
                request = msgspec.structs.replace(request, continuation=far)
                engine.add_request(admit(request, engine.capabilities))

    def read(self, engine: Engine, updates: Iterable[Update]) -> None:
        for update in updates:
            key = (update.request_id, update.index)
            choice = self.choices[key]
            if choice.end[0] == "stopped":
                continue
            assert choice.end[0] is None, "tokens after the end"
            choice.tokens += update.token_ids
            choice.logprobs += update.logprobs
            choice.end = (update.finish_reason, update.stop_reason)
            if update.prompt_logprobs is not None:
                assert update.request_id not in self.prompts, "twice"
                self.prompts[update.request_id] = update.prompt_logprobs
            if update.finish_reason is None and len(choice.tokens) == self.stops.get(key):
                engine.finish_choice(*key)
                choice.end = ("stopped", None)

    def run(self, engine: Engine, most: int = 5000) -> bool:
        """At most so many steps; whether all has ended."""
        while engine.has_work() and most > 0:
            most -= 1
            self.read(engine, engine.step())
            engine.scheduler.check()
        return not engine.has_work()


def idle(engine: Engine) -> bool:
    scheduler = engine.scheduler
    return not (scheduler.kv.pool.num_used or scheduler.num_swapped or scheduler.num_in_flight)


# Without weights: every cut of random workloads.


def draw(history: Any, spec: SampleSpec) -> int:
    """Depends on all tokens, and on what a sampler that looks back is given."""
    noise = () if spec.params.greedy else (spec.seed, spec.index, spec.position)
    if spec.prompt_ids:
        assert (*spec.prompt_ids, *spec.output_ids) == tuple(history)
    past = (spec.prompt_ids, spec.output_ids, spec.bad_words)
    return hash((tuple(history), noise, past)) % VOCAB


def limits_of(blocks: int, host: int, groups: tuple[CacheSpec, ...]) -> RunnerLimits:
    return RunnerLimits(
        num_blocks=blocks, block_size=8, block_bytes=1, max_model_len=80, vocab_size=VOCAB,
        eos_token_ids=(EOS,), num_host_blocks=host, kv_groups=groups,
    )  # fmt: skip


def random_engine(rng: random.Random, groups: tuple[CacheSpec, ...]) -> Engine:
    runner = FakeRunner(next_token=draw)
    runner.limits = limits_of(
        rng.choice([11, 14, 60]) * len(groups), rng.choice([0, 8, 40]), groups
    )
    config = EngineConfig(
        block_size=8,
        async_scheduling=rng.random() < 0.5,
        max_num_seqs=rng.choice([2, 4, 16]),
        max_num_batched_tokens=rng.choice([16, 24, 64]),
        enable_prefix_caching=rng.random() < 0.7,
        preemption_mode=rng.choice(["auto", "swap", "recompute"]),
        scheduler=rng.choice(["fifo", "priority", "adaptive"]),
    )
    return Engine(config, runner, create_policy(config.scheduler))


def random_request(rng: random.Random, number: int) -> Submission:
    length = rng.randrange(1, 50)
    shared = [(7 * i) % VOCAB for i in range(rng.randrange(length))]
    params = SamplingParams(
        n=rng.choice([1, 1, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.choice([number, None]),
        max_tokens=rng.randrange(1, 29),
        min_tokens=rng.choice([0, 0, 1]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.choice([None, [3, 4]]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, 1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
    )
    return Submission(
        f"r{number}",
        (*shared, *rng.choices(range(VOCAB), k=length - len(shared))),
        params,
        ((3, 4),) if rng.random() < 0.2 else (),
        cache_salt=rng.choice([None, "salt"]),
        seed=1000 + number,
        arrival_time=float(number),
    )


def check_every_cut(seed: int) -> int:
    """Returns the number of cuts."""
    rng = random.Random(seed)
    groups = rng.choice([(FULL,), (FULL,), (FULL, WINDOW)])
    requests = [random_request(rng, number) for number in range(rng.randrange(2, 7))]
    stops = {(f"r{rng.randrange(6)}", rng.choice([0, 1])): rng.randrange(1, 9) for _ in range(3)}
    undisturbed = Caller(requests, stops)
    engine = random_engine(random.Random(seed), groups)
    undisturbed.send(engine)
    assert undisturbed.run(engine)
    cut = 0
    while True:
        caller = Caller(requests, stops)
        engine = random_engine(random.Random(seed), groups)
        caller.send(engine)
        if caller.run(engine, cut):
            return cut
        for _ in range(rng.choice([1, 1, 2])):  # the second engine may die too
            engine = random_engine(rng, groups)
            caller.resend(engine)
            if rng.random() < 0.3:
                caller.run(engine, rng.randrange(4))
        if engine.has_work():
            assert caller.run(engine)
        assert caller.choices == undisturbed.choices, cut
        assert caller.prompts == undisturbed.prompts, cut
        assert idle(engine)
        cut += 1


@pytest.mark.parametrize("seed", [0, 2, 4, 5])
def test_random_workloads_cut_after_every_step(seed: int) -> None:
    assert check_every_cut(seed) > 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_random_workloads_cut_after_every_step() -> None:
    for seed in range(100, 300):
        check_every_cut(seed)


# What a continuation is, and what is refused.

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)


def plain_engine(**options: Any) -> Engine:
    runner = FakeRunner(next_token=draw)
    runner.limits = limits_of(60, 0, (FULL,))
    config = EngineConfig(block_size=8, **options)
    return Engine(config, runner, create_policy(config.scheduler))


def continued(params: SamplingParams, *outputs: tuple[int, ...] | None) -> Submission:
    return Submission("a", (5, 6, 7), params, continuation=Continuation(outputs), arrival_time=0.0)


@pytest.mark.parametrize(
    ("outputs", "error", "says"),
    [
        (((1,), (1,)), RequestError, "n=3 has 3 outputs"),
        ((None, None, None), RequestError, "0 of them unfinished"),
        (((1,), (), None), ContextLengthError, "choice 1 continues after 0 tokens"),
        (((1,) * 7, None, None), ContextLengthError, "choice 0 continues after 7 tokens"),
        ((None, (1, VOCAB), None), RequestError, f"token id {VOCAB}"),
    ],
)
def test_a_continuation_is_checked(
    outputs: tuple[tuple[int, ...] | None, ...], error: type[RequestError], says: str
) -> None:
    engine = plain_engine()
    with pytest.raises(error, match=says) as raised:
        admit(continued(GREEDY.with_(n=3), *outputs), engine.capabilities)
    assert raised.value.param == "continuation"


def test_a_continuation_must_fit_the_window_of_its_engine() -> None:
    long = continued(GREEDY.with_(max_tokens=None), (1,) * 78)
    with pytest.raises(ContextLengthError, match="at most 80 with its prompt"):
        admit(long, plain_engine().capabilities)


@pytest.mark.parametrize(
    ("params", "outputs", "end"),
    [
        (GREEDY, (1,) * 6, ("length", None)),
        (GREEDY.with_(max_tokens=None), (1,) * 77, ("length", None)),
        (GREEDY.with_(ignore_eos=False), (1, EOS), ("stop", None)),
        (GREEDY.with_(stop_token_ids=[9]), (1, 9), ("stop", 9)),
    ],
)
def test_an_end_that_was_not_seen_is_said_without_a_token(
    params: SamplingParams, outputs: tuple[int, ...], end: tuple[str, int | None]
) -> None:
    engine = plain_engine()
    engine.add_request(admit(continued(params, outputs), engine.capabilities))
    assert engine.has_work()
    (update,) = engine.step()
    assert update.token_ids == ()
    assert (update.finish_reason, update.stop_reason) == end
    assert not engine.has_work()
    assert engine.stats.finished == {end[0]: 1}


def test_what_was_accepted_once_is_not_refused() -> None:
    engine = plain_engine(max_waiting=0, max_num_seqs=1)
    engine.scheduler.fallback.refuses = True
    engine.scheduler.fallback._refusal = lambda load: "shed"  # type: ignore[assignment]
    with pytest.raises(QueueFullError):
        engine.add_request(Submission("new", (1,), GREEDY))
    for number, outputs in enumerate([(), ((1,),), ((2, 3),)]):
        request = msgspec.structs.replace(continued(GREEDY, *outputs), request_id=str(number))
        engine.add_request(admit(request, engine.capabilities))
    caller = {str(number): 0 for number in range(3)}
    while engine.has_work():
        for update in engine.step():
            caller[update.request_id] += len(update.token_ids)
    assert caller == {"0": 6, "1": 5, "2": 4}
    engine.add_request(continued(GREEDY, (1,)))
    with pytest.raises(RequestError, match="in flight"):
        engine.add_request(continued(GREEDY, (1,)))


def test_a_resumed_request_runs_before_new_ones() -> None:
    engine = plain_engine(max_num_seqs=1)
    for name in ("new", "newer"):
        engine.add_request(Submission(name, (1, 2), GREEDY))
    for name, outputs in (("first", ((1,),)), ("second", ()), ("third", ((1,),))):
        resumed = msgspec.structs.replace(continued(GREEDY, *outputs), request_id=name)
        engine.add_request(admit(resumed, engine.capabilities))
    ended: list[str] = []
    while engine.has_work():
        ended += [update.request_id for update in engine.step() if update.finish_reason]
    assert ended == ["first", "second", "third", "new", "newer"]


def test_choices_share_the_blocks_of_their_prompt() -> None:
    engine = plain_engine()
    params = GREEDY.with_(n=3, temperature=1, seed=1)
    request = Submission(
        "a", tuple(range(40)), params, continuation=Continuation(((1,), None, (2, 3)))
    )
    engine.add_request(admit(request, engine.capabilities))
    while engine.scheduler.num_running < 2:
        engine.step()
    slots = engine.slots()
    assert {name: shared for name, (_, _, shared) in slots.items()} == {"a": 40, "a#2": 40}


def test_what_another_engine_has_counted_is_not_counted_again() -> None:
    times = iter(range(1000, 9000))
    engine = plain_engine()
    engine.clock = lambda: float(next(times))
    engine.add_request(admit(continued(GREEDY, (1, 2, 3, 4)), engine.capabilities))
    while engine.has_work():
        engine.step()
    stats, fresh = engine.stats, engine.recorder.drain()
    assert stats.generation_tokens == 2
    assert (stats.prompt_tokens, fresh.prompt_tokens, fresh.ttft, fresh.queue) == (0, [], [], [])
    assert len(fresh.itl) == 2
    assert max(fresh.itl) < 100  # since it came here, not since its last token
    assert fresh.generation_tokens == fresh.most_tokens == [6]
    assert fresh.e2e[0] > 1000  # from its arrival
    assert fresh.prefill == fresh.decode == fresh.tpot == []


def test_seeds_come_in_order_whoever_draws_them() -> None:
    sampled = GREEDY.with_(temperature=1)
    tokens: list[list[int]] = []
    for drawn_here in (False, True):
        engine, source = plain_engine(seed=4), SeedSource(4)
        for number in range(3):
            seed = source.next() if drawn_here else None
            engine.add_request(Submission(str(number), (1, 2), sampled, seed=seed))
        tokens.append([])
        while engine.has_work():
            tokens[-1] += [token for update in engine.step() for token in update.token_ids]
    assert tokens[0] == tokens[1]
    assert SeedSource(None).next() != SeedSource(None).next()


# With weights.


@pytest.fixture(scope="module", params=["float32", "int8"])
def toy(tiny_folder: Any, request: pytest.FixtureRequest) -> Iterable[LLM]:
    llm = LLM(
        str(tiny_folder), dtype="float32", num_gpu_blocks_override=64, max_model_len=256,
        load_progress=False, swap_space=0.01,
        kv_cache_dtype="auto" if request.param == "float32" else "int8",
    )  # fmt: skip
    yield llm
    llm.close()


class Part:
    """The runner of `llm`, over a part of its blocks. Its cache holds what others left there."""

    def __init__(self, llm: LLM, blocks: int) -> None:
        runner = llm.engine.executor
        self.limits = replace(runner.limits, num_blocks=blocks, max_model_len=128)
        self.runs_ahead = False
        self.execute, self.submit = runner.execute, runner.submit
        self.explain = runner.explain

    def close(self) -> None:
        pass


def over(llm: LLM, blocks: int = 64, **options: Any) -> Engine:
    config = llm.engine.config.with_(**options)
    return Engine(config, Part(llm, blocks), create_policy("fifo"))


def toy_requests() -> list[Submission]:
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 11, "n": 3},
        {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_tokens": 5, "ignore_eos": False},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.7, "seed": -4, "stop_token_ids": list(range(60)), "min_tokens": 3},
        {"temperature": 1.1, "presence_penalty": 0.5, "bad_words": ["x"]},
    ]
    return [
        Submission(
            f"r{number}",
            tuple(rng.choices(range(256), k=length)),
            SamplingParams(**{"max_tokens": 9, "ignore_eos": True, "logprobs": 2, **kind}),
            ((101,), (7, 8)) if "bad_words" in kind else (),
            seed=5,
        )
        for number, (kind, length) in enumerate(zip(kinds, (33, 16, 15, 40, 7, 64), strict=True))
    ]


def near(have: list[TokenLogprobs | None], want: list[TokenLogprobs | None]) -> bool:
    return all(
        one is not None
        and two is not None
        and (one.token_ids, one.ranks) == (two.token_ids, two.ranks)
        and one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
        for one, two in zip(have, want, strict=True)
    )


# Preempted and recomputed, swapped, in chunks, without a cache.
HARD = [
    {"blocks": 10, "preemption_mode": "recompute"},
    {"blocks": 10, "preemption_mode": "swap"},
    {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    {"enable_prefix_caching": False},
]


def test_tokens_and_logprobs_of_a_model_cut_after_every_step(toy: LLM) -> None:
    requests = toy_requests()
    undisturbed = Caller(requests)
    engine = over(toy)
    undisturbed.send(engine)
    assert undisturbed.run(engine)
    preempted = swapped = cut = 0
    while True:
        caller, before, after = Caller(requests), HARD[cut % 4], HARD[(cut // 2 + 1) % 4]
        engine = over(toy, **before)
        caller.send(engine)
        ended = caller.run(engine, cut)
        if ended:
            break
        engine = over(toy, **after)
        caller.resend(engine)
        assert caller.run(engine)
        preempted += engine.scheduler.num_preemptions
        swapped += engine.scheduler.num_swap_outs
        assert idle(engine)
        for key, choice in caller.choices.items():
            want = undisturbed.choices[key]
            assert (choice.tokens, choice.end) == (want.tokens, want.end), (cut, key)
            assert near(choice.logprobs, want.logprobs), (cut, key)
        assert near(list(caller.prompts["r0"]), list(undisturbed.prompts["r0"]))
        cut += 1
    assert cut > 8
    assert preempted > 0
    assert swapped > 0
