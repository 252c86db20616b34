"""`octavo`: find the subcommand, run it, turn errors into one line and an exit code.

Exit codes: 0 done; 1 an error that Octavo explains; 2 a wrong command line; 130 Ctrl-C;
141 the reader of our output went away.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from octavo.cli.arguments import Parser
from octavo.errors import OctavoError, nearest
from octavo.version import __version__

# Command -> what it does. The module octavo.cli.<command> has `add_arguments(parser)` and
# `run(args) -> exit code`, and is imported for its own command only.
COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "generate": "answer prompts from the command line or standard input",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "chat": "talk to a model in the terminal",
    "pull": "fetch a model into the cache",
    "bench": "run benchmarks, of Octavo alone or against other engines",
}

# Taken as commands, too; -h and -V are the same.
_WORDS = ("help", "version")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nothing more can be written; the interpreter's own flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "help":
        return _help(argv[1:])
    if argv[0] in ("-V", "--version", "version"):
        print(f"octavo {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "flag" if argv[0].startswith("-") else "command"
        known = ["--help", "--version"] if kind == "flag" else [*COMMANDS, *_WORDS]
        print(f"octavo: unknown {kind} {argv[0]!r}{nearest(argv[0], known)}", file=sys.stderr)
        return 2
    module = _module(argv[0])
    status: int = module.run(command_parser(argv[0]).parse(argv[1:]))
    return status


def command_parser(command: str) -> Parser:
    """The complete parser of one subcommand."""
    prog = f"octavo {command}"
    what = COMMANDS[command]
    parser = Parser(prog=prog, usage=f"{prog} [ARGUMENT] [FLAGS]", description=f"{what}.")
    _module(command).add_arguments(parser)
    return parser


def _module(command: str) -> Any:
    return import_module(f"octavo.cli.{command.replace('-', '_')}")


def _help(words: Sequence[str]) -> int:
    """`octavo help COMMAND` is `octavo COMMAND --help`."""
    if not words:
        print(_overview())
        return 0
    if len(words) > 1 or words[0] not in COMMANDS:
        hint = nearest(words[0], COMMANDS)
        print(f"octavo help: no command {' '.join(words)!r}{hint}", file=sys.stderr)
        return 2
    command_parser(words[0]).print_help()
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: octavo COMMAND [...]",
            "",
            "Serve large language models with a paged KV cache.",
            "",
            "commands:",
            *lines,
            "",
            "octavo help COMMAND lists a command's flags; octavo version prints the version.",
        ]
    )
