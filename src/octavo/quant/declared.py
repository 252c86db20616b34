"""Where a checkpoint says how it is quantized: every file and spelling that quantizers have used.

config.json has `quantization_config`; AutoGPTQ and GPTQModel also write `quantize_config.json`, and
AutoAWQ wrote `quant_config.json` before it wrote the first. All that are there are read as one and
must agree.
"""

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError, shown

FIELD = "quantization_config"
# File -> the method that it means, unless it says so itself.
FILES: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
PLACES = f"config.json ({FIELD}), {', '.join(FILES)}"
_OLD_NAMES = {"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size",
              "groupsize": "group_size", "format": "checkpoint_format",
              "method": "quant_method"}  # fmt: skip
# What says what the stored tensors mean; other fields say how they were made.
_MEANING = ("quant_method", "bits", "group_size", "desc_act", "zero_point", "version",
            "checkpoint_format", "sym")  # fmt: skip


def declared(source: str, config: Any, files: Mapping[str, Mapping[str, Any]]) -> Any:
    """One set of fields in today's names, or None where nothing says that anything is quantized.

    source: the path of config.json; config: its `quantization_config`; files: the content of those
    of `FILES` that are there. Raises CheckpointError where two contradict each other.
    """
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    if config is not None and not isinstance(config, Mapping):
        return config  # refused where it is described
    blocks: dict[str, tuple[Mapping[str, Any], str | None]] = {}
    if config is not None:
        blocks[f"{source}: {FIELD}"] = (config, None)
    blocks |= {name: (values, FILES[name]) for name, values in files.items()}
    for place, (values, method) in blocks.items():
        fields = _named_as_today(place, values)
        if method is not None and "quant_method" not in found:
            fields.setdefault("quant_method", method)
        for name, value in fields.items():
            if name in _MEANING and name in found and found[name] != value:
                raise CheckpointError(
                    f"{places[name]}.{name} is {shown(found[name])}, but {place} ({source}) says "
                    f"{shown(value)}; keep the right one"
                )
            found.setdefault(name, value)
            places.setdefault(name, place)
    if found.get("quant_method") == "awq" and "checkpoint_format" in found:  # GPTQModel's name
        form = found.pop("checkpoint_format")
        if found.setdefault("version", form) != form:
            raise CheckpointError(
                f"{source}: version is {found['version']!r}, but checkpoint_format {form!r}"
            )
    return found if blocks else None


def _named_as_today(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in values.items():
        name = _OLD_NAMES.get(name, name)
        if name in ("version", "quant_method", "checkpoint_format") and isinstance(value, str):
            value = value.lower()
        if value is None:
            continue
        if name in fields and fields[name] != value:
            raise CheckpointError(
                f"{place}: {name} is there twice: {shown(fields[name])}, {shown(value)}"
            )
        fields[name] = value
    return fields
