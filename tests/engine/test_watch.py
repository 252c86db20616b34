"""The form of a view: what it never holds, and that JSON keeps it."""

import base64
from typing import Any, get_args

import msgspec
import pytest

from octavo.engine import watch
from octavo.engine.watch import BlockMap, Mark, MarkName, View


def fields_of(kind: Any, seen: set[Any]) -> set[str]:
    """The names of all fields in a type, at any depth."""
    if kind in seen:
        return set()
    seen.add(kind)
    names: set[str] = set()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            names |= {field.name} | fields_of(field.type, seen)
    for part in get_args(kind):
        names |= fields_of(part, seen)
    return names


def test_a_view_has_no_place_for_token_ids_or_texts_of_prompts() -> None:
    names = fields_of(View, set())
    assert {"prompt_tokens", "tables", "flags", "text"} <= names  # `text`: of a change
    assert not names & {"token_ids", "tokens_ids", "prompt", "prompt_ids", "output", "texts"}
    # The only integers of a table are blocks; they are bytes, as are the maps.
    assert msgspec.structs.fields(watch.Table)[-1].type == tuple[bytes, ...]


def test_all_of_it_is_frozen() -> None:
    structs = [one for one in vars(watch).values()
               if isinstance(one, type) and issubclass(one, msgspec.Struct)]  # fmt: skip
    assert len(structs) >= 9
    assert all(one.__struct_config__.frozen for one in structs if one is not msgspec.Struct)
    with pytest.raises(AttributeError):
        Mark("arrived", 1.0).at = 2.0  # type: ignore[misc]


def test_marks_are_short_and_arrays_are_base64_in_json() -> None:
    assert msgspec.json.encode(Mark("arrived", 1.5)) == b'["arrived",1.5,-1]'
    raw = msgspec.json.encode(BlockMap(2, 2, b"\0\0\1\0", b"\0\xff", b"\0\2"))
    assert base64.b64decode(msgspec.json.decode(raw)["owner"]) == b"\0\0\1\0"
    assert "finished" in get_args(MarkName)
