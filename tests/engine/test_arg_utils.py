"""`EngineArgs`: options as vLLM's scripts pass them around."""

import argparse
from dataclasses import FrozenInstanceError, asdict

import pytest

from octavo import AsyncEngineArgs, EngineArgs
from octavo.config import OFFLINE_SCHEDULER, EngineConfig
from octavo.engine.arg_utils import options_of
from octavo.errors import ConfigError
from octavo.utils import FlexibleArgumentParser


def test_options_become_a_configuration() -> None:
    args = EngineArgs(model="m", max_model_len=64, dtype="half", trust_remote_code=True)
    config = args.create_engine_config()
    assert type(config) is EngineConfig
    assert (config.model, config.max_model_len, config.dtype) == ("m", 64, "float16")
    assert config.scheduler == OFFLINE_SCHEDULER
    assert AsyncEngineArgs("m").scheduler == "fifo"
    assert EngineArgs(scheduling_policy="priority").scheduler == "priority"


def test_a_mapping_of_them_is_taken_back() -> None:
    args = EngineArgs("m", block_size=32)
    assert EngineConfig.from_options(asdict(args)) == args.create_engine_config()
    assert EngineArgs(**asdict(args)) == args
    assert args.with_(block_size=16).block_size == 16


def test_keywords_come_from_every_form_of_engine_args() -> None:
    args = EngineArgs("m", block_size=32)
    assert EngineArgs(**options_of(args)) == args
    assert options_of(args.create_engine_config())["block_size"] == 32
    assert options_of({"model": "m"}) == {"model": "m"}
    for wrong in ("m", EngineArgs, None):
        with pytest.raises(ConfigError, match="takes EngineArgs, an EngineConfig or a mapping"):
            options_of(wrong)


def test_what_is_refused_is_refused_here() -> None:
    with pytest.raises(ConfigError, match="LoRA adapters are not supported"):
        EngineArgs("m", enable_lora=True)
    with pytest.raises(FrozenInstanceError, match=r"args = args.with_\(seed=...\)"):
        EngineArgs("m").seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("parser", [FlexibleArgumentParser(), argparse.ArgumentParser()])
def test_a_script_s_command_line(parser: argparse.ArgumentParser) -> None:
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="of/script")
    parser.add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--max-model-len", "4k", "--max-tokens", "5", "-tp", "1",
                                   "--trust-remote-code"]))  # fmt: skip
    assert args.pop("max_tokens") == 5
    config = EngineConfig.from_options(args)
    assert (config.model, config.max_model_len) == ("of/script", 4000)
    assert EngineArgs.from_cli_args(argparse.Namespace(**args, other=1)) == EngineArgs(
        "of/script", max_model_len=4000
    )
    assert parser.parse_args([]).max_num_seqs == EngineConfig.max_num_seqs
