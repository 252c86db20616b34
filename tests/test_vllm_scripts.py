"""Scripts as vLLM's users write them, with nothing changed but `vllm` to `octavo`.

They run over an engine without weights, so that what is tested is that each line works.
"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

import kit
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, SampleSpec
from octavo.engine.fake import FakeRunner
from serving import PYTHONPATH, write_model


def letters(history: Sequence[int], spec: SampleSpec) -> int:
    return 97 + len(history) % 26 if spec.position < 200 else kit.EOS


@pytest.fixture
def without_weights(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model is the toy's tokenizer over an engine that answers with letters."""

    def create(config: EngineConfig) -> FakeRunner:
        return FakeRunner(
            RunnerLimits(
                num_blocks=2049, block_size=config.block_size, block_bytes=1024,
                max_model_len=config.max_model_len or 8192, vocab_size=259,
                eos_token_ids=(kit.EOS,), model=config.model, architecture="fake",
                dtype=config.dtype, kv_cache_dtype="none", device="none",
            ),
            letters,
        )  # fmt: skip

    monkeypatch.setattr("octavo.llm.create_executor", create)
    monkeypatch.setattr("octavo.llm.resolve_tokenizer", lambda *_: tiny_folder)


def run(script: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    source = textwrap.dedent(script).replace("vllm", "octavo")
    exec(compile(source, "script.py", "exec"), {"__name__": "__main__"})


BASIC = """
    from vllm import LLM, SamplingParams

    prompts = [
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    def main():
        llm = LLM(model="facebook/opt-125m")
        outputs = llm.generate(prompts, sampling_params)
        for output in outputs:
            prompt = output.prompt
            generated_text = output.outputs[0].text
            print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")

    if __name__ == "__main__":
        main()
"""

OPTIONS = """
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model="Qwen/Qwen2.5-7B-Instruct", tokenizer_mode="auto", trust_remote_code=True,
        dtype=torch.float16, tensor_parallel_size=1, pipeline_parallel_size=1,
        gpu_memory_utilization=0.9, max_model_len=4096, max_num_seqs=64, enforce_eager=True,
        enable_prefix_caching=True, enable_chunked_prefill=True, enable_lora=False,
        load_format="auto", swap_space=4, cpu_offload_gb=0, seed=0, disable_log_stats=True,
        disable_custom_all_reduce=True, distributed_executor_backend="mp", max_logprobs=20,
        limit_mm_per_prompt={}, quantization=None, generation_config="vllm", block_size=None,
        compilation_config=None, speculative_config=None, hf_overrides={}, task="generate",
    )
    print(llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].text)
"""

CHAT = """
    from vllm import LLM

    llm = LLM(model="m")
    sampling_params = llm.get_default_sampling_params()
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False, tools=None,
                       lora_request=None, chat_template_content_format="auto",
                       add_generation_prompt=True)
    outputs = llm.chat([conversation] * 3, sampling_params, use_tqdm=True)
    for output in outputs:
        print(output.outputs[0].text, output.outputs[0].finish_reason)
"""

TEMPLATE = """
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model="m")
    tokenizer = llm.get_tokenizer()
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    stop = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot|>")]
    params = SamplingParams(max_tokens=4, stop_token_ids=stop, spaces_between_special_tokens=True)
    print(llm.generate(text, params)[0].outputs[0].text)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    prompts = [TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": tokenizer.encode("a")}]
    for output in llm.generate(prompts, params.clone(), lora_request=None):
        print(tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True))
"""

SEEDS = """
    from vllm import LLM, SamplingParams

    llm = LLM("m", seed=1, dtype="half", max_num_seqs=256)
    each = [
        SamplingParams(n=3, best_of=3, seed=i, temperature=0.7, top_k=-1, stop=["zz"],
                       logprobs=2, prompt_logprobs=0, max_tokens=5, ignore_eos=True)
        for i in range(2)
    ]
    for output in llm.generate(["a", "b"], each):
        assert len(output.outputs) == 3
        for completion in output.outputs:
            first = completion.logprobs[0]
            token = completion.token_ids[0]
            print(first[token].logprob, first[token].rank, first[token].decoded_token)
            print(completion.cumulative_logprob, completion.stop_reason)
    print(llm.reset_prefix_cache())
"""

COMMAND_LINE = """
    from argparse import Namespace
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def parse_args():
        parser = FlexibleArgumentParser()
        parser = EngineArgs.add_cli_args(parser)
        parser.set_defaults(model="m", max_model_len=512, enforce_eager=True)
        parser.add_argument("--max-tokens", type=int, default=4)
        return parser.parse_args()

    def main(args: Namespace):
        options = vars(args)
        params = SamplingParams(max_tokens=options.pop("max_tokens"))
        llm = LLM(**options)
        print(llm.generate(["a"], params, use_tqdm=False)[0].outputs[0].text)
        assert llm.config.max_model_len == 256

    if __name__ == "__main__":
        main(parse_args())
"""

ENGINE_ARGS = """
    from dataclasses import asdict
    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.inputs import TextPrompt
    from vllm.outputs import CompletionOutput, RequestOutput

    engine_args = EngineArgs(model="m", max_model_len=512, max_num_seqs=2, dtype="bfloat16")
    llm = LLM(**asdict(engine_args))
    assert llm.config.max_num_seqs == 2
    output = LLM.from_engine_args(engine_args).generate(TextPrompt(prompt="a"))[0]
    assert isinstance(output, RequestOutput) and isinstance(output.outputs[0], CompletionOutput)
    print(output.outputs[0].text)
"""

PREFIX = """
    import time
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.logger import init_logger

    logger = init_logger(__name__)
    prefix = "You are an expert school principal. " * 20
    llm = LLM(model="m", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    params = SamplingParams(temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY)
    llm.generate([prefix + "a"], params)
    start = time.time()
    outputs = llm.generate([prefix + name for name in ("b", "c")], sampling_params=params)
    logger.info("took %s", time.time() - start)
    for output in outputs:
        print(output.num_cached_tokens, output.metrics.first_token_time, output.outputs[0].text)
        assert output.num_cached_tokens > 100
"""

PRIORITY = """
    from vllm import LLM, SamplingParams

    with_priorities = LLM(model="m", scheduling_policy="priority")
    outputs = with_priorities.generate(
        ["a", "b"], SamplingParams(max_tokens=2), priority=[1, 0], use_tqdm=False
    )
    print([output.outputs[0].text for output in outputs])
"""

LIST_OF_IDS = """
    from vllm import LLM, SamplingParams

    llm = LLM(model="m", skip_tokenizer_init=False, max_model_len=-1)
    params = SamplingParams.from_optional(temperature=None, max_tokens=3, detokenize=True)
    print([o.outputs[0].text for o in llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)])
"""

STEPS = """
    from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    prompts = [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        ("What is it?", SamplingParams(n=2, temperature=0.8, top_p=0.95, max_tokens=3)),
    ]

    def process_requests(engine: LLMEngine):
        request_id = 0
        while prompts or engine.has_unfinished_requests():
            if prompts:
                prompt, sampling_params = prompts.pop(0)
                engine.add_request(str(request_id), prompt, sampling_params)
                request_id += 1
            request_outputs: list[RequestOutput] = engine.step()
            for request_output in request_outputs:
                if request_output.finished:
                    print(request_output)

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Demo"))
    args = parser.parse_args()
    process_requests(LLMEngine.from_engine_args(EngineArgs.from_cli_args(args)))
"""

SCRIPTS = {
    "steps": (STEPS, "--model", "m", "--max-num-seqs", "2"),
    "basic": (BASIC,),
    "options": (OPTIONS,),
    "chat": (CHAT,),
    "template": (TEMPLATE,),
    "seeds": (SEEDS,),
    "command line": (COMMAND_LINE, "--max_model_len", "256", "-tp", "1", "--trust-remote-code"),
    "engine args": (ENGINE_ARGS,),
    "prefix": (PREFIX,),
    "priority": (PRIORITY,),
    "ids": (LIST_OF_IDS,),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.usefixtures("without_weights")
def test_a_script_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *arguments = SCRIPTS[name]
    run(script, monkeypatch, *arguments)
    assert capsys.readouterr().out


ASYNC = """
    import asyncio
    import sys
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils import random_uuid
    from vllm.v1.engine.async_llm import AsyncLLM

    assert AsyncLLM is AsyncLLMEngine

    async def stream(engine, prompt):
        params = SamplingParams(max_tokens=5, seed=42, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate(
            request_id=random_uuid(), prompt=prompt, sampling_params=params, lora_request=None
        ):
            for completion in output.outputs:
                print(completion.text, end="", flush=True)
            if output.finished:
                break

    async def main():
        args = AsyncEngineArgs(model=sys.argv[1], enforce_eager=True, disable_log_requests=True)
        engine = AsyncLLM.from_engine_args(args)
        try:
            await asyncio.gather(*(stream(engine, prompt) for prompt in ("a", "b")))
            print(await engine.get_tokenizer())
        finally:
            engine.shutdown()

    if __name__ == "__main__":
        asyncio.run(main())
"""


@pytest.mark.slow
def test_an_asyncio_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setattr("octavo.async_llm.EXECUTOR", "fake_engine:create")
    run(ASYNC, monkeypatch, str(write_model(tmp_path / "model")))
    assert sorted(capsys.readouterr().out[:10]) == sorted("abcde" * 2)
