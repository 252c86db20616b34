"""`EngineArgs`: the options of an engine as vLLM's scripts pass them around.

An EngineArgs is an EngineConfig that takes vLLM's names too, and comes from a command line.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from octavo.config import OFFLINE_SCHEDULER, EngineConfig, in_our_names
from octavo.errors import ConfigError, advise_on_assignment
from octavo.utils.argparse_utils import FlexibleArgumentParser, add_config_flag
from octavo.utils.flags import add_flags, add_vllm_flags
from octavo.vllm_names import Kind, names

ArgsT = TypeVar("ArgsT", bound="EngineArgs")
_SCHEDULER = EngineConfig.__dataclass_fields__["scheduler"].metadata
_ADVICE = "make another one: args = args.with_({name}=...)"


@advise_on_assignment(_ADVICE)
@dataclass(frozen=True, init=False)
class EngineArgs(EngineConfig):
    """Options of `LLM`: `LLM(**dataclasses.asdict(args))`, or `LLM.from_engine_args(args)`.

    Keywords are those of `LLM`, vLLM's included. Raises ConfigError as `LLM` does.
    """

    scheduler: str = field(default=OFFLINE_SCHEDULER, metadata=_SCHEDULER)

    def __init__(self, model: str = EngineConfig.model, **options: Any) -> None:
        given = in_our_names(EngineConfig, {"model": model, **options})
        super().__init__(**{"scheduler": type(self).scheduler, **given})

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give `parser` a flag for each option, vLLM's included, and return it."""
        group = parser.add_argument_group("engine")
        if isinstance(parser, FlexibleArgumentParser):
            add_config_flag(group)
        add_flags(group, cls, with_defaults=True)
        add_vllm_flags(group, cls)
        return parser

    @classmethod
    def from_cli_args(cls: type[ArgsT], args: argparse.Namespace) -> ArgsT:
        """The options that `args` holds; its other attributes are left alone."""
        known = dict.fromkeys([*(f.name for f in fields(cls)), *names(Kind.ENGINE)])
        return cls(**{name: getattr(args, name) for name in known if hasattr(args, name)})

    def create_engine_config(self, *_: Any) -> EngineConfig:
        """The configuration itself."""
        return EngineConfig(**{f.name: getattr(self, f.name) for f in fields(EngineConfig)})


def options_of(engine_args: object) -> dict[str, Any]:
    """The keywords that EngineArgs, vLLM's dataclass, or a mapping stands for.

    Raises ConfigError for anything else.
    """
    if isinstance(engine_args, Mapping):
        return dict(engine_args)
    if isinstance(engine_args, type) or not is_dataclass(engine_args):
        raise ConfigError(
            "from_engine_args takes EngineArgs, an EngineConfig or a mapping of its fields, "
            f"not a {type(engine_args).__name__}"
        )
    return {item.name: getattr(engine_args, item.name) for item in fields(engine_args)}


@advise_on_assignment(_ADVICE)
@dataclass(frozen=True, init=False)
class AsyncEngineArgs(EngineArgs):
    """Options of `AsyncLLM`, whose scheduler is a server's by default."""

    scheduler: str = field(default=EngineConfig.scheduler, metadata=_SCHEDULER)
