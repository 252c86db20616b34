"""From the name of a device to the cost of its steps; what is not known is said in one sentence."""

from dataclasses import replace

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.planner.plan import Plan, make_plan
from octavo.planner.target import target
from octavo.sim import devices
from octavo.sim.calibrated import Calibration, Terms
from octavo.sim.cost import StepShape
from octavo.sim.devices import Rates, step_cost


@pytest.mark.parametrize("name", ["bandwidth", "flops", "link"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_no_device_has_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0, and at most"):
        Rates(**{name: value})


@pytest.fixture
def smollm2() -> tuple[EngineConfig, Plan]:
    config = EngineConfig(model="smollm2-135m", device="cpu")
    return config, make_plan(config, target(config, "cpu", 2**34))


def calibration(plan: Plan, **changes: str) -> Calibration:
    terms = Terms(0.01, 0.0, (1e-4,) * 5, 1e-3, (1e-5,) * 3, 1e-6, 1e-7, 1e-7)
    made = Calibration(plan.model, plan.dtype, plan.kv_cache_dtype, "cpu", terms, 0.0, 0.0)
    return replace(made, **changes)


def test_a_processor_is_measured_once(tmp_path, monkeypatch, smollm2):
    made, path = [], tmp_path / "calibration.json"
    monkeypatch.setattr(
        devices, "calibrate", lambda config: made.append(1) or calibration(smollm2[1])
    )
    first = step_cost(smollm2[0], "cpu", smollm2[1], calibration=path)
    again = step_cost(smollm2[0], "cpu", smollm2[1], calibration=path)
    shape = StepShape(8, 8, 800, 0, 0, 8, True, 0)
    assert first.seconds(shape) == again.seconds(shape) > 0.01
    assert len(made) == 1
    assert step_cost(smollm2[0], "cpu", smollm2[1]).seconds(shape) == first.seconds(shape)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("quantization", "int4"), ("threads", 1), ("tensor_parallel_size", 3)]
)
def test_a_calibration_with_other_settings(tmp_path, monkeypatch, smollm2, name, value):
    path = tmp_path / "calibration.json"
    config, plan = smollm2
    monkeypatch.setattr(devices, "calibrate", lambda config: calibration(plan))
    step_cost(config, "cpu", plan, calibration=path)
    wrong = rf"was measured with {name}={getattr(config, name)}, and {name}={value} is to be"
    with pytest.raises(ConfigError, match=wrong):
        step_cost(replace(config, **{name: value}), "cpu", plan, calibration=path)


def test_a_calibration_of_something_else(tmp_path, smollm2):
    path = tmp_path / "calibration.json"
    calibration(smollm2[1], model="gemma3").save(path)
    with pytest.raises(ConfigError, match="has model gemma3, and smollm2-135m is to be simulated"):
        step_cost(smollm2[0], "cpu", smollm2[1], calibration=path)
    with pytest.raises(ConfigError, match=r"is for this machine's processor .* not for a100-40gb"):
        step_cost(smollm2[0], "a100-40gb", smollm2[1], calibration=path)
