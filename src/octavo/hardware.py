"""Devices that need not be here: what a planner or a simulator has to know of a card.

Facts of the vendors' data sheets, and the memory that a driver reports, which is less than the
name says. Rates are peaks that no program reaches; what is reached of them is up to whoever uses
them. Not here: what a device of this machine has, which `runner.device` measures.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from octavo.config import parse_size
from octavo.errors import ConfigError, nearest, shown

DESCRIBED = "described"  # the device of which the flags say all
_GIGA = 10**9
_TERA = 10**12


@dataclass(frozen=True, slots=True)
class Card:
    """One device with memory of its own.

    memory: bytes, as the driver reports them; bandwidth: of it, bytes a second. flops: operations
    a second by type of operand, sums in 32 bits, without sparsity; link: bytes a second to another
    card of the same machine, each way; host: to the host's memory, each way. capability: CUDA's
    compute capability. None: not known.
    """

    name: str
    memory: int
    bandwidth: int | None = None
    flops: Mapping[str, int] = field(default_factory=dict)
    link: int | None = None
    host: int | None = None
    capability: tuple[int, int] = (8, 0)


_PCIE4, _PCIE5 = 32.0, 64.0  # GB/s each way, 16 lanes


def _card(
    name: str,
    mib: int,
    bandwidth: float,
    link: float,
    capability: tuple[int, int],
    *,
    bfloat16: float,
    int8: float,
    fp8: float | None = None,
    host: float = _PCIE4,
) -> Card:
    """bandwidth, link, host: GB/s; types: TFLOPS or TOPS."""
    rates = {"bfloat16": bfloat16, "float16": bfloat16, "int8": int8}
    if fp8 is not None:
        rates["fp8"] = fp8
    flops = {kind: int(rate * _TERA) for kind, rate in rates.items()}
    return Card(name, mib << 20, int(bandwidth * _GIGA), MappingProxyType(flops),
                int(link * _GIGA), int(host * _GIGA), capability)  # fmt: skip


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        card.name: card
        for card in (
            _card("a10g", 22_723, 600, _PCIE4, (8, 6), bfloat16=70, int8=140),
            _card("a100-40gb", 40_442, 1555, 300, (8, 0), bfloat16=312, int8=624),
            _card("a100-80gb", 81_038, 2039, 300, (8, 0), bfloat16=312, int8=624),
            _card("rtx-a6000", 48_670, 768, _PCIE4, (8, 6), bfloat16=154.8, int8=309.7),
            _card("rtx-3090", 24_253, 936, _PCIE4, (8, 6), bfloat16=71, int8=284),
            _card("l4", 22_563, 300, _PCIE4, (8, 9), bfloat16=121, int8=242, fp8=242),
            _card("l40s", 45_589, 864, _PCIE4, (8, 9), bfloat16=362, int8=733, fp8=733),
            _card("rtx-4090", 24_210, 1008, _PCIE4, (8, 9), bfloat16=165.2, int8=660.6, fp8=330.3),
            _card(
                "h100-80gb",
                81_008,
                3350,
                450,
                (9, 0),
                bfloat16=989,
                int8=1979,
                fp8=1979,
                host=_PCIE5,
            ),
            _card(
                "h200", 143_156, 4800, 450, (9, 0), bfloat16=989, int8=1979, fp8=1979, host=_PCIE5
            ),
            _card(
                "b200", 182_632, 8000, 900, (10, 0), bfloat16=2250, int8=4500, fp8=4500, host=_PCIE5
            ),
            _card(
                "rtx-5090",
                32_111,
                1792,
                _PCIE5,
                (12, 0),
                bfloat16=209.5,
                int8=838,
                fp8=419,
                host=_PCIE5,
            ),
        )
    }
)
# Other spellings that people use.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {"a100": "a100-80gb", "h100": "h100-80gb", "4090": "rtx-4090", "3090": "rtx-3090",
     "5090": "rtx-5090", "a6000": "rtx-a6000"}
)  # fmt: skip


def find(name: str) -> Card:
    """The card of that name, however it is spelled. Raises ConfigError, listing the known ones."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    plain = plain.removeprefix("nvidia-").removeprefix("geforce-")
    plain = _ALIASES.get(plain, plain)
    if plain not in CARDS:
        raise ConfigError(
            f"unknown card {shown(name)}{nearest(plain, CARDS)}; known: {', '.join(CARDS)}, and "
            f"{DESCRIBED!r} for one that flags describe"
        )
    return CARDS[plain]


def memory_size(text: str) -> int:
    """Bytes of a device's memory, such as 40GiB. Raises ConfigError for none."""
    size = parse_size("memory", text)
    if size <= 0:
        raise ConfigError(f"memory is {shown(text)}; a device has some, such as 40GiB")
    return size
