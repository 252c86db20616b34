"""Grammars in the engine: the same answers planned ahead, crowded, and continued elsewhere."""

import json

import jsonschema
import pytest
from tests import kit
from tests.engine.test_engine import add, prompt_of, run

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Continuation
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner, hashed
from octavo.errors import CheckpointError, RequestError
from octavo.params import SamplingParams
from octavo.text.grammar import grammar_of
from octavo.text.matcher import Grammars, Matcher
from octavo.text.tokenizer import load_tokenizer

VOCAB = 300
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}},
    "required": ["b"],
    "additionalProperties": False,
}
FORMS = (
    {"json": SCHEMA, "disable_any_whitespace": True}, {"regex": "[a-f]{3,12}-[0-9]+x"},
    {"choice": ["yes", "no", "perhaps"]},
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture
def make(tokenizer):
    made = []

    def engine(num_blocks=257, **options):
        limits = RunnerLimits(
            num_blocks=num_blocks, block_size=16, block_bytes=1, max_model_len=128,
            vocab_size=VOCAB, eos_token_ids=(kit.EOS,), num_host_blocks=64,
        )  # fmt: skip
        runner = FakeRunner(limits, lambda history, spec: hashed(history, spec, VOCAB))
        config = EngineConfig(**{"swap_space": 0, **options})
        grammars = Grammars(lambda: tokenizer, VOCAB, limits.eos_token_ids)
        made.append(Engine(config, runner, create_policy(config.scheduler), grammars=grammars))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def params(number):
    return SamplingParams(seed=number, n=1 + number % 3, max_tokens=40, min_tokens=number % 2,
                          structured_outputs=FORMS[number % len(FORMS)])  # fmt: skip


def ask(engine, numbers):
    for number in numbers:
        chosen = params(number)
        grammar = None if number == 7 else grammar_of(chosen.structured_outputs)
        add(engine, str(number), prompt_of(20 + number, number), chosen, grammar=grammar)
    return run(engine)


@pytest.fixture
def alone(make):
    tokens, reasons = {}, {}
    for number in range(10):
        found = ask(make(), [number])
        tokens |= found[0]
        reasons |= found[1]
    return tokens, reasons


def text_of(tokens):
    return bytes(token for token in tokens if token < 256).decode()


def test_complete_answers_have_their_forms(alone):
    tokens, reasons = alone
    for (request_id, index), reason in reasons.items():
        form = FORMS[int(request_id) % len(FORMS)]
        if reason == "stop" and "json" in form and request_id != "7":
            jsonschema.validate(json.loads(text_of(tokens[request_id, index])), SCHEMA)
    assert sum(reason == "stop" for reason in reasons.values()) > len(reasons) // 2


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 11, "max_num_batched_tokens": 32},
                {"num_blocks": 11, "swap_space": 0.1, "preemption_mode": "swap"}],
)  # fmt: skip
def test_company_and_plans_ahead_change_nothing(make, alone, options, ahead):
    engine = make(async_scheduling=ahead, **options)
    assert ask(engine, range(10)) == alone
    if "num_blocks" in options:
        assert engine.stats.preemptions


def test_forced_tokens_are_those_that_are_drawn_step_by_step(make, alone, monkeypatch):
    def steps():
        engine, count = make(), 0
        for number in range(10):
            chosen = params(number)
            add(engine, str(number), prompt_of(20 + number, number), chosen,
                grammar=grammar_of(chosen.structured_outputs))  # fmt: skip
        while engine.has_work():
            engine.step()
            count += 1
        return count

    fewer = steps()
    monkeypatch.setattr(Matcher, "forced", lambda self: ())
    assert ask(make(), range(10)) == alone
    assert fewer < steps()


@pytest.mark.parametrize("options", [{"allowed_token_ids": [ord("y"), ord("n")]},
                                     {"bad_words": ["es"]}])  # fmt: skip
def test_a_forced_token_that_is_excluded_otherwise_is_left_to_the_sampler(make, options):
    engine = make()
    drawn = []
    engine.executor.next_token = lambda history, spec: drawn.append(spec.position) or ord("y")
    chosen = SamplingParams(structured_outputs={"choice": ["yes"]}, **options)
    add(engine, "a", prompt_of(5), chosen, grammar=grammar_of(chosen.structured_outputs))
    run(engine)
    assert drawn == [0, 1, 2]


def test_forced_tokens_end_where_max_tokens_says(make):
    for most in (1, 2, 5):
        engine = make()
        chosen = SamplingParams(structured_outputs={"choice": ["perhaps"]}, max_tokens=most,
                                logprobs=1)  # fmt: skip
        add(engine, "a", prompt_of(5), chosen, grammar=grammar_of(chosen.structured_outputs))
        (update,) = engine.step()
        assert bytes(update.token_ids) == b"perhaps"[:most]
        assert update.finish_reason == "length"
        assert len(update.logprobs) == most
        assert [entry.logprobs for entry in update.logprobs[1:]] == [(0.0, 0.0)] * (most - 1)


def test_a_request_continues_in_another_engine_after_each_of_its_tokens(make, alone):
    tokens, reasons = alone
    for number in (0, 1, 2):
        wanted = tokens[str(number), 0]
        for cut in range(len(wanted) + 1):
            engine = make()
            chosen = params(number).with_(n=1)
            add(engine, "a", prompt_of(20 + number, number), chosen, seed=number,
                grammar=grammar_of(chosen.structured_outputs),
                continuation=Continuation((tuple(wanted[:cut]),) if cut else ()))  # fmt: skip
            rest, ended = run(engine)
            assert wanted[:cut] + rest.get(("a", 0), []) == wanted, cut
            assert ended == {("a", 0): reasons[str(number), 0]}


def test_drafts_are_not_taken(make, alone):
    engine = make()
    add(engine, "0", prompt_of(20, 0), params(0), grammar=grammar_of(params(0).structured_outputs))
    engine.step()
    assert not engine.scheduler.propose("0", 0, [1, 2])
    tokens, _ = run(engine)
    assert alone[0]["0", 0][-len(tokens["0", 0]) :] == tokens["0", 0]


def test_a_continuation_that_its_grammar_refuses_is_an_error_of_that_request(make):
    engine = make()
    form = SamplingParams(structured_outputs={"regex": "[0-9]+"})
    with pytest.raises(RequestError, match="cannot continue: the grammar failed"):
        add(engine, "a", prompt_of(5), form, grammar=grammar_of(form.structured_outputs),
            continuation=Continuation(((ord("x"),),)))  # fmt: skip
    add(engine, "b", prompt_of(5), SamplingParams(max_tokens=3))
    assert len(run(engine)[0]["b", 0]) == 3


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_requests_with_a_form():
    def load():
        raise CheckpointError("it is damaged")

    grammars = Grammars(load, VOCAB, (kit.EOS,))
    with pytest.raises(RequestError, match="need the tokenizer: it is damaged"):
        grammars.compile("start: /a/").result()
    grammars.close()
