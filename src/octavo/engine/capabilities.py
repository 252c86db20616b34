"""What a loaded engine can do, as one value that may cross a process border."""

import msgspec

from octavo.core.plan import RunnerLimits
from octavo.core.policy import Gauge


class EngineCapabilities(msgspec.Struct, frozen=True):
    """Read once, after the model is loaded.

    scheduler: the policy's name. heeds_priority, heeds_deadline: whether the policy looks at
    what a request says there; if not, a request that says something is refused. gauges: what the
    policy publishes, with the values at the start. explain: what computes each operation.
    """

    limits: RunnerLimits
    scheduler: str = ""
    heeds_priority: bool = True
    heeds_deadline: bool = True
    gauges: tuple[Gauge, ...] = ()
    explain: dict[str, str] = {}
