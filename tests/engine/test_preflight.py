"""Mistakes show before any weight is read, whichever way an engine is started.

The weights are poisoned: reading them fails in another way. Mistakes that need no model are
made with one that does not exist.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kit
from octavo import LLM
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.engine.executor import create_executor
from octavo.engine.preflight import check_names
from octavo.errors import CheckpointError, ConfigError

Start = Callable[..., object]


def as_flags(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip


def by_llm(model: str, **options: Any) -> None:
    LLM(model, **options)


def by_executor(model: str, **options: Any) -> None:
    """As the engine's own process does, of `octavo serve` and `AsyncLLM`."""
    create_executor(EngineConfig(model, **options))


def by_command(*command: str) -> Start:
    def start(model: str, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            errors = io.StringIO()
            patch.setattr("sys.stderr", errors)
            argv = [*command, *as_flags(options)]
            assert main([argv[0], model, *argv[1:]]) == 1
        # The command's one line is the error's.
        lines = [line for line in errors.getvalue().splitlines() if line.startswith("octavo: ")]
        raise ConfigError(lines[-1])

    return start


STARTS = {
    "LLM": by_llm,
    "executor": by_executor,
    "generate": by_command("generate", "-p", "hi"),
    "chat": by_command("chat"),
    "serve": by_command("serve", "--port", "0"),
    "run-batch": by_command("run-batch"),
}

# Options, and what is said of them: neither torch nor a model is needed.
MODEL_FREE = [
    ({"scheduler": "adaptiv"}, "unknown scheduler 'adaptiv'"),
    ({"chat_template": "no-such.jinja"}, "'no-such.jinja' is neither a file"),
    ({"swap_path": "no-such-folder"}, "swap_path 'no-such-folder' is not a folder"),
]
NAMES = [
    ({"quantization": "nvfp4"}, "int8, int4, fp8, w8a8, w4a8 quantize any model.*awq, gptq"),
    ({"quantization_override": "lm_head=int3"}, "quantization_override"),
    ({"attention_impl": "flash"}, "unknown attention_impl 'flash'; known: auto, cpu"),
]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.tiny(tmp_path_factory.mktemp("poisoned"))


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    body = {"prompt": "hi"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    Path("in.jsonl").write_text(json.dumps(line))


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("octavo.models.weights.read_into", read)
    monkeypatch.setattr("octavo.models.weights.read_codes", read)


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize(("options", "says"), MODEL_FREE)
def test_what_needs_no_model_is_reported_before_one_is_looked_for(
    name: str, options: dict[str, Any], says: str, batch: None
) -> None:
    given = dict(options)
    if name == "run-batch":
        given = {"input_file": "in.jsonl", "output_file": "out.jsonl", **given}
    with pytest.raises(ConfigError, match=says):
        STARTS[name]("no/such/model.gguf", **given)


@pytest.mark.parametrize("name", ["LLM", "generate", "chat"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data_parallel_size": 2}, "size is 2, and an LLM is one engine.*or `octavo serve` for"),
        ({"distributed_executor_backend": "ray"}, "which nobody places"),
    ],
)
def test_an_engine_in_this_process_has_no_others(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        STARTS[name]("no/such/model.gguf", **options)


@pytest.mark.parametrize("name", ["LLM", "executor", "generate", "chat"])
@pytest.mark.parametrize(("options", "says"), NAMES)
def test_names_are_checked_before_a_model_is_looked_for(
    name: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        STARTS[name]("no/such/model.gguf", **options)


# What only the model's description shows to be wrong.
AGAINST_MODEL = [
    ({"max_model_len": 100_000}, "max_model_len is 100000"),
    ({"quantization": "awq"}, "'awq' is for checkpoints that are stored so"),
    ({"quantization_override": "layers.9.*=int8"}, "no part of the model"),
    ({"gpu_memory_utilization": 0.00001}, "gpu_memory_utilization"),
    ({"tokenizer": "no-such-folder"}, "tokenizer 'no-such-folder'"),
]


@pytest.mark.parametrize("name", ["LLM", "executor", "generate"])
@pytest.mark.parametrize(("options", "says"), AGAINST_MODEL)
def test_what_the_description_shows_is_reported_before_the_weights(
    name: str, options: dict[str, Any], says: str, poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    with pytest.raises(ConfigError, match=says) as error:
        STARTS[name](str(poisoned), **options)
    assert not re.search(r"(?<!\w)-\d", str(error.value)), "no negative sizes"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-p", "x" * 600], "the prompt has 600 tokens; the model's limit is 512 tokens"),
        (["-p", "x", "--max-tokens", "9000"], "the prompt has 1 token and max_tokens is 9000"),
        (["-p", "x", "--max-model-len", "1"], "the prompt has 1 token; the model's limit is 1 tok"),
        (["-p", "x", "--allowed-token-ids", "99999"], "allowed_token_ids has token id 99999"),
    ],
)
def test_prompts_that_do_not_fit_are_reported_before_the_weights(
    argv: list[str], says: str, poisoned: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    poison(monkeypatch)
    assert main(["generate", str(poisoned), *argv]) == 1
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_default_of_max_tokens_shrinks_to_the_room_that_is_left(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 is generate's default, and more than this window holds: the load is reached."""
    poison(monkeypatch)
    with pytest.raises(AssertionError, match="weights were read"):
        main(["generate", str(poisoned), "-p", "x", "--max-model-len", "64"])


@pytest.mark.parametrize("name", ["LLM", "executor", "generate", "chat", "serve"])
def test_a_file_that_is_no_model_is_reported_without_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.gguf"
    file.write_text("hello\n")
    monkeypatch.setattr("octavo.engine.preflight.check_names", None)
    with pytest.raises((CheckpointError, ConfigError), match=r"x\.gguf"):
        STARTS[name](str(file))


def test_what_is_right_passes() -> None:
    for quantization in (None, "int8", "int4", "awq", "gptq"):
        check_names(EngineConfig("absent", quantization=quantization))
