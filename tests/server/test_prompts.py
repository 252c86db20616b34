"""What prompts and forms cost is paid on threads, beside the event loop."""

import asyncio
import threading

import pytest
from tests import kit

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.server import prompts
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.answer_form import AnswerForm
from octavo.text.tokenizer import load_tokenizer
from octavo.text.tools import registry
from octavo.text.tools.base import Tool

FORM = StructuredOutputsParams(regex="[0-9]+")
CALLS = AnswerForm(tools=(Tool("f"),), choice="required", format=registry.find("hermes"))


@pytest.fixture
def encoder(tmp_path):
    kit.write_tokenizer(tmp_path)
    made = prompts.PromptEncoder(EngineConfig(model=str(tmp_path)))
    made.tokenizer = load_tokenizer(tmp_path)
    made.fit(512)
    yield made
    made.close()


@pytest.mark.parametrize("work", ["grammar_of", "Limits.of"])
def test_forms_are_checked_off_the_event_loop(encoder, monkeypatch, work):
    """The loop serves others until a check has ended."""
    threads, other = [], threading.Event()

    def check(*_):
        threads.append(threading.current_thread())
        assert other.wait(10), "the loop did not go on"
        return "checked"

    monkeypatch.setattr(f"octavo.server.prompts.{work}", check)

    async def both():
        found = encoder.grammar(FORM) if work == "grammar_of" else encoder.limits(CALLS)
        checked = asyncio.create_task(found)
        while not threads:
            await asyncio.sleep(0)
        other.set()
        return await checked

    assert asyncio.run(both()) == "checked"
    assert threads[0] is not threading.main_thread()


def test_a_check_that_takes_too_long_is_the_requests_error(encoder, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(prompts, "grammar_of", lambda _: release.wait(10))
    monkeypatch.setattr(prompts, "GRAMMAR_SECONDS", 0.01)
    with pytest.raises(RequestError, match="too complex: it was not checked within") as caught:
        asyncio.run(encoder.grammar(FORM))
    release.set()
    assert caught.value.param == "structured_outputs.regex"
