"""The engine over the fake runner: no weights, but every rule of blocks and steps."""

from itertools import pairwise

import pytest

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine import stats
from octavo.engine.admission import admit
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner, hashed
from octavo.errors import ContextLengthError, EngineDeadError, QueueFullError, RequestError
from octavo.params import SamplingParams

VOCAB = 256


def make_engine(num_blocks=257, max_model_len=1024, runner=None, **options):
    limits = RunnerLimits(
        num_blocks=num_blocks, block_size=16, block_bytes=1, max_model_len=max_model_len,
        vocab_size=VOCAB, eos_token_ids=(2,),
    )  # fmt: skip
    runner = runner or FakeRunner()
    runner.limits = limits
    config = EngineConfig(**{"swap_space": 0, **options})
    return Engine(config, runner, create_policy(config.scheduler))


def add(engine, request_id, prompt, params, **fields):
    """As `LLM` and the web process do: made, checked, added."""
    submission = Submission(request_id, tuple(prompt), params, **fields)
    engine.add_request(admit(submission, engine.capabilities))


def run(engine, most_steps=20_000):
    """All tokens and finish reasons by (request, choice)."""
    tokens, reasons = {}, {}
    while engine.has_work():
        most_steps -= 1
        assert most_steps > 0, "the engine makes no progress"
        for update in engine.step():
            key = (update.request_id, update.index)
            assert key not in reasons, "tokens after the end"
            tokens.setdefault(key, []).extend(update.token_ids)
            if update.finish_reason:
                reasons[key] = update.finish_reason
        engine.scheduler.check()
    return tokens, reasons


def expected(prompt, count, spec=None):
    history = list(prompt)
    for _ in range(count):
        greedy = SamplingParams(temperature=0)
        history.append(hashed(history, type("S", (), {"params": greedy}), VOCAB))
    return history[len(prompt) :]


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def prompt_of(length, salt=0):
    return [(7 * i + 13 * salt + 3) % VOCAB for i in range(length)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100])
def test_one_request_gives_the_runner_s_tokens(length):
    engine = make_engine()
    add(engine, "a", prompt_of(length), GREEDY)
    tokens, reasons = run(engine)
    assert tokens[("a", 0)] == expected(prompt_of(length), 20)
    assert reasons == {("a", 0): "length"}


@pytest.mark.parametrize("budget", [1, 16, 17, 32, 64, 2048])
@pytest.mark.parametrize("cache", [True, False])
def test_sch_07_chunks_and_company_do_not_change_an_answer(budget, cache):
    engine = make_engine(max_num_batched_tokens=budget, enable_prefix_caching=cache)
    lengths = [1, 15, 16, 17, 32, 33, 47, 48, 64, 100]
    for i, length in enumerate(lengths):
        add(engine, str(i), prompt_of(length, i), GREEDY)
    tokens, _ = run(engine)
    for i, length in enumerate(lengths):
        assert tokens[(str(i), 0)] == expected(prompt_of(length, i), 20), length


@pytest.mark.parametrize("cache", [True, False])
def test_sch_01_preemption_loses_and_repeats_nothing(cache):
    engine = make_engine(num_blocks=13, max_model_len=160, enable_prefix_caching=cache)
    params = GREEDY.with_(max_tokens=120)
    for i in range(6):
        add(engine, str(i), prompt_of(20, i), params)
    tokens, _ = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for i in range(6):
        assert tokens[(str(i), 0)] == expected(prompt_of(20, i), 120)
    assert engine.stats.kv_blocks_usage == 0


def test_pfx_02_resume_after_preemption_with_a_shared_prefix():
    engine = make_engine(num_blocks=25, max_model_len=192)
    shared = prompt_of(64)
    params = GREEDY.with_(max_tokens=100)
    for i in range(32):
        add(engine, str(i), [*shared, i], params)
    tokens, _ = run(engine)
    assert engine.scheduler.num_preemptions > 0
    for i in range(32):
        assert tokens[(str(i), 0)] == expected([*shared, i], 100)


def test_end_of_text_ends_a_request_and_stays_in_its_tokens():
    said = FakeRunner(next_token=lambda history, spec: [65, 66, 2][min(spec.position, 2)])
    engine = make_engine(runner=said)
    add(engine, "a", [5], SamplingParams(temperature=0, max_tokens=9))
    tokens, reasons = run(engine)
    assert tokens[("a", 0)] == [65, 66, 2]
    assert reasons[("a", 0)] == "stop"


def test_stp_03_ignore_eos_covers_every_end_and_stop_ids_still_stop():
    said = FakeRunner(next_token=lambda history, spec: [2, 7, 65][spec.position % 3])
    engine = make_engine(runner=said)
    both = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    add(engine, "runs", [5], both)
    add(engine, "stops", [5], both.with_(stop_token_ids=[7]))
    tokens, reasons = run(engine)
    assert tokens[("runs", 0)] == [2, 7, 65, 2, 7, 65]
    assert reasons[("runs", 0)] == "length"
    assert tokens[("stops", 0)] == [2, 7]
    assert reasons[("stops", 0)] == "stop"


@pytest.mark.parametrize("length", [15, 16, 17, 31, 33])
def test_sch_12_choices_share_a_prompt_and_do_not_disturb_each_other(length):
    params = SamplingParams(n=4, temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    engine = make_engine()
    add(engine, "a", prompt_of(length), params)
    together, _ = run(engine)
    assert len({tuple(t) for t in together.values()}) == 4
    small = make_engine(num_blocks=9, max_model_len=96)
    add(small, "a", prompt_of(length), params)
    assert run(small)[0] == together
    # A smaller n is a prefix of a larger one.
    fewer = make_engine()
    add(fewer, "a", prompt_of(length), params.with_(n=2))
    assert run(fewer)[0] == {key: together[key] for key in [("a", 0), ("a", 1)]}


def test_one_row_s_fault_ends_that_request_alone():
    runner = FakeRunner(failing={"bad"})
    engine = make_engine(runner=runner)
    add(engine, "good", prompt_of(20), GREEDY)
    add(engine, "bad", prompt_of(20, 1), GREEDY)
    tokens, reasons = run(engine)
    assert reasons == {("good", 0): "length", ("bad", 0): "error"}
    assert tokens[("good", 0)] == expected(prompt_of(20), 20)
    assert engine.stats.kv_blocks_usage == 0


def test_a_step_that_raises_kills_the_engine_and_says_why():
    def explode(plan):
        if plan.step > 2:
            raise MemoryError("no more")

    engine = make_engine(runner=FakeRunner(before_step=explode))
    add(engine, "a", prompt_of(20), GREEDY)
    with pytest.raises(EngineDeadError, match="MemoryError: no more"):
        run(engine)
    assert engine.dead == "MemoryError: no more"
    assert not engine.has_work()
    with pytest.raises(EngineDeadError, match="no more"):
        add(engine, "b", [1], GREEDY)


def test_abort_frees_every_block_at_once():
    engine = make_engine(enable_prefix_caching=False)
    add(engine, "a", prompt_of(40), GREEDY.with_(n=3, temperature=1))
    for _ in range(5):
        engine.step()
    assert engine.stats.kv_blocks_usage > 0
    assert engine.abort("a")
    assert not engine.abort("a")
    assert engine.stats.kv_blocks_usage == 0
    assert not engine.has_work()
    assert engine.stats.finished == {"abort": 1}


def test_the_queue_is_bounded():
    engine = make_engine(max_num_seqs=1, max_waiting=2)
    add(engine, "a", [1], GREEDY)
    add(engine, "b", [1], GREEDY)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        add(engine, "c", [1], GREEDY)
    assert set(run(engine)[0]) == {("a", 0), ("b", 0)}


def test_a_refused_request_leaves_nothing_behind():
    engine = make_engine(max_model_len=64)
    with pytest.raises(ContextLengthError):
        add(engine, "a", [1] * 65, GREEDY)
    with pytest.raises(RequestError):
        add(engine, "b", [], GREEDY)
    assert not engine.has_work()
    assert engine.stats.waiting == 0


def test_sch_05_a_long_prompt_does_not_stop_running_streams():
    engine = make_engine(max_num_batched_tokens=64)
    add(engine, "stream", prompt_of(8), GREEDY.with_(max_tokens=100))
    engine.step()
    add(engine, "long", prompt_of(900, 1), GREEDY)
    seen = []
    while engine.has_work():
        seen.append(any(u.request_id == "stream" for u in engine.step()))
    steps = [i for i, hit in enumerate(seen) if hit]
    assert max(b - a for a, b in pairwise(steps)) == 1


def test_stats_count_what_happened():
    engine = make_engine()
    add(engine, "a", prompt_of(48), GREEDY)
    run(engine)
    add(engine, "b", prompt_of(48), GREEDY)
    run(engine)
    stats = engine.stats
    assert stats.prompt_tokens == 96
    assert stats.generation_tokens == 40
    assert stats.finished == {"length": 2}
    assert stats.ttft.count == 2
    assert stats.itl.count == 38
    assert stats.cached_tokens == 47  # all but the last token, which is computed in a copied block
    assert 0 < stats.cache_hit_rate < 1
    assert stats.running == stats.waiting == 0


def test_two_engines_in_one_process_do_not_share_anything():
    one = make_engine()
    other_runner = FakeRunner()
    other = make_engine(runner=other_runner)
    other_runner.limits = RunnerLimits(
        num_blocks=65, block_size=32, block_bytes=1, max_model_len=512, vocab_size=VOCAB
    )
    other = Engine(EngineConfig(block_size=32), other_runner, create_policy("fifo"))
    add(one, "a", prompt_of(50), GREEDY)
    add(other, "a", prompt_of(50), GREEDY)
    assert run(one)[0] == run(other)[0]


def test_samples_that_nobody_reads_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(stats, "_UNREAD_STEPS", 10)
    engine = make_engine()
    add(engine, "a", prompt_of(4), GREEDY.with_(max_tokens=500))
    run(engine)
    fresh = engine.recorder.drain()
    assert 0 < len(fresh.step_tokens) <= 10
    assert 0 < len(fresh.itl) <= 10
    assert engine.stats.generation_tokens == 500  # counters lose nothing


def test_a_seed_of_the_engine_repeats_requests_without_one():
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    own = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=5)

    def answers(seed):
        engine = make_engine(seed=seed)
        for name, params in (("a", free), ("b", free), ("c", own)):
            add(engine, name, prompt_of(20), params)
        return run(engine)[0]

    first, again, other, none = answers(7), answers(7), answers(8), answers(None)
    assert first == again
    assert first["a", 0] != first["b", 0] != other["b", 0]
    assert first["c", 0] == other["c", 0] == none["c", 0]
    assert none["a", 0] != answers(None)["a", 0]
