"""One setting that a config may spell in two ways: both are read, and must agree.

Taking one and dropping the other would change what the model computes without a word.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.errors import CheckpointError, nearest, shown
from octavo.models.fields import Fields

# transformers 5, and 4.
_BLOCKS = ("rope_parameters", "rope_scaling")
# What `models.config` reads of a block; the last two are remarks.
_KNOWN = frozenset({
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate", "short_factor", "long_factor", "partial_rotary_factor", "llama_4_scaling_beta",
    "max_position_embeddings", "finetuned",
})  # fmt: skip
# Keys of other implementations, and the values of them that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_factor": (1,), "extrapolation_factor": (1,), "alpha": (0,),
}  # fmt: skip


def one_of(fields: Fields, *names: str) -> Any:
    """The value of a field of several names. Raises CheckpointError where two differ."""
    given = {name: fields.get(name) for name in names if fields.get(name) is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise _contradict(fields.source, given.items())
    return values[0] if values else None


def agree(source: str, *given: tuple[str, Any]) -> None:
    """Raise CheckpointError where two of (where it stands, value) differ; None is absent."""
    there = [(name, value) for name, value in given if value is not None]
    if any(value != there[0][1] for _, value in there):
        raise _contradict(source, there)


def rope_block(fields: Fields) -> Mapping[str, Any]:
    """`rope_parameters` and `rope_scaling` as one block, its parts (`full_attention`, ...) alike.

    "type" is "rope_type", null is absent; without either block, the family's own.
    """
    blocks = {name: fields.given(name) for name in _BLOCKS if fields.given(name)}
    if not blocks:
        return fields.get(_BLOCKS[0]) or {}
    for name, block in blocks.items():
        if not isinstance(block, Mapping):
            raise fields.wrong(name, block, "an object")
    return _merged(fields.source, blocks)


def check_rope_keys(rope: Fields, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a key of a scaled block that is not understood."""
    for name, value in values.items():
        if name in _KNOWN or value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name in _NEUTRAL:
            raise rope.wrong(name, value, " or ".join(map(str, _NEUTRAL[name])) + " or absent")
        raise CheckpointError(
            f"{rope.source}: {shown(name)} ({shown(value)}) is not known"
            f"{nearest(name, _KNOWN)}; it may change the positions, so the config is refused"
        )


def _merged(source: str, blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Blocks, by where they stand, as one; nested ones likewise."""
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, block in blocks.items():
        for name, value in block.items():
            key = "rope_type" if name == "type" else name
            if value is None or isinstance(value, Mapping):
                continue
            if key in found and found[key] != value:
                raise _contradict(source, [(places[key], found[key]), (f"{place}.{name}", value)])
            found[key], places[key] = value, f"{place}.{name}"
    nested = dict.fromkeys(
        name for block in blocks.values() for name, value in block.items()
        if isinstance(value, Mapping)
    )  # fmt: skip
    for name in nested:
        parts = {f"{place}.{name}": block[name] for place, block in blocks.items() if name in block}
        found[name] = _merged(source, {at: part for at, part in parts.items() if part is not None})
    return found


def _contradict(source: str, given: Iterable[tuple[str, Any]]) -> CheckpointError:
    listed = " and ".join(f"{name} = {shown(value)}" for name, value in given)
    return CheckpointError(f"{source}: {listed} contradict each other; keep the right one")
