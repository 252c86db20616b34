"""`octavo serve`: an OpenAI-compatible server."""

import argparse
from dataclasses import fields
from typing import Any

from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.config import EngineConfig, in_our_names
from octavo.engine.preflight import check_options
from octavo.errors import ConfigError, OctavoError
from octavo.log import api_keys_from_environment, configure, get_logger, is_json
from octavo.server.listener import open_listener
from octavo.server.options import ServerConfig, add_server_flags, last_word
from octavo.server.spans import check_spans
from octavo.server.tls import check_tls
from octavo.utils.flags import add_vllm_flags
from octavo.vllm_names import Kind, names

logger = get_logger(__name__)

# Of vLLM's names, those that are the server's and not the engine's.
_SERVER_NAMES = tuple(dict.fromkeys([*(f.name for f in fields(ServerConfig)), *names(Kind.SERVER)]))


class _NoModel(str):
    """The default model, where the command line names none."""


def add_arguments(parser: Parser) -> None:
    add_engine_flags(parser, kinds=())
    parser.set_defaults(model=_NoModel(EngineConfig.model))
    add_server_flags(parser.add_argument_group("server"))
    add_vllm_flags(parser, ServerConfig, (Kind.SERVER,))
    add_vllm_flags(parser, EngineConfig)


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerConfig that the command line gave, under their own names or vLLM's."""
    given = {name: getattr(args, name) for name in _SERVER_NAMES if hasattr(args, name)}
    return in_our_names(ServerConfig, given, (Kind.SERVER,))


def run(args: argparse.Namespace, executor: str | None = None) -> int:
    """Serve until a signal; returns the exit code. executor: `module:name`, for tests."""
    given = server_options(args)
    model = _model(args.model, given)
    if "api_key" not in given:
        given["api_key"] = api_keys_from_environment()
    options = ServerConfig(**given)
    configure(options.log_level, form=options.log_format, usual="text")
    try:
        return _serve(options, model, args, executor)
    except OctavoError as error:
        if not is_json():
            raise
        logger.error("%s", error)  # what reads the log reads objects only
        return 1


def _serve(
    options: ServerConfig, model: str, args: argparse.Namespace, executor: str | None
) -> int:
    check_tls(options)
    check_spans(options)
    asked = {"model": model, **engine_options(args, ("model", *_SERVER_NAMES))}
    config = EngineConfig.from_options(asked)
    check_options(config)
    with open_listener(options) as listener:
        # Imported late: a wrong flag or a port in use is reported without the web framework.
        from octavo.server.run import serve

        return serve(listener, config, options, *([executor] if executor else []))


def _model(named: str, given: dict[str, Any]) -> str:
    """The model; in `serve --api-key KEY MODEL` it is among the words of the flag before it."""
    if not isinstance(named, _NoModel):
        return named
    found = last_word(given)
    if found is None:
        if sum(len(words) > 1 for words in given.values() if isinstance(words, tuple)) > 1:
            raise ConfigError(
                "several flags have more than one word, so that one of them may be MODEL; give "
                "MODEL first: octavo serve MODEL --api-key KEY KEY"
            )
        return str(named)
    name, words, model = found
    given[name] = words
    return model
