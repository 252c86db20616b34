"""The conversation of `octavo chat`: what is sent, what is dropped, what is kept."""

from dataclasses import replace
from itertools import pairwise

import pytest

from chat_stub import Stub
from octavo.cli.chat_backend import EngineBackend
from octavo.cli.chat_session import Session, Turn
from octavo.config import EngineConfig
from octavo.core.submission import Submission
from octavo.engine.admission import admit
from octavo.engine.fake import FakeRunner
from octavo.errors import ContextLengthError, RequestError
from octavo.llm import LLM
from octavo.params import SamplingParams
from octavo.text.answer import Content
from octavo.text.chat import encode_chat
from octavo.text.tokenizer import load_tokenizer


def session(window=100, system=None, counts=True, **params):
    return Session(Stub(window, counts), SamplingParams(**{"max_tokens": None, **params}), system)


def ask(chat, text):
    shown = []
    reply = chat.ask(text, shown.append)
    assert "".join(shown) == reply.text
    return reply


def contents(chat):
    return [m["content"] for m in chat.backend.asked[-1]]


def test_turns_build_the_conversation():
    chat = session(system="be brief")
    ask(chat, "hello")
    reply = ask(chat, "again")
    assert [m["role"] for m in chat.backend.asked[-1]] == ["system", "user", "assistant", "user"]
    assert contents(chat) == ["be brief", "hello", "hello", "again"]
    assert chat.turns == [Turn("hello", "hello"), Turn("again", "again")]
    assert (reply.ending, reply.num_tokens, reply.prompt_tokens, reply.used) == (
        "complete", 1, 13, 14,
    )  # fmt: skip


@pytest.mark.parametrize("window", [8, 30, 512, 1024])
def test_an_answer_may_fill_any_window(window):
    chat = session(window)
    reply = ask(chat, "!10000")
    assert (reply.num_tokens, reply.ending) == (window - 3, "window")
    assert chat.backend.params[0].max_tokens is None


def test_max_tokens_caps_an_answer_and_follows_the_room():
    chat = session(30, max_tokens=5)
    assert ask(chat, "!9").ending == "max_tokens"
    assert ask(chat, "!3").ending == "complete"
    chat = session(30, max_tokens=1024)
    assert ask(chat, "!100").ending == "window"
    assert chat.backend.params[0].max_tokens == 27


def test_the_oldest_turns_are_dropped_in_pairs():
    chat = session(100, system="the rules")
    replies = [ask(chat, f"m{i} " + "x " * 9) for i in range(12)]
    for messages in chat.backend.asked:
        assert messages[0]["content"] == "the rules"
        assert [m["role"] for m in messages[1:]] == ["user", "assistant"] * (
            len(messages) // 2 - 1
        ) + ["user"]
    assert contents(chat)[-1].startswith("m11 ")
    assert len(chat.turns) == 12, "what is dropped is not forgotten"
    assert 0 < chat.first < 11
    drops = [reply.dropped for reply in replies]
    assert sum(drops) == chat.first
    assert drops.count(0) > len(drops) // 2, "some turns find an unchanged prefix in the cache"
    sizes = [reply.prompt_tokens for reply in replies]
    assert max(sizes) <= 75, "a quarter of the window is left for an answer"


def test_room_for_max_tokens_is_kept():
    chat = session(60, max_tokens=20)
    for _ in range(6):
        reply = ask(chat, "!20")
        assert (reply.num_tokens, reply.ending) == (20, "complete")


def test_dropping_renders_a_long_conversation_a_few_times_only():
    chat = session(5000)
    chat.restore([Turn("x " * 10, "y " * 10)] * 1000)
    chat.backend.prepared = 0
    ask(chat, "hi")
    assert chat.backend.prepared < 15
    assert chat.first > 700


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_message_longer_than_the_window_leaves_the_conversation_usable(system):
    chat = session(50, system)
    ask(chat, "one")
    with pytest.raises(ContextLengthError, match=r"\d+ tokens; the window has 50") as error:
        ask(chat, "x " * 60)
    assert ("system message" in str(error.value)) is (system is not None)
    assert chat.turns == [Turn("one", "one")]
    assert chat.first == 0
    ask(chat, "two")
    assert contents(chat)[-3:] == ["one", "one", "two"]


def test_min_tokens_has_its_room():
    chat = session(50, min_tokens=30)
    with pytest.raises(ContextLengthError):
        ask(chat, "x " * 30)
    ask(chat, "x " * 10)


def test_where_tokens_cannot_be_counted_turns_are_dropped_until_it_fits():
    chat = session(60, counts=False)
    for i in range(6):
        ask(chat, f"m{i} " + "x " * 9)
    assert 0 < chat.first < 6
    with pytest.raises(ContextLengthError):
        ask(chat, "x " * 60)
    assert len(chat.turns) == 6


def test_a_system_message_longer_than_the_window_is_refused():
    with pytest.raises(ContextLengthError, match="system message leaves no room"):
        session(20, system="x " * 20)
    chat = session(20, system="fine")
    with pytest.raises(ContextLengthError):
        chat.set_system("x " * 20)
    assert chat.system == "fine"


def test_ctrl_c_keeps_the_part_and_aborts_the_request():
    chat = session()
    chat.backend.fault = KeyboardInterrupt()
    reply = ask(chat, "Hi there")
    assert (reply.text, reply.ending) == ("Hi", "stopped")
    assert chat.turns == [Turn("Hi there", "Hi")]
    assert chat.backend.closed == 1


def test_ctrl_c_between_two_tokens_aborts_the_request():
    chat, streams = session(), []
    stream = chat.backend.stream
    chat.backend.stream = lambda *args: streams.append(stream(*args)) or streams[0]

    def interrupted(text):
        raise KeyboardInterrupt

    chat.ask("tell me", interrupted)
    assert chat.backend.closed == 1, "someone else holds the stream, so it is closed by name"


def test_an_answer_without_text_is_not_kept():
    chat = session()

    def stream(*args):
        raise KeyboardInterrupt
        yield

    chat.backend.stream = stream
    reply = ask(chat, "hello")
    assert (reply.ending, reply.seconds_to_first, reply.rate) == ("stopped", None, None)
    assert chat.turns == []


def test_an_answer_that_fails_is_not_kept():
    chat = session()
    with pytest.raises(RequestError, match="told to fail"):
        chat.ask("!fail now", lambda text: None)
    assert chat.turns == []


def test_regenerate_replaces_the_last_answer():
    chat = session(seed=7)
    with pytest.raises(RequestError, match="no answer"):
        chat.regenerate(print)
    ask(chat, "one")
    ask(chat, "two")
    for _ in range(2):
        chat.regenerate(lambda text: None)
    assert [turn.user for turn in chat.turns] == ["one", "two"]
    assert contents(chat) == ["one", "one", "two"]
    assert [p.seed for p in chat.backend.params] == [7, 7, 8, 9], "each attempt has its own seed"
    assert chat.params.seed == 7


def test_regenerate_keeps_the_answer_if_the_new_one_fails():
    chat = session()
    ask(chat, "one two")
    chat.backend.fault = RequestError("no")
    with pytest.raises(RequestError):
        chat.regenerate(lambda text: None)
    assert chat.turns == [Turn("one two", "one two")]


def test_times_and_rates():
    moments = iter([10.0, 10.5, 11.0, 11.5, 12.5])
    chat = Session(Stub(), SamplingParams(max_tokens=None), clock=lambda: next(moments))
    reply = chat.ask("a b c", lambda text: None)
    assert reply.seconds_to_first == 0.5
    assert reply.rate == pytest.approx(2 / 2.0)


class Prepared:
    """What `EngineBackend` needs of `cli.preparation.Preparation`, of an LLM that is there."""

    def __init__(self, llm):
        self.load = lambda: llm
        self.config, self.capabilities = llm.config, llm.engine.capabilities
        self._tokenizer = llm.get_tokenizer()

    def encode(self, content):
        return {"prompt_token_ids": encode_chat(self._tokenizer, content).token_ids}

    def reasoning_apart(self, encoded, params):
        return lambda output: [Content(output.text)]

    def check(self, encoded, params):
        admit(Submission("0", tuple(encoded["prompt_token_ids"]), params), self.capabilities)


@pytest.fixture(scope="module")
def over_fake(tiny_folder):
    """The backend of an engine over `FakeRunner`, which says the alphabet."""
    tokenizer = load_tokenizer(tiny_folder)

    def make(defaults, window=1024, **options):
        config = EngineConfig(model=str(tiny_folder), **options)
        limits = replace(FakeRunner().limits, vocab_size=300, max_model_len=window)
        limits = replace(limits, generation_defaults=defaults)
        runner = FakeRunner(limits, next_token=lambda history, spec: 97 + spec.position % 26)
        backend = EngineBackend(Prepared(LLM.over(runner, tokenizer, config)))
        backend.load()
        return backend

    return make


def test_each_turn_computes_only_what_is_new(over_fake):
    backend = over_fake({})
    chat = Session(backend, SamplingParams(max_tokens=40), "You are a test.")
    replies = [ask(chat, f"message {i}") for i in range(3)]
    assert backend.window == 1024
    for before, after in pairwise(replies):
        assert before.used <= after.prompt_tokens
        # All full blocks of 16; the last token of an answer is drawn and never computed.
        assert after.cached_tokens >= (before.used - 1) // 16 * 16
    assert replies[0].ending == "max_tokens"
    assert replies[0].num_tokens == 40


def test_a_long_conversation_over_the_real_engine(over_fake):
    chat = Session(over_fake({}, window=256), SamplingParams(max_tokens=None))
    for i in range(4):
        reply = ask(chat, f"{i} " + "x" * 60)
        assert reply.text
        assert reply.used <= 256
    assert chat.first > 0
    with pytest.raises(ContextLengthError, match="window has 256"):
        ask(chat, "x" * 500)
    assert ask(chat, "hi").text


def test_settings_that_the_model_cannot_serve_are_refused_at_once(over_fake):
    backend = over_fake({})
    with pytest.raises(RequestError, match="stop_token_ids has token id 999"):
        Session(backend, SamplingParams(stop_token_ids=[999]))
    with pytest.raises(RequestError, match="min_tokens"):
        Session(backend, SamplingParams(min_tokens=2000, max_tokens=None))
    chat = Session(backend, SamplingParams(max_tokens=5000, stop=["bcd"]))
    with pytest.raises(RequestError, match="logit_bias"):
        chat.set_params(chat.params.with_(logit_bias={999: 1.0}), ())
    assert ask(chat, "hi").text


def test_defaults_are_the_checkpoint_s_or_else_ours(over_fake):
    params, source = over_fake({}).default_params({})
    assert (params.temperature, params.top_p, params.top_k) == (0.8, 0.95, 40)
    assert (params.max_tokens, source) == (None, "Octavo's defaults")
    params, source = over_fake({"temperature": 0.3}).default_params({"top_k": 9})
    assert (params.temperature, params.top_p, params.top_k) == (0.3, 1.0, 9)
    assert "checkpoint" in source
    params, _ = over_fake({"repetition_penalty": 1.1}).default_params({"temperature": 0.0})
    assert (params.temperature, params.repetition_penalty, params.min_p) == (0.0, 1.1, 0.05)
    params, _ = over_fake({"temperature": 0.3}, generation_config="octavo").default_params({})
    assert params.temperature == 0.8
