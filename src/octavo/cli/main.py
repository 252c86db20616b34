"""`octavo`: find the subcommand, run it, turn errors into one line and an exit code.

Exit codes: 0 done; 1 an error that Octavo explains; 2 a wrong command line; 130 Ctrl-C;
141 the reader of our output went away.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from octavo.cli.arguments import Parser
from octavo.errors import OctavoError, nearest, shown
from octavo.version import __version__

# Command -> what it does. The module octavo.cli.<command> has `add_arguments(parser)` and
# `run(args) -> exit code`, and is imported for its own command only.
COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's API",
    "generate": "answer prompts from the command line or standard input",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "chat": "talk to a model in the terminal",
    "pull": "fetch a model into the cache",
    "plan": "what of a model fits on a device, before either is there",
    "simulate": "how a model would be served on a device, before either is there",
    "doctor": "say what is wrong with a running server, why, and what to set",
    "bench": "run benchmarks, of Octavo alone or against other engines",
}

# Taken as commands, too; -h and -V are the same.
_WORDS = ("help", "version")
# Commands of vLLM's with another name here.
_VLLM_COMMANDS = {
    "complete": "octavo generate completes prompts; with a running server, octavo chat --url",
    "collect-env": "octavo version says what is installed, the log of a start what it runs on",
}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_NO_NAME = (errno.ENAMETOOLONG, errno.ELOOP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code."""
    _prepare_streams()
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
        _drop_output()
        return 141
    except OSError as error:
        if error.errno in _NO_NAME:
            name = shown(error.filename)
            print(f"octavo: {name} cannot be a file: {error.strerror}", file=sys.stderr)
            return 1
        if error.errno not in _NO_ROOM:
            raise
        name = "" if error.filename is None else f" {error.filename}"
        print(f"octavo: cannot write{name}: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1


def _prepare_streams() -> None:
    """Standard streams that can be used, also where the caller closed one.

    A closed one becomes the null device; otherwise the next file or socket would get its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number and not _is_open(number):
                os.dup2(null, number)
            setattr(sys, name, os.fdopen(null, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        # What the locale's encoding lacks is shown as "?": the answer is computed by then.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _drop_output() -> None:
    """Nothing more can be written; the interpreter's own flush at exit must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        use = _VLLM_COMMANDS.get(argv[0])
        hint = f"; {use}" if use else nearest(argv[0], known)
        print(f"octavo: unknown {kind} {argv[0]!r}{hint}", file=sys.stderr)
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
