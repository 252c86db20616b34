"""The scheduling policies, for users: pass one as `LLM(scheduler=...)`, or write your own."""

from octavo.core.policy import FIFOScheduler as FIFOScheduler
from octavo.core.policy import Gains as Gains
from octavo.core.policy import Gauge as Gauge
from octavo.core.policy import Gauged as Gauged
from octavo.core.policy import Load as Load
from octavo.core.policy import Policy as Policy
from octavo.core.policy import PriorityScheduler as PriorityScheduler
from octavo.core.policy import RequestView as RequestView
from octavo.core.policy import Watching as Watching
from octavo.core.policy import create_policy as create_policy
from octavo.core.slo import SLOScheduler as SLOScheduler
from octavo.core.slo import SLOState as SLOState

__all__ = [
    "FIFOScheduler",
    "Gains",
    "Gauge",
    "Gauged",
    "Load",
    "Policy",
    "PriorityScheduler",
    "RequestView",
    "SLOScheduler",
    "SLOState",
    "Watching",
    "create_policy",
]
