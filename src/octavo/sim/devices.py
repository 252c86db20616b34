"""The time of steps of a configuration on a device: from its name, or its rates, to a `StepCost`.

Not here: how much of a model fits on it (`octavo.planner`), which steps there are
(`sim.simulation`), nor the models themselves (`sim.roofline`, `sim.calibrated`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octavo import hardware
from octavo.attention.registry import dtype_name
from octavo.config import EngineConfig
from octavo.dist.base import Single
from octavo.errors import ConfigError
from octavo.hardware import Card
from octavo.models.description import describe_alone
from octavo.models.loader import outline
from octavo.planner.plan import Plan
from octavo.planner.target import CardDevice
from octavo.runner.model_runner import resolve_dtype
from octavo.sim.calibrated import CalibratedCost, Calibration
from octavo.sim.calibration import calibrate
from octavo.sim.cost import StepCost
from octavo.sim.roofline import Reached, RooflineCost, model_of

_GIGA = 10**9
_TERA = 10**12
# What the time of a step on this machine's processor depends on, beside the model and its types.
SETTINGS = ("threads", "quantization", "quantization_override", "attention_impl",
            "tensor_parallel_size", "block_size")  # fmt: skip
_MOST = 1e9  # GB/s or TFLOPS: a thousand times what all cards of the largest machine have


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
            if value is not None and not 0 < value <= _MOST:
                raise ConfigError(f"{name} must be above 0, and at most {_MOST:g}, not {value}")


_NO_RATES = Rates()


def step_cost(
    config: EngineConfig,
    device: str,
    plan: Plan,
    rates: Rates = _NO_RATES,
    calibration: Path | None = None,
) -> StepCost:
    """The cost of steps of `config` on `device`: this machine's processor ("cpu"), a card by its
    name, or one that `rates` describe.

    calibration: of this machine, as it was saved; a file that is not there yet is written. Without
    one the processor is measured now, unless `rates` are given. Raises ConfigError for what is not
    known of the device.
    """
    if device == "cpu" and rates == _NO_RATES:
        found = calibrated(config, plan, calibration)
        return CalibratedCost(found.terms)
    if calibration is not None:
        raise ConfigError(
            f"calibration {calibration} is for this machine's processor (--device cpu, without "
            f"rates), not for {device}"
        )
    return roofline(config, _card(device, rates), plan)


def calibrated(config: EngineConfig, plan: Plan, path: Path | None = None) -> Calibration:
    """Of this machine's processor: from `path`, or measured now, which takes some ten seconds, and
    saved there. Raises ConfigError for a file of another model, or of other settings."""
    settings = {name: getattr(config, name) for name in SETTINGS}
    if path is None or not path.exists():
        found = replace(calibrate(config), settings=settings)
        if path is not None:
            found.save(path)
        return found
    found = Calibration.load(path)
    for name, wanted in (
        ("model", Path(plan.model).name),
        ("dtype", plan.dtype),
        ("kv_cache_dtype", plan.kv_cache_dtype),
    ):
        if getattr(found, name) != wanted:
            raise ConfigError(
                f"calibration {path} has {name} {getattr(found, name)}, and {wanted} is to be "
                "simulated; leave it out to measure again"
            )
    for name, given in settings.items():
        if (measured := found.settings.get(name)) != given:
            raise ConfigError(
                f"calibration {path} was measured with {name}={measured}, and {name}={given} is to "
                "be simulated; leave it out to measure again, or name another file"
            )
    return found


def roofline(
    config: EngineConfig, card: Card, plan: Plan, reached: Reached | None = None
) -> RooflineCost:
    """The cost of steps on a card. Raises ConfigError as `RooflineCost`."""
    on = CardDevice(config.graph_sizes)
    dtype = resolve_dtype(config.dtype, on)
    group = Single(0, config.tensor_parallel_size)
    found = outline(describe_alone(config), config, on, dtype, group)
    # A group with fewer layers than the largest leaves part of its blocks unused.
    token_bytes = plan.groups[0].bytes_per_token / max(each.layers for each in plan.groups)
    # Weights of fewer bits are expanded: products are computed in `dtype`.
    return RooflineCost(
        model_of(found, token_bytes, plan.block_bytes),
        card,
        () if config.enforce_eager else on.capture_sizes(config.max_num_batched_tokens),
        kind=dtype_name(dtype),
        ahead=config.async_scheduling is not False,
        reached=reached,
    )


def _card(device: str, rates: Rates) -> Card:
    known = Card(device, 0) if device in (hardware.DESCRIBED, "cpu") else hardware.find(device)
    flops: Mapping[str, int] = known.flops
    if rates.flops is not None:
        flops = dict.fromkeys(("bfloat16", "float16", "float32"), int(rates.flops * _TERA))
    return replace(
        known,
        bandwidth=known.bandwidth if rates.bandwidth is None else int(rates.bandwidth * _GIGA),
        flops=flops,
        link=known.link if rates.link is None else int(rates.link * _GIGA),
    )
