"""Every schema of the tests with real models: no complete answer that is not valid."""

import json

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from schemas import SCHEMAS

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module", params=["smollm2", "qwen2.5-coder-0.5b"])
def llm(request):
    with LLM(request.param, max_model_len=1024, swap_space=0, num_gpu_blocks_override=400,
             load_progress=False) as found:  # fmt: skip
        yield found


@pytest.mark.parametrize(("temperature", "n"), [(0.0, 1), (1.5, 3)])
def test_no_complete_answer_is_invalid(llm, temperature, n):
    messages = [[{"role": "user", "content": f"Answer with JSON of this schema: {s}"}]
                for s in map(json.dumps, SCHEMAS)]  # fmt: skip
    params = [
        SamplingParams(
            temperature=temperature, seed=i, n=n, max_tokens=250, stop="STOP", min_tokens=i % 3,
            presence_penalty=0.5 * (i % 2), structured_outputs={"json": schema},
        )
        for i, schema in enumerate(SCHEMAS)
    ]  # fmt: skip
    complete = 0
    for schema, output in zip(SCHEMAS, llm.chat(messages, params, use_tqdm=False), strict=True):
        assert output.error is None, (schema, output.error)
        for choice in output.outputs:
            if choice.finish_reason == "stop" and choice.stop_reason is None:
                jsonschema.validate(json.loads(choice.text), schema)
                complete += 1
    assert complete > 0.8 * n * len(SCHEMAS)
