"""Answers of which only parts are held to a grammar, and budgets of reasoning, in the engine: the
same answers planned ahead, crowded, with drafts, and continued elsewhere."""

import re

import pytest
from tests import kit
from tests.engine.test_engine import add, prompt_of, run

from octavo.config import EngineConfig
from octavo.constraints import Sections, Thinking
from octavo.core.plan import RunnerLimits
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Continuation
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner, hashed
from octavo.errors import RequestError
from octavo.params import SamplingParams
from octavo.text.grammar import grammar_of
from octavo.text.matcher import Grammars
from octavo.text.tokenizer import load_tokenizer

VOCAB = 300
THINK, CALL = kit.BOS, kit.EOT  # added tokens
FORM = SamplingParams(structured_outputs={"regex": "[a-f]{1,3}=[0-9]{2};"}).structured_outputs
GRAMMAR = grammar_of(FORM)
TEXT_END = (ord("|"), ord(">"))


def draw(history, spec):
    """Often a marker, so that short texts have some."""
    token = hashed(history, spec, VOCAB)
    common = {0: CALL, 1: THINK, 2: TEXT_END[0], 3: kit.EOS if token > 200 else token}
    return common.get(token % 11, token)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    kit.write_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def make(tokenizer):
    made = []
    grammars = Grammars(lambda: tokenizer, VOCAB, (kit.EOS,))

    def engine(num_blocks=257, **options):
        limits = RunnerLimits(
            num_blocks=num_blocks, block_size=16, block_bytes=1, max_model_len=128,
            vocab_size=VOCAB, eos_token_ids=(kit.EOS,), num_host_blocks=64,
        )  # fmt: skip
        config = EngineConfig(**{"swap_space": 0, **options})
        runner, policy = FakeRunner(limits, draw), create_policy(config.scheduler)
        made.append(Engine(config, runner, policy, grammars=grammars))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def request(number):
    """Parameters, and what else a submission has."""
    sections = Sections((CALL,), repeats=number % 5 != 4, may_end=number % 3 != 2)
    thinking = Thinking((THINK,), TEXT_END if number % 4 == 1 else (CALL,), number % 2 == 0)
    budget = (None, 3, 0, 6, 1)[number % 5]
    params = SamplingParams(
        seed=number, n=1 + number % 3, max_tokens=40, thinking_token_budget=budget
    )
    fields = {"thinking": thinking}
    return params, fields if number == 3 else {"grammar": GRAMMAR, "sections": sections, **fields}


def ask(engine, numbers):
    for number in numbers:
        params, fields = request(number)
        add(engine, str(number), prompt_of(20 + number, number), params, **fields)
    return run(engine)


NUMBERS = range(10)


@pytest.fixture(scope="module")
def alone(make):
    tokens, reasons = {}, {}
    for number in NUMBERS:
        found = ask(make(), [number])
        tokens |= found[0]
        reasons |= found[1]
    return tokens, reasons


def test_sections_have_their_form_and_text_is_free(alone):
    tokens, reasons = alone
    count = 0
    for (name, index), ids in tokens.items():
        if name == "3":
            continue
        text = "".join(chr(i) for i in ids)  # markers are characters of their own
        for section in text.split(chr(CALL))[1:]:
            whole = re.match("[a-f]{1,3}=[0-9]{2};", section)
            assert whole or re.fullmatch("[a-f]{0,3}|[a-f]{1,3}=[0-9]{0,2}", section), section
            count += whole is not None
        if int(name) % 5 == 4:
            assert text.count(chr(CALL)) <= 1
            assert (reasons[name, index] == "stop") == (";" in text.partition(chr(CALL))[2])
        if int(name) % 3 == 2:
            assert kit.EOS not in ids
    assert count > 20
    assert any(kit.EOS in ids for ids in tokens.values())


def test_no_reasoning_is_longer_than_its_budget(alone):
    for number in NUMBERS:
        params, fields = request(number)
        if (budget := params.thinking_token_budget) is None:
            continue
        end = fields["thinking"].end
        for index in range(params.n):
            inside, spent, ids = fields["thinking"].inside, 0, alone[0][str(number), index]
            at = 0
            while at < len(ids):
                if inside and tuple(ids[at : at + len(end)]) == end:
                    inside, at = False, at + len(end)
                    continue
                if not inside and ids[at] == THINK:
                    inside = True
                elif inside:
                    # The beginning of an end marker, where the text was cut off, does not count.
                    spent += tuple(ids[at:]) != end[: len(ids) - at]
                at += 1
            assert spent <= budget


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 13, "max_num_batched_tokens": 32},
                {"num_blocks": 13, "swap_space": 0.1, "preemption_mode": "swap"}],
)  # fmt: skip
def test_company_and_plans_ahead_change_nothing(make, alone, options, ahead):
    engine = make(async_scheduling=ahead, **options)
    assert ask(engine, NUMBERS) == alone
    if "num_blocks" in options:
        assert engine.stats.preemptions


def test_free_text_is_planned_ahead_like_that_of_others(make):
    def steps(fields):
        engine = make(async_scheduling=True)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        engine.executor.next_token = lambda history, spec: ord("a")
        add(engine, "0", prompt_of(20), params, **fields)
        plans = []
        engine.executor.before_step = lambda plan: plans.append(
            [(row.from_draw, len(row.token_ids)) for row in plan.rows]
        )
        tokens, _ = run(engine)
        return plans, tokens

    assert steps({"grammar": GRAMMAR, "sections": Sections((CALL,))}) == steps({})


def test_a_request_continues_in_another_engine_after_each_of_its_tokens(make, alone):
    tokens, reasons = alone
    for number in (1, 3, 6, 9):
        wanted = tokens[str(number), 0]
        params, fields = request(number)
        for cut in range(number % 2, len(wanted) + 1, 2):
            engine = make(async_scheduling=cut % 4 < 2)
            continuation = Continuation((tuple(wanted[:cut]),) if cut else ())
            add(engine, "a", prompt_of(20 + number, number), params.with_(n=1), seed=number,
                continuation=continuation, **fields)  # fmt: skip
            rest, ended = run(engine)
            assert wanted[:cut] + rest.get(("a", 0), []) == wanted, cut
            assert ended == {("a", 0): reasons[str(number), 0]}


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5, 8])
def test_drafts_are_cut_where_a_form_begins(make, alone, number):
    """Drafts that are the answer, and others: where no form holds, they save steps."""
    params, fields = request(number)
    wanted, taken = alone[0][str(number), 0], 0
    for wrong in (0, 2, 5):
        engine, gained, ended = make(), [], None
        add(engine, "a", prompt_of(20 + number, number), params.with_(n=1), **fields)
        while ended is None:
            drafts = wanted[len(gained) : len(gained) + 4]
            drafts = [token + (place == wrong) for place, token in enumerate(drafts)]
            if gained and engine.scheduler.propose("a", 0, [token % VOCAB for token in drafts]):
                taken += 1
            for update in engine.step():
                assert update.token_ids or update.finish_reason
                gained += update.token_ids
                ended = update.finish_reason
            engine.scheduler.check()
        assert (gained, ended) == (wanted, alone[1][str(number), 0])
    assert taken or number == 4


def test_a_budget_needs_to_know_the_markers(make):
    with pytest.raises(RequestError, match="is not known to mark its reasoning") as caught:
        add(make(), "a", prompt_of(5), SamplingParams(thinking_token_budget=3))
    assert caught.value.param == "thinking_token_budget"


def test_a_continuation_that_its_section_refuses_is_an_error_of_that_request(make):
    with pytest.raises(RequestError, match="cannot continue: the grammar failed"):
        add(make(), "a", prompt_of(5), SamplingParams(), grammar=GRAMMAR,
            sections=Sections((CALL,)), continuation=Continuation(((CALL, ord("x")),)))  # fmt: skip
