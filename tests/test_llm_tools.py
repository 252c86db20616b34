"""Tools and reasoning offline: `LLM.chat` and `AsyncLLM.chat` over a model that is scripted."""

import asyncio

import pytest

import fake_engine
import tool_model
from octavo import LLM, AsyncLLM, SamplingParams
from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.outputs import AnswerMessage
from octavo.params import RequestOutputKind
from octavo.text.tokenizer import load_tokenizer
from serving import PYTHONPATH
from tool_model import NOW, ROME, TOOLS, call

PARAMS = SamplingParams(max_tokens=400)
THOUGHT = "<think>hm</think>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "thinks"
    return tool_model.write(folder, tool_model.THINKING)


@pytest.fixture(scope="module")
def config(folder):
    return EngineConfig(
        model=str(folder), swap_space=0, max_model_len=4096, num_gpu_blocks_override=2049
    )


@pytest.fixture(scope="module")
def llm(config, folder):
    with LLM.over(fake_engine.create(config), load_tokenizer(folder), config) as made:
        yield made


def say(folder, text):
    return [{"role": "user", "content": f"say [{tool_model.ids(folder, text)}]"}]


def calls(message):
    return [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls]


def test_a_chat_has_a_message_beside_its_text(llm, folder):
    text = f"{THOUGHT}I look.\n{call()}\n{call('clock', '{}')}"
    (output,) = llm.chat(say(folder, text), PARAMS, tools=TOOLS, use_tqdm=False)
    (choice,) = output.outputs
    assert choice.text == text, "the text stays what the model wrote"
    assert choice.message.content == "I look."
    assert choice.message.reasoning == "hm"
    assert calls(choice.message) == [ROME, NOW]
    assert output.as_dict()["outputs"][0]["message"]["content"] == "I look."


def test_its_message_and_the_result_go_back(llm, folder):
    asked = say(folder, THOUGHT + call())
    message = llm.chat(asked, PARAMS, tools=TOOLS, use_tqdm=False)[0].outputs[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    said = say(folder, "It is sunny.")
    messages = [*asked, message.as_message(), result, *said]
    (output,) = llm.chat(messages, PARAMS, tools=TOOLS, use_tqdm=False)
    assert call() in output.prompt
    assert output.outputs[0].message == AnswerMessage("It is sunny.")
    with pytest.raises(RequestError, match="no earlier message has a call"):
        llm.chat([*asked, result], PARAMS, tools=TOOLS, use_tqdm=False)


def test_choices_and_texts_without_tools(llm, folder):
    ask = {"tools": TOOLS, "use_tqdm": False}
    named = {"type": "function", "function": {"name": "clock"}}
    for choice in ("required", named):
        (output,) = llm.chat(say(folder, call("clock", "{}")), PARAMS, tool_choice=choice, **ask)
        assert calls(output.outputs[0].message) == [NOW]
    (output,) = llm.chat(say(folder, call()), PARAMS, tool_choice="none", **ask)
    assert output.outputs[0].message == AnswerMessage(call())
    (output,) = llm.chat(say(folder, "a"), PARAMS.with_(n=2), use_tqdm=False)
    assert [c.message for c in output.outputs] == [AnswerMessage("a")] * 2
    (output,) = llm.generate("x", PARAMS, use_tqdm=False)
    assert output.outputs[0].message is None
    (output,) = llm.chat(say(folder, "a"), PARAMS.with_(detokenize=False), use_tqdm=False)
    assert output.outputs[0].message is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"name": "look"}]}, "tools[0].name"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template": "{{ tools }}{{ messages[0].content }}"}, None),
        ({"chat_template": "{{ tools }}{{ messages[0].content }}", "tool_choice": "auto"},
         "tools"),
    ],
)  # fmt: skip
def test_what_is_refused(llm, folder, fields, param):
    asked = {"tools": TOOLS, "use_tqdm": False, **fields}
    if param is None:  # of a template of no known format calls are text
        assert llm.chat(say(folder, call()), PARAMS, **asked)[0].outputs[0].message.content
        return
    with pytest.raises(RequestError) as caught:
        llm.chat(say(folder, "a"), PARAMS, **asked)
    assert caught.value.param == param


def test_async_chats_have_the_same_message_whatever_is_delivered(config, folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    text = f"{THOUGHT}I look.\n{call()}"

    async def ask(engine, kind):
        outputs = engine.chat(say(folder, text), PARAMS.with_(output_kind=kind), tools=TOOLS)
        return [output.outputs[0] async for output in outputs]

    async def ask_all():
        async with AsyncLLM.over(config, fake_engine.EXECUTOR) as engine:
            return [await ask(engine, kind) for kind in RequestOutputKind]

    cumulative, deltas, final = asyncio.run(ask_all())
    assert cumulative[-1].text == "".join(d.text for d in deltas) == final[0].text == text
    for outputs in (cumulative, deltas, final):
        *earlier, last = outputs
        assert all(output.message is None for output in earlier)
        assert last.message.content == "I look."
        assert last.message.reasoning == "hm"
        assert calls(last.message) == [ROME]
