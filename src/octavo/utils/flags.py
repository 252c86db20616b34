"""Flags of a command line, generated from the fields of a configuration, and vLLM's beside them.

Not here: how command lines are spelled and read (`utils.argparse_utils`), and which command has
which flags (`cli.arguments`, `server.options`).
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Any

from octavo import vllm_names
from octavo.config import check_type, kinds_of, parse_size
from octavo.errors import ConfigError
from octavo.vllm_names import Form, Kind, Status


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_flags(
    parser: argparse._ActionsContainer,
    cls: type,
    skip: tuple[str, ...] = (),
    with_defaults: bool = False,
) -> None:
    """Give `parser` one flag for each field of `cls`.

    Flags left out leave no attribute, or with `with_defaults` that of the field.
    """
    short = {name: flag for flag, name in vllm_names.SHORT_FLAGS.items()}
    for item in fields(cls):
        if item.name in skip:
            continue
        names = [short[item.name]] if item.name in short else []
        parser.add_argument(
            *names,
            flag_name(item.name),
            dest=item.name,
            default=item.default if with_defaults else argparse.SUPPRESS,
            help=f"{item.metadata['help']} (default: {item.default})",
            **_form(item),
        )


def add_vllm_flags(
    parser: argparse._ActionsContainer, cls: type, kinds: tuple[Kind, ...] = (Kind.ENGINE,)
) -> None:
    """Give `parser` vLLM's flags that are no fields of `cls`, hidden from its help.

    Their values are for `in_our_names`, which takes or refuses them.
    """
    ours = {item.name: item for item in fields(cls)}
    short = {name: flag for flag, name in vllm_names.SHORT_FLAGS.items()}
    for entry in (entry for kind in kinds for entry in vllm_names.entries(kind)):
        flag = flag_name(entry.name)
        if flag in parser._option_string_actions or entry.status is Status.SUPPORTED:
            continue
        if entry.ours in ours:
            form = _form(ours[entry.ours])
        else:
            form = dict(_FORMS[entry.form])
        names = [short[entry.name]] if entry.name in short else []
        parser.add_argument(
            *names,
            flag,
            dest=entry.name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **form,
        )


def _json(text: str) -> Any:
    """What a word of a command line means: JSON where it is, else itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class _Spread(argparse.Action):
    """Several values, separated by spaces or as a JSON list, as a list."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, _spread(values))


def _spread(words: list[str]) -> list[Any]:
    """The values of a list flag; a word may be a JSON list of them."""
    found: list[Any] = []
    for word in words:
        value = _json(word) if word.startswith("[") else word
        found += value if isinstance(value, list) else [value]
    return found


_FORMS: Mapping[Form, Mapping[str, Any]] = MappingProxyType(
    {
        Form.FLAG: {"action": argparse.BooleanOptionalAction},
        Form.VALUE: {"type": _json, "nargs": "?", "const": True},
        Form.LIST: {"action": _Spread, "nargs": "*"},
    }
)


def _form(item: "Field[Any]") -> dict[str, Any]:
    """The keywords of add_argument for a field."""
    kinds, choices, _ = kinds_of(item)
    if kinds == (bool,):
        return {"action": argparse.BooleanOptionalAction}
    if choices:
        return {"type": _converter(item), "metavar": "{" + ",".join(choices) + "}"}
    if item.metadata.get("size"):
        return {"type": _converter(item), "metavar": "SIZE"}
    return {"type": kinds[0], "metavar": kinds[0].__name__.upper()}


def _converter(item: "Field[Any]") -> Callable[[str], Any]:
    """Reads a flag's value as the field, or a spelling that vLLM has for one."""
    entry = vllm_names.find(Kind.ENGINE, item.name)
    theirs = [value for value, _ in entry.meaning] + list(entry.neutral) if entry else []

    def convert(text: str) -> Any:
        for value in theirs:
            if value is not None and text == str(value):
                return value
        try:
            value = parse_size(item.name, text) if item.metadata.get("size") else text
            check_type(item, value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return convert
