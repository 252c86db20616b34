"""The time of steps on a device that need not be here: from its rates to a `StepCost`.

Not here: how much of a model fits on it (`octavo.planner`), nor which steps there are
(`sim.simulation`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo import hardware
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.hardware import Card
from octavo.planner.plan import Plan
from octavo.sim.cost import LinearCost, StepCost

_GIGA = 10**9
_TERA = 10**12


@dataclass(frozen=True, slots=True)
class Rates:
    """What flags say of a device: bandwidth and link in GB/s, flops in TFLOPS. None: what its
    data sheet says."""

    bandwidth: float | None = None
    flops: float | None = None
    link: float | None = None

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "link"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} must be above 0 and finite, not {value}")


def step_cost(config: EngineConfig, device: str, plan: Plan, rates: Rates) -> StepCost:
    """The cost of steps of `config` on `device`, a card's name or one that `rates` describe.

    Raises ConfigError for what is not known of the device.
    """
    card = _card(device, rates)
    kind = plan.quantization if plan.quantization in card.flops else "bfloat16"
    flops = card.flops.get(kind)
    if card.bandwidth is None or flops is None:
        raise ConfigError(
            f"of {card.name} no rates are known; give --bandwidth in GB/s and --flops in TFLOPS"
        )
    kv_bytes = sum(group.layers * group.bytes_per_token for group in plan.groups)
    return LinearCost(
        step=plan.weight_bytes / card.bandwidth,
        token=2 * plan.parameters / plan.ranks / flops,
        read=kv_bytes / card.bandwidth,
        block=plan.block_bytes / (card.link or card.bandwidth),
    )


def _card(device: str, rates: Rates) -> Card:
    known = Card(device, 0) if device in (hardware.DESCRIBED, "cpu") else hardware.find(device)
    flops: Mapping[str, int] = known.flops
    if rates.flops is not None:
        flops = {kind: int(rates.flops * _TERA) for kind in ("bfloat16", "float16", "float32")}
    return Card(
        known.name,
        known.memory,
        known.bandwidth if rates.bandwidth is None else int(rates.bandwidth * _GIGA),
        flops,
        known.link if rates.link is None else int(rates.link * _GIGA),
        known.capability,
    )
