"""What a caller may pass, as requests. Bad prompts are in tests/test_llm.py, through `LLM`."""

import pytest
from tests import kit

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.requests import (
    RequestMaker,
    conversation_list,
    is_conversation,
    prompt_list,
    spread,
)
from octavo.errors import RequestError
from octavo.params import RequestOutputKind, SamplingParams
from octavo.text.tokenizer import load_tokenizer

DELTA = RequestOutputKind.DELTA


@pytest.fixture
def make(tmp_path):
    vocab = kit.write_tokenizer(tmp_path)
    limits = RunnerLimits(
        num_blocks=9, block_size=16, block_bytes=1, max_model_len=128, vocab_size=vocab,
        eos_token_ids=(kit.EOS,), generation_defaults={"temperature": 0.5},
    )  # fmt: skip

    def maker(**options):
        config = EngineConfig(**options)
        tokenizer = load_tokenizer(tmp_path)
        return RequestMaker(config, tokenizer, EngineCapabilities(limits), lambda: 100.0)

    return maker


def test_a_request_is_what_was_asked_for(make):
    params = SamplingParams(bad_words=["x"], max_tokens=3)
    submission, text, _ = make().make("a", "hi", params, DELTA, priority=2, deadline=5)
    assert text == "hi"
    assert (submission.request_id, submission.token_ids) == ("a", (104, 105))
    assert submission.params == params.with_(output_kind=DELTA)
    assert (submission.priority, submission.deadline) == (2, 105.0)
    assert (ord("x"),) in submission.bad_words
    assert make().make("b", [7], params, DELTA).text is None


def test_defaults_are_the_model_s_unless_switched_off(make):
    assert make().default_params() == SamplingParams(temperature=0.5)
    assert make().chat_params() == SamplingParams(temperature=0.5, max_tokens=None)
    assert make(generation_config="octavo").default_params() == SamplingParams()


def test_a_chat_template_of_the_configuration_is_used(make, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("own: {{ messages[0].content }}")
    messages = [{"role": "user", "content": "hi"}]
    assert make(chat_template=str(file)).render(messages)["prompt"] == "own: hi"
    assert "<|user|>hi" in make().render(messages)["prompt"]


def test_prompts_and_conversations_are_told_apart():
    messages = [{"role": "user", "content": "a"}]
    assert is_conversation(messages)
    for other in ("a", [], [1], [{"prompt": "a"}], [messages], {"prompt": "a"}):
        assert not is_conversation(other)
    assert conversation_list(messages) == [messages]
    assert conversation_list([messages, messages]) == [messages, messages]
    assert conversation_list([]) == [[]]
    assert prompt_list("a") == ["a"]
    assert prompt_list([1, 2]) == [[1, 2]]
    assert prompt_list(["a", [1]]) == ["a", [1]]


def test_one_value_for_all_or_one_for_each():
    assert spread("priority", 3, 2) == [3, 3]
    assert spread("priority", [1, 2], 2) == [1, 2]
    with pytest.raises(RequestError, match="priority has 1 value for 2 prompts"):
        spread("priority", [1], 2)
