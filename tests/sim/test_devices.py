"""What is not known of a device, or cannot be, is said in one sentence."""

import pytest

from octavo.errors import ConfigError
from octavo.sim.devices import Rates


@pytest.mark.parametrize("name", ["bandwidth", "flops", "link"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_no_device_has_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0 and finite, not"):
        Rates(**{name: value})
