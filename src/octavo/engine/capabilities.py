"""What a loaded engine can do, as one value that may cross a process boundary."""

import msgspec

from octavo.core.plan import RunnerLimits
from octavo.core.policy import Gauge


class EngineCapabilities(msgspec.Struct, frozen=True):
    """Read once, after the model is loaded.

    scheduler: the policy's name. heeds_priority, heeds_deadline: whether the policy uses these
    fields of a request; if not, a request that sets one is rejected. gauges: those of the policy,
    with their initial values. explain: what implements each operation.
    """

    limits: RunnerLimits
    scheduler: str = ""
    heeds_priority: bool = True
    heeds_deadline: bool = True
    gauges: tuple[Gauge, ...] = ()
    explain: dict[str, str] = {}
