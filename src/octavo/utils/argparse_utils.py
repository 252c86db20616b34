"""Command lines as vLLM's users write them: underscores, `--disable-x`, and a YAML file of flags.

Not here: which flags there are (`utils.flags`, `cli.arguments`).
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, brief, nearest

_MAX_PARTS = 10_000  # of a value in a file of flags


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's parser, for which `--max_model_len` is `--max-model-len`, `--disable-x` is
    `--no-enable-x`, and `--config FILE` stands for the flags in FILE.

    The file is YAML: `max-model-len: 4096`, `enable-prefix-caching: false`, `served-model-name:
    [a, b]`. What the command line itself says goes first. Raises ConfigError for a file that
    cannot be read, and for a name in it that is no flag.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self.words(words), namespace)

    def words(self, argv: Sequence[str]) -> list[str]:
        """The command line with each flag spelled as it was declared, and files replaced."""
        found: list[str] = []
        from_files: list[str] = []
        rest = iter(argv)
        for word in rest:
            if word == "--" or (self._passes_on() and not word.startswith("-")):
                found += [word, *rest]
                break
            if not word.startswith("--"):
                found.append(word)
                continue
            name, equals, value = word.partition("=")
            name = self._declared(name)
            if name == "--config" and self._reads_files():
                from_files += self._file(value if equals else next(rest, ""))
            else:
                found.append(f"{name}{equals}{value}")
        given = {_bare(word) for word in found if word.startswith("--")}
        return [*(word for word in from_files if _bare(word) not in given), *found]

    def flags(self) -> list[str]:
        """Every long flag that the help shows."""
        shown = (action for action in self._actions if action.help != argparse.SUPPRESS)
        names = (name for action in shown for name in action.option_strings)
        return [name for name in names if name.startswith("--")]

    def knows(self, flag: str) -> bool:
        return flag in self._option_string_actions

    def _passes_on(self) -> bool:
        """Whether the rest of the line belongs to another program."""
        return any(action.nargs == argparse.REMAINDER for action in self._actions)

    def _reads_files(self) -> bool:
        return isinstance(self._option_string_actions.get("--config"), FileOfFlags)

    def _declared(self, name: str) -> str:
        if self.knows(name):
            return name
        dashed = name.replace("_", "-")
        opposite = dashed.replace("--disable-", "--no-enable-", 1)
        return opposite if not self.knows(dashed) and self.knows(opposite) else dashed

    def _file(self, name: str) -> Iterator[str]:
        for key, value in read_flags(name).items():
            flag = self._declared(f"--{key}")
            if flag in ("--model", "--model-tag") and self.knows("--model-of-file"):
                flag = "--model-of-file"  # so that the command line may name another
            if flag == "--config":
                raise ConfigError(f"{name}: a file of flags cannot name another with {key!r}")
            if not self.knows(flag):
                hint = nearest(flag, self.flags()).replace("--", "")
                raise ConfigError(f"{name}: unknown option {key!r}{hint}")
            if isinstance(value, bool):
                yield flag if value else self._declared(f"--no-{flag[2:]}")
            elif isinstance(value, list) and self._option_string_actions[flag].nargs == "+":
                yield from (f"{flag}={item}" for item in value)
            elif value is not None:
                yield f"{flag}={_text(value)}"


def _bare(word: str) -> str:
    """The name of a flag without its value, its dashes, and `no-`."""
    return word.partition("=")[0].removeprefix("--").removeprefix("no-")


class FileOfFlags(argparse.Action):
    """`--config FILE`: in the help only; `FlexibleArgumentParser.words` replaces it."""

    def __call__(self, *_: Any) -> None:
        """Never called."""


def add_config_flag(parser: argparse._ActionsContainer) -> None:
    """Let `parser`, a FlexibleArgumentParser, take `--config FILE`."""
    parser.add_argument(
        "--config",
        action=FileOfFlags,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="YAML file of flags (max-model-len: 4096); flags of the command line win",
    )


def read_flags(name: str) -> dict[str, Any]:
    """The flags in a YAML file. Raises ConfigError for what is no such file."""
    import yaml  # here, since most command lines have no file

    if not name:
        raise ConfigError("--config needs the name of a YAML file")
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        found = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {name}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {name}: {brief(error)}") from None
    except RecursionError:
        raise ConfigError(f"--config {name}: nested too deeply") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"--config {name} must hold lines such as 'max-model-len: 4096'")
    given: set[str] = set()
    for node, _ in root.value:  # of two, YAML would take the last
        if (key := _bare(str(node.value)).replace("_", "-")) in given:
            raise ConfigError(f"--config {name}: {node.value!r} is given twice")
        given.add(key)
    for key, value in found.items():
        if not _is_small(value):
            raise ConfigError(f"--config {name}: the value of {key!r} is too large for a flag")
    return found


def _text(value: object) -> str:
    """A value as it stands on a command line."""
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except TypeError:  # a date, for one
        return str(value)


def _is_small(value: object) -> bool:
    """Whether a value has few parts, of which YAML's aliases can make billions, or a circle."""
    parts = [value]
    for _ in range(_MAX_PARTS):
        if not parts:
            return True
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return False
