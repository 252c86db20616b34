"""The table of vLLM's names: complete, and true of what the code does with each name."""

import importlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import LLM, AsyncLLM, TokensPrompt, vllm_names
from octavo.cli import serve
from octavo.cli.arguments import Parser, engine_options
from octavo.cli.main import command_parser
from octavo.config import EngineConfig
from octavo.engine.fake import FakeRunner
from octavo.errors import ConfigError, RequestError, RequestTypeError
from octavo.params import SamplingParams
from octavo.server.options import ServerConfig
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from octavo.server.responses_protocol import ResponsesBody
from octavo.text.tokenizer import load_tokenizer
from octavo.utils.flags import flag_name
from octavo.vllm_names import Entry, Kind, Status

SNAPSHOT = Path(__file__).parent / "vllm_names.txt"
SOURCE = Path(octavo.__file__).parent
# Nothing takes this value.
ODD = "surely not"


def snapshot() -> Iterator[tuple[Kind, str]]:
    for line in SNAPSHOT.read_text().splitlines():
        if not line.startswith("#"):
            kind, name = line.split(": ")
            yield Kind(kind), name


def of(kind: Kind, *states: Status) -> list[Entry]:
    return [entry for entry in vllm_names.entries(kind) if entry.status in states]


def named(entry: Entry) -> str:
    return entry.name


def known(kind: Kind, name: str) -> bool:
    if kind is Kind.IMPORT:
        return bool(vllm_names.find(kind, name) or vllm_names.refused_import(name))
    if kind is Kind.SERVER and vllm_names.find(Kind.ENGINE, name):
        return True
    return vllm_names.find(kind, name) is not None


@pytest.mark.parametrize("kind", Kind)
def test_the_table_has_every_name_of_vllm(kind: Kind) -> None:
    names = [name for found, name in snapshot() if found is kind]
    assert names
    assert [name for name in names if not known(kind, name)] == []


def test_no_name_is_there_twice_and_each_refusal_has_a_reason() -> None:
    pairs = [(entry.kind, entry.name) for entry in vllm_names.ENTRIES]
    assert len(pairs) == len(set(pairs))
    for entry in vllm_names.ENTRIES:
        if entry.status is Status.REFUSED:
            assert entry.reason, entry
        if entry.status is Status.NO_EFFECT:
            assert entry.note, entry
            assert entry.any_value or entry.neutral, entry
        if entry.status is Status.RENAMED:
            assert entry.ours, entry


# --- options of the engine ----------------------------------------------------------------------


def test_supported_options_are_fields() -> None:
    names = {item.name for item in fields(EngineConfig)}
    assert {entry.name for entry in of(Kind.ENGINE, Status.SUPPORTED)} <= names
    assert {entry.ours for entry in of(Kind.ENGINE, Status.RENAMED)} <= names


@pytest.mark.parametrize("entry", of(Kind.ENGINE, Status.NO_EFFECT, Status.REFUSED), ids=named)
def test_an_option_without_effect_is_taken_and_another_value_refused(entry: Entry) -> None:
    assert entry.name not in {item.name for item in fields(EngineConfig)}
    for value in (None, *entry.neutral):
        assert EngineConfig.from_options({entry.name: value}) == EngineConfig()
    if entry.any_value:
        assert EngineConfig.from_options({entry.name: ODD}) == EngineConfig()
        return
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options({entry.name: ODD})
    assert entry.name in str(caught.value)
    assert entry.refusal() in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_values_that_mean_the_default_leave_it() -> None:
    for entry in of(Kind.ENGINE, Status.SUPPORTED, Status.RENAMED):
        for value in entry.neutral:
            assert EngineConfig.from_options({entry.name: value}) == EngineConfig()


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"quantization": "awq_marlin"}, {"quantization": "awq"}),
        ({"generation_config": "vllm"}, {"generation_config": "octavo"}),
        ({"scheduling_policy": "priority"}, {"scheduler": "priority"}),
        ({"attention_backend": "torch_ref"}, {"attention_impl": "torch_ref"}),
        ({"use_tqdm_on_load": False}, {"load_progress": False}),
        ({"device_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"max_model_len": "4k"}, {"max_model_len": 4000}),
        ({"max_model_len": "4K"}, {"max_model_len": 4096}),
        ({"kv_cache_memory_bytes": "1.5GiB"}, {"kv_cache_memory_bytes": 3 << 29}),
    ],
)
def test_vllms_spellings(options: dict[str, object], ours: dict[str, object]) -> None:
    assert EngineConfig.from_options(options) == EngineConfig.from_options(ours)


def test_a_dtype_of_torch_is_its_name() -> None:
    import torch

    assert EngineConfig.from_options({"dtype": torch.float16}).dtype == "float16"
    assert EngineConfig.from_options({"dtype": torch.bfloat16}).dtype == "bfloat16"


def test_two_names_of_one_option_must_agree() -> None:
    both = {"attention_impl": "cpu", "attention_backend": "torch_ref"}
    with pytest.raises(ConfigError, match="attention_backend is vLLM's name of attention_impl"):
        EngineConfig.from_options(both)
    assert EngineConfig.from_options({**both, "attention_impl": "torch_ref"})


def test_what_surprises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        EngineConfig.from_options({"trust_remote_code": True})
    assert "no code of a checkpoint is ever run" in caplog.text


def test_a_device_that_there_is_not_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="not 'tpu': leave it out to compute on the GPU"):
        EngineConfig.from_options({"device": "tpu"})
    assert EngineConfig.from_options({"device": "cuda:1"}).device == "cuda:1"


# --- flags --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parser() -> Parser:
    return command_parser("serve")


def word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def configs(parser: Parser, *words: str) -> tuple[EngineConfig, ServerConfig]:
    """What `octavo serve MODEL words` would start."""
    args = parser.parse(["smollm2", *words])
    engine = engine_options(args, serve._SERVER_NAMES)
    return EngineConfig.from_options(engine), ServerConfig(**serve.server_options(args))


def flags() -> list[Entry]:
    server = vllm_names.entries(Kind.SERVER)
    names = {entry.name for entry in server}
    ours = {item.name for item in fields(ServerConfig)}
    others = [entry for entry in vllm_names.entries(Kind.ENGINE) if entry.name not in names]
    return [
        entry
        for entry in (*server, *others)
        if entry.status in (Status.NO_EFFECT, Status.REFUSED) and entry.name not in ours
    ]


@pytest.mark.parametrize("entry", flags(), ids=named)
def test_a_flag_without_effect_is_taken_and_another_value_refused(
    parser: Parser, entry: Entry
) -> None:
    flag = flag_name(entry.name)
    for value in entry.neutral:
        if isinstance(value, bool):
            words = [flag if value else f"--no-{flag[2:]}"]
        else:
            words = [f"{flag}={word(value)}"]
        assert configs(parser, *words) == (EngineConfig(), ServerConfig())
    if entry.any_value:
        return
    if entry.form is vllm_names.Form.FLAG:
        if True in entry.neutral and False in entry.neutral:
            return
        words = [f"--no-{flag[2:]}" if True in entry.neutral else flag]
    else:
        words = [flag, ODD]
    with pytest.raises(ConfigError) as caught:
        configs(parser, *words)
    assert entry.refusal() in str(caught.value)


def test_supported_flags_are_flags(parser: Parser) -> None:
    for entry in (*of(Kind.SERVER, Status.SUPPORTED), *of(Kind.ENGINE, Status.SUPPORTED)):
        if entry.name != "model_tag":  # the first argument
            assert parser.knows(flag_name(entry.name)), entry.name


def test_no_flag_of_vllm_s_is_in_the_help(parser: Parser) -> None:
    text = parser.format_help()
    assert "--enable-lora" not in text
    assert "==" not in text


@pytest.mark.parametrize(
    ("words", "engine", "server"),
    [
        (["--max-model-len", "4k", "-tp", "1"], {"max_model_len": 4000}, {}),
        (["--max_model_len=8K"], {"max_model_len": 8192}, {}),
        (["--max-model-len", "auto"], {}, {}),
        (["--max-model-len", "-1"], {}, {}),
        (["--kv-cache-memory-bytes", "4G"], {"kv_cache_memory_bytes": 4 << 30}, {}),
        (["--dtype", "half", "--trust-remote-code"], {"dtype": "float16"}, {}),
        (["--scheduling-policy", "priority"], {"scheduler": "priority"}, {}),
        (["--scheduling-policy", "fcfs"], {}, {}),
        (["--disable-log-requests", "--disable-log-stats"], {}, {"disable_log_stats": True}),
        (["--enable-log-requests"], {}, {"log_requests": True}),
        (["--shutdown-timeout", "5"], {}, {"drain_timeout": 5.0}),
        (["--generation-config", "vllm"], {"generation_config": "octavo"}, {}),
        (["--enable-chunked-prefill", "--no-enable-lora", "-q", "int8"], {"quantization": "int8"},
         {}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}, {}),
        (["--disable-prefix-caching"], {"enable_prefix_caching": False}, {}),
        (["--served-model-name", "a", "b"], {}, {"served_model_name": ("a", "b")}),
        (["--served-model-name", "a,b"], {}, {"served_model_name": ("a", "b")}),
        (["--allowed-origins", '["*"]'], {}, {"allowed_origins": ("*",)}),
        (["-O3", "--hf-token", "--speculative-config", "null"], {}, {}),
        (["--uvicorn-log-level", "warning"], {}, {"uvicorn_log_level": "warning"}),
    ],
)  # fmt: skip
def test_lines_of_vllm_serve(
    parser: Parser, words: list[str], engine: dict[str, object], server: dict[str, object]
) -> None:
    assert configs(parser, *words) == (EngineConfig(**engine), ServerConfig(**server))  # type: ignore[arg-type]


def test_a_part_of_a_refused_option_is_refused_with_its_reason(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser.parse(["--compilation-config.mode", "3"])
    assert "nothing is compiled with torch" in capsys.readouterr().err


# --- sampling parameters ------------------------------------------------------------------------


def test_supported_sampling_parameters_are_fields() -> None:
    names = {item.name for item in fields(SamplingParams)}
    assert {entry.name for entry in of(Kind.SAMPLING, Status.SUPPORTED)} == names


@pytest.mark.parametrize("entry", of(Kind.SAMPLING, Status.NO_EFFECT, Status.REFUSED), ids=named)
def test_a_parameter_without_effect_is_taken_and_another_value_refused(entry: Entry) -> None:
    for value in (None, *entry.neutral):
        assert SamplingParams(**{entry.name: value}) == SamplingParams()
    if entry.any_value:
        return
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{entry.name: ODD})
    assert caught.value.param == entry.name
    assert entry.refusal() in str(caught.value)
    assert "did you mean" not in str(caught.value)


# --- request fields -----------------------------------------------------------------------------


def test_supported_request_fields_are_fields() -> None:
    bodies = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, ResponsesBody)
    names = {name for body in bodies for name in body.__struct_fields__}
    assert {entry.name for entry in of(Kind.REQUEST, Status.SUPPORTED)} <= names


@pytest.mark.parametrize("entry", of(Kind.REQUEST, Status.NO_EFFECT, Status.REFUSED), ids=named)
def test_a_field_without_effect_is_taken_and_another_value_refused(entry: Entry) -> None:
    message = {"role": "user", "content": "a"}
    for kind, body in ((CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": [message]})):
        for value in (None, *entry.neutral):
            assert parse(json.dumps({**body, entry.name: value}).encode(), kind)
        if entry.any_value:
            continue
        with pytest.raises(RequestError) as caught:
            parse(json.dumps({**body, entry.name: ODD}).encode(), kind)
        assert caught.value.param == entry.name
        assert entry.refusal() in str(caught.value)


# --- imports ------------------------------------------------------------------------------------


def importing(path: str) -> Any:
    """The value of `from octavo.a.b import c`, or of `from octavo import c`."""
    module, _, name = f"octavo.{path}".rpartition(".")
    found: dict[str, Any] = {}
    exec(f"from {module} import {name} as value", found)
    return found["value"]


@pytest.mark.parametrize("path", [name for kind, name in snapshot() if kind is Kind.IMPORT])
def test_an_import_works_or_says_why_not(path: str) -> None:
    entry = vllm_names.find(Kind.IMPORT, path)
    if entry is not None and entry.status is Status.SUPPORTED:
        assert importing(path) is not None
        return
    with pytest.raises(ImportError) as caught:
        importing(path)
    reason = vllm_names.refused_import(path)
    assert reason is not None
    assert reason.partition(": ")[2] in str(caught.value)


def test_each_import_of_the_table_is_as_it_says() -> None:
    for entry in of(Kind.IMPORT, Status.SUPPORTED):
        assert importing(entry.name) is not None, entry.name
    for entry in of(Kind.IMPORT, Status.REFUSED):
        ours = SOURCE / entry.name / "__init__.py"  # with some of what vLLM has there
        with pytest.raises(ImportError, match="has no counterpart in octavo"):
            importing(f"{entry.name}.other" if ours.exists() else entry.name)


def test_a_missing_name_can_be_asked_for() -> None:
    assert not hasattr(octavo, "PoolingParams")
    with pytest.raises(AttributeError, match="only text is generated"):
        octavo.PoolingParams  # noqa: B018
    with pytest.raises(ImportError, match="LoRA adapters are not supported; merge the adapter"):
        importlib.import_module("octavo.lora.request")


def test_what_vllm_has_not_either_is_an_ordinary_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'octavo\.nothing'"):
        importlib.import_module("octavo.nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        importing("Nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        importing("sampling_params.Nothing")


# --- LLM ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    """An LLM without weights, whose model has 259 ids."""
    tokenizer = load_tokenizer(tiny_folder)
    runner = FakeRunner()
    runner.limits = replace(runner.limits, vocab_size=tokenizer.vocab_size)
    return LLM.over(runner, tokenizer, EngineConfig())


def test_methods_are_there_or_say_why_not(llm: LLM) -> None:
    for entry in of(Kind.METHOD, Status.SUPPORTED):
        assert callable(getattr(llm, entry.name))
    for entry in of(Kind.METHOD, Status.RENAMED):
        assert getattr(llm, entry.name) is getattr(llm, entry.ours)
    for entry in of(Kind.METHOD, Status.REFUSED):
        assert not hasattr(llm, entry.name)
        with pytest.raises(AttributeError) as caught:
            getattr(llm, entry.name)
        assert entry.refusal() in str(caught.value)
    with pytest.raises(AttributeError, match="LLM has no 'nothing'"):
        llm.nothing  # noqa: B018


def test_methods_of_async_llm_are_there_or_say_why_not() -> None:
    for entry in of(Kind.ASYNC_METHOD, Status.SUPPORTED):
        assert hasattr(AsyncLLM, entry.name), entry.name
    engine = object.__new__(AsyncLLM)
    for entry in of(Kind.ASYNC_METHOD, Status.REFUSED):
        with pytest.raises(AttributeError) as caught:
            getattr(engine, entry.name)
        assert f"AsyncLLM has no {entry.name!r}: {entry.refusal()}" in str(caught.value)


def test_arguments_without_effect_are_taken_and_others_refused(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for entry in of(Kind.ARGUMENT, Status.NO_EFFECT, Status.REFUSED):
        for value in (None, *entry.neutral):
            assert llm.generate("a", params, use_tqdm=False, **{entry.name: value})
            assert llm.reset_prefix_cache(**{entry.name: value})
        with pytest.raises(RequestError) as caught:
            llm.chat([{"role": "user", "content": "a"}], params, **{entry.name: ODD})
        assert entry.refusal() in str(caught.value)
    signature = inspect.signature(LLM.generate).parameters | inspect.signature(LLM.chat).parameters
    for entry in of(Kind.ARGUMENT, Status.SUPPORTED):
        assert entry.name in signature
    with pytest.raises(RequestTypeError, match="generate has no argument 'tools'"):
        llm.generate("a", tools=None)
    with pytest.raises(RequestTypeError, match="generate has no argument 'max_tokens'"):
        llm.generate("a", max_tokens=5)


def test_keys_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    for entry in of(Kind.PROMPT, Status.REFUSED):
        for value in (None, *entry.neutral):
            assert llm.generate({"prompt": "a", entry.name: value}, params, use_tqdm=False)
        with pytest.raises(RequestError) as caught:
            llm.generate({"prompt": "a", entry.name: ODD}, params)
        assert entry.refusal() in str(caught.value)
    long = list(range(64))
    for salt, cached in (("x", 0), ("x", 63), ("y", 0)):
        prompt = TokensPrompt(prompt_token_ids=long, cache_salt=salt)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.num_cached_tokens == cached
    with pytest.raises(RequestTypeError, match="cache_salt must be a string"):
        llm.generate({"prompt": "a", "cache_salt": 5}, params)
