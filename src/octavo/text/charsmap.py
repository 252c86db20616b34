"""Check a SentencePiece `precompiled_charsmap` before a library believes it.

The bytes are: the size of a trie (u32), the trie (a double array of u32 units, as darts-clone
writes it), and the replacement texts, each ended by a NUL. `tokenizers` allocates whatever size is
claimed, which ends the process, and follows the units without a look at where they lead.
"""

import base64
import binascii
import json
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError


def check_charsmap(data: bytes, source: str) -> None:
    """Raise CheckpointError for a map whose trie or texts are not whole."""
    if len(data) < 8:
        raise CheckpointError(f"{source}: precompiled_charsmap has {len(data)} bytes, not even 8")
    (size,) = struct.unpack_from("<I", data)
    if size < 4 or size % 4 or size > len(data) - 4:
        raise CheckpointError(
            f"{source}: the trie of precompiled_charsmap claims {size} bytes of {len(data)}"
        )
    units = array("I", data[4 : 4 + size])
    if sys.byteorder == "big":
        units.byteswap()
    text = data[4 + size :]
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source}: the texts of precompiled_charsmap: {error}") from error
    for number, unit in enumerate(units):
        if number and unit >> 31:  # the value of a leaf, which is read from its parent
            continue
        target = number ^ ((unit >> 10) << ((unit & 512) >> 6))
        fine = target | 255 < len(units)
        if fine and unit & 256:
            at = units[target] & 0x7FFFFFFF
            fine = at < len(text) and text[at] & 0xC0 != 0x80
        if not fine:
            raise CheckpointError(f"{source}: unit {number} of precompiled_charsmap leads outside")


def check_tokenizer_json(file: Path) -> None:
    """Check each map in a `tokenizer.json`. Raises CheckpointError; JSON that cannot be read is
    left to the library."""
    text = file.read_bytes()
    if b"precompiled_charsmap" not in text:
        return
    try:
        normalizer = json.loads(text).get("normalizer")
    except (ValueError, RecursionError, AttributeError):
        return
    for found in _maps(normalizer):
        try:
            data = base64.b64decode(found, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: precompiled_charsmap: {error}") from error
        check_charsmap(data, str(file))


def _maps(value: Any) -> list[Any]:
    """What is called `precompiled_charsmap` anywhere in a normalizer."""
    if isinstance(value, list):
        return [found for item in value for found in _maps(item)]
    if not isinstance(value, dict):
        return []
    own = [value["precompiled_charsmap"]] if value.get("precompiled_charsmap") is not None else []
    return own + [found for item in value.values() for found in _maps(item)]
