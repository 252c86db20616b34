"""`LLMEngine`: requests that its caller adds, and steps that its caller makes."""

from dataclasses import replace
from pathlib import Path

import pytest

from octavo import LLMEngine, RequestOutputKind, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.fake import FakeRunner
from octavo.errors import EngineError, RequestError
from octavo.text.tokenizer import load_tokenizer

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def engine(tiny_folder: Path) -> LLMEngine:
    tokenizer = load_tokenizer(tiny_folder)
    runner = FakeRunner()
    runner.limits = replace(runner.limits, vocab_size=tokenizer.vocab_size)
    return LLMEngine.over(runner, tokenizer, EngineConfig(max_num_seqs=2))


def run(engine: LLMEngine) -> dict[str, list[list[int]]]:
    """For each request, the ids of its outputs, in order."""
    found: dict[str, list[list[int]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(list(output.outputs[0].token_ids))
    return found


def test_outputs_are_of_the_kind_that_was_asked_for(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "a", PARAMS.with_(output_kind=kind, temperature=0))
    assert engine.get_num_unfinished_requests() == 3
    found = run(engine)
    whole = found["FINAL_ONLY"][0]
    assert len(whole) == 4
    assert found["FINAL_ONLY"] == [whole]
    assert found["CUMULATIVE"] == [whole[: i + 1] for i in range(4)]
    assert found["DELTA"] == [[token] for token in whole]
    assert engine.step() == []


def test_answers_are_those_of_generate(engine: LLMEngine) -> None:
    engine.add_request("a", "hello", PARAMS.with_(temperature=0))
    (_, *_, last) = run(engine)["a"]
    (output,) = engine.generate("hello", PARAMS.with_(temperature=0), use_tqdm=False)
    assert output.outputs[0].token_ids == last


def test_a_request_can_be_added_and_aborted_between_steps(engine: LLMEngine) -> None:
    for name in ("a", "b", "c"):
        engine.add_request(name, "x", PARAMS)
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["c", "unknown"])
    engine.add_request("d", {"prompt_token_ids": [1, 2]}, PARAMS, priority=0, lora_request=None)
    assert run(engine).keys() == {"b", "d"}
    assert engine.engine.stats.kv_blocks_usage == 0


def test_mistakes_are_reported_before_anything_is_queued(engine: LLMEngine) -> None:
    engine.add_request("a", "x", PARAMS)
    with pytest.raises(RequestError, match="'a' is in flight"):
        engine.add_request("a", "x", PARAMS)
    with pytest.raises(RequestError, match="LoRA"):
        engine.add_request("b", "x", PARAMS, lora_request=object())
    with pytest.raises(RequestError, match="logprobs"):
        engine.add_request("b", [99999], PARAMS.with_(logprobs=99))
    assert engine.get_num_unfinished_requests() == 1
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.step()
