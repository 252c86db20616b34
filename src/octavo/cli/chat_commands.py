"""The commands of `octavo chat`: lines such as `/set temperature 0.2`.

Not here: /regenerate and /exit, which generate and leave (chat.py).
"""

import os
import re
import shlex
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from octavo.cli import chat_files
from octavo.cli.arguments import SAMPLING_HELP, Parser, add_sampling_flags
from octavo.cli.chat_session import Reply, Session
from octavo.errors import RequestError, counted, nearest
from octavo.params import SamplingParams
from octavo.utils.flags import flag_name

# Of no use in a conversation: it has one answer at a time, and shows its text only.
UNUSED_SETTINGS = ("n", "logprobs", "prompt_logprobs")
SETTINGS = tuple(name for name in SAMPLING_HELP if name not in UNUSED_SETTINGS)


@dataclass(frozen=True, slots=True)
class Command:
    arguments: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "show this (also /?)"),
    "/system": Command("[TEXT | none]", "show, replace or remove the system message"),
    "/set": Command("[NAME [VALUE]]", "show or change settings; default undoes a change"),
    "/regenerate": Command("", "replace the last answer with a new one"),
    "/clear": Command("", "forget the conversation (also /reset)"),
    "/stats": Command("", "tokens, speed, and what is in the window"),
    "/save": Command("FILE", "write the conversation as .json or .md"),
    "/load": Command("FILE", "continue a conversation saved as .json"),
    "/exit": Command("", "leave (also /quit, Ctrl-D)"),
}
_SERVERS = "(the server's)"  # a setting that was left to the server, whose value is not known
ALIASES = {
    "/?": "/help",
    "/reset": "/clear",
    "/quit": "/exit",
    "/bye": "/exit",
    "/retry": "/regenerate",
}
_INPUT_HELP = '''
A message of several lines is pasted, or typed with Alt-Enter, with \\ at the end of
a line, or between """ and """. A message that begins with a slash needs a space first.
Ctrl-C stops an answer and keeps what there is of it.'''


def split(line: str) -> tuple[str, str] | None:
    """A command's full name and its arguments, or None if `line` is a message.

    A slash within the first word makes it a path, which is no command.
    """
    if not re.match(r"/[A-Za-z?!_-]*(\s|$)", line):
        return None
    name, _, rest = line.partition(" ") if " " in line.split("\n")[0] else line.partition("\n")
    return ALIASES.get(name, name), rest.strip()


def unknown(name: str) -> str:
    return f"no command {name!r}{nearest(name, [*COMMANDS, *ALIASES])} (/help lists the commands)"


class Commands:
    """The commands on one session. say: prints text; a command's errors are RequestErrors."""

    def __init__(self, session: Session, say: Callable[[str], None]) -> None:
        self._session = session
        self._say = say
        self._start = session.params
        self._files: set[Path] = set()  # of this conversation: /save may overwrite them
        self._run: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._system,
            "/set": self._set,
            "/clear": self._clear,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
        }

    def run(self, name: str, arguments: str) -> None:
        """Execute a command. Raises RequestError, with nothing changed."""
        if name not in COMMANDS:
            raise RequestError(unknown(name))
        if arguments and not COMMANDS[name].arguments:
            raise RequestError(f"{name} takes nothing after it, not {arguments!r:.60}")
        self._run[name](arguments)

    def complete(self, before: str) -> Iterable[tuple[str, int]]:
        """What may stand at the end of `before`: (words, length that each replaces)."""
        if not before.startswith("/") or "\n" in before:
            return []
        words = before.split(" ")
        last = words[-1]
        if len(words) == 1:
            found: Iterable[str] = (name for name in COMMANDS if name.startswith(last))
        elif words[0] == "/set" and len(words) == 2:
            found = (name for name in SETTINGS if name.startswith(last))
        elif words[0] in ("/save", "/load") and len(words) == 2:
            found = _paths(last)
        else:
            found = ()
        return [(word, len(last)) for word in found]

    def _help(self, _: str) -> None:
        heads = [f"{name} {command.arguments}".rstrip() for name, command in COMMANDS.items()]
        width = max(map(len, heads))
        lines = [f"{h:{width}}  {c.help}" for h, c in zip(heads, COMMANDS.values(), strict=True)]
        self._say("\n".join(lines) + _INPUT_HELP)

    def _system(self, text: str) -> None:
        session = self._session
        if text:
            session.set_system(None if text == "none" else _unquoted(text))
        self._say(
            "(no system message)" if session.system is None else f"system message: {session.system}"
        )

    def _clear(self, _: str) -> None:
        self._session.clear()
        self._say("(forgotten)")

    def _set(self, arguments: str) -> None:
        try:
            name, *values = _words(arguments) or [""]
        except ValueError as error:
            raise RequestError(f"{arguments!r:.60}: {error}".lower()) from None
        if name and name.replace("-", "_") not in SETTINGS:
            raise RequestError(_no_setting(name.replace("-", "_")))
        name = name.replace("-", "_")
        if values:
            value = getattr(self._start, name) if values == ["default"] else _parse(name, values)
            given = self._session.given
            given = given - {name} if values == ["default"] else given | {name}
            self._session.set_params(self._session.params.with_(**{name: value}), given)
        elif not name:
            self._say("\n".join(self._setting(name) for name in SETTINGS))
            return
        self._say(self._setting(name))

    def _setting(self, name: str) -> str:
        session = self._session
        known = session.backend.knows_defaults or name in session.given
        value = show_value(getattr(session.params, name)) if known else _SERVERS
        return f"{name:26} {value:14} {SAMPLING_HELP[name]}"

    def _stats(self, _: str) -> None:
        self._say("\n".join(stats_lines(self._session)))

    def _save(self, arguments: str) -> None:
        path = _path("/save", arguments)
        session = self._session
        chat_files.check_name(path)
        if not session.turns:
            raise RequestError("there is nothing to save yet")
        own = path.absolute() in self._files
        name = session.backend.name
        chat_files.save(path, name, session.system, session.turns, session.params, replace=own)
        self._files.add(path.absolute())
        self._say(f"({counted(len(session.turns), 'turn')} written to {path})")

    def _load(self, arguments: str) -> None:
        path, session = _path("/load", arguments), self._session
        saved = chat_files.load(path)
        if saved.settings is not None:
            session.set_params(saved.settings, chat_files.changed_settings(saved.settings))
        session.set_system(saved.system)
        session.restore(saved.turns)
        self._files = {path.absolute()}
        self._say(f"({counted(len(saved.turns), 'turn')} of {path}; {settings_line(session)})")


class _SettingParser(Parser):
    """The command line's own parser, for one setting at a time."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(message.removeprefix("argument --"))


def _parse(name: str, words: list[str]) -> Any:
    """The value that a setting's words spell, by the rules of its flag."""
    hint = typing.get_type_hints(SamplingParams)[name]
    if words == ["none"]:
        if type(None) not in typing.get_args(hint):
            raise RequestError(f"{name} has no value none; /set {name} default undoes a change")
        return None
    if hint is bool:
        truth = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
        if len(words) != 1 or words[0].lower() not in truth:
            raise RequestError(f"{name} must be on or off, not {' '.join(words)!r:.60}")
        return truth[words[0].lower()]
    if len(words) > 1 and "stop" != name != "bad_words":
        raise RequestError(f"{name} takes one value, not {len(words)}")
    parser = _SettingParser(prog="/set", add_help=False)
    add_sampling_flags(parser, {})
    values = [w.replace("\\n", "\n").replace("\\t", "\t") for w in words]
    return getattr(parser.parse_args([f"{flag_name(name)}={value}" for value in values]), name)


def _words(text: str) -> list[str]:
    """The words of a line, quoted or not; a backslash is a character as any other."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters, words.escape = True, "", ""
    return list(words)


def _no_setting(name: str) -> str:
    if name in UNUSED_SETTINGS:
        return f"{name} is of no use here: a conversation has one answer, and shows its text only"
    return f"no setting {name!r}{nearest(name, SETTINGS)}; /set lists them"


def show_value(value: object) -> str:
    """A setting's value as /set takes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return ",".join(f"{k}:{v:g}" for k, v in value.items()) or "none"
    if isinstance(value, tuple):
        texts = all(isinstance(item, str) for item in value)
        joined = " ".join(map(repr, value)) if texts else ",".join(map(str, value))
        return joined or "none"
    return "none" if value is None else f"{value}"


def settings_line(session: Session) -> str:
    """Temperature and the settings that differ from SamplingParams' own defaults, if known."""
    plain, params = SamplingParams(max_tokens=None), session.params
    shown = [
        f"{name} {show_value(getattr(params, name))}"
        for name in SETTINGS
        if name in session.given
        or (session.backend.knows_defaults and name == "temperature")
        or getattr(params, name) != getattr(plain, name)
    ]
    return ", ".join(shown)


def stats_lines(session: Session) -> list[str]:
    """What /stats shows."""
    replies, window = session.replies, session.backend.window
    generated = sum(reply.num_tokens for reply in replies)
    lines = [f"model        {session.backend.name}"]
    lines.append(f"turns        {len(session.turns)}, {generated} tokens generated")
    if replies:
        last = replies[-1]
        lines.append(f"last answer  {figures(last)}")
        if last.prompt_tokens is not None and last.cached_tokens is not None:
            lines.append(
                f"last prompt  {last.prompt_tokens} tokens, {last.cached_tokens} of them cached"
            )
        if last.used is not None:
            lines.append(f"window       {last.used}{f' of {window}' if window else ''} tokens used")
    elif window:
        lines.append(f"window       {window} tokens")
    if session.first:
        lines.append(
            f"dropped      the oldest {counted(session.first, 'turn')}: the window was full"
        )
    lines.append(f"settings     {settings_line(session) or _SERVERS}")
    return lines


def figures(reply: Reply) -> str:
    """Tokens, speed and latency of one answer."""
    parts = [counted(reply.num_tokens, "token")]
    if reply.rate is not None:
        parts.append(f"{reply.rate:.1f} tokens/s")
    if reply.seconds_to_first is not None:
        parts.append(f"{reply.seconds_to_first:.2f} s to the first")
    return ", ".join(parts)


def _unquoted(text: str) -> str:
    return text.strip('"').strip() if text.startswith('"""') and text.endswith('"""') else text


def _path(command: str, text: str) -> Path:
    if not text:
        raise RequestError(f"{command} needs the name of a file, such as {command} talk.json")
    return Path(os.path.expanduser(text))


def _paths(start: str) -> Iterable[str]:
    """Files and folders whose path begins with `start`."""
    folder, name = os.path.split(os.path.expanduser(start))
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return
    written = start[: len(start) - len(name)]
    for entry in entries:
        if entry.name.startswith(name) and (name or not entry.name.startswith(".")):
            yield f"{written}{entry.name}{'/' if entry.is_dir() else ''}"
