"""`octavo serve`: an OpenAI-compatible server."""

import argparse
import sys
from dataclasses import fields

from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.config import EngineConfig, add_flags
from octavo.log import api_key_from_environment, configure
from octavo.server.listener import bind
from octavo.server.options import ServerConfig

# vLLM's names for flags that have another name here.
_ALIASES = {
    "--scheduling-policy": ("scheduler", str),
    "--shutdown-timeout": ("drain_timeout", float),
}


def add_arguments(parser: Parser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    add_flags(group, ServerConfig)
    for flag, (name, kind) in _ALIASES.items():
        group.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS,
                           help=f"the same as --{name.replace('_', '-')}")  # fmt: skip
    group.add_argument("--enable-log-requests", dest="log_requests", action="store_true",
                       default=argparse.SUPPRESS, help="the same as --log-requests")  # fmt: skip


def run(args: argparse.Namespace, executor: str | None = None) -> int:
    """Serve until a signal; returns the exit code. executor: `module:name`, for tests."""
    configure()
    given = {f.name: getattr(args, f.name) for f in fields(ServerConfig) if hasattr(args, f.name)}
    given.setdefault("api_key", api_key_from_environment())
    options = ServerConfig(**given)
    asked = {"model": args.model, **engine_options(args, ("model",))}
    config = EngineConfig.from_options({"load_progress": sys.stderr.isatty(), **asked})
    with bind(options.host, options.port, options.stall_timeout) as listener:
        # Imported late: a wrong flag or a port in use is reported without the web framework.
        from octavo.server.run import serve

        return serve(listener, config, options, *([executor] if executor else []))
