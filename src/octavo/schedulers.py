"""The public scheduling policies: pass one as `LLM(scheduler=...)`, or write your own.

`Gains` and `Watching` are the former names of `StepLatencies` and `AdaptivePolicy`.
"""

from octavo.core.policy import AdaptivePolicy as AdaptivePolicy
from octavo.core.policy import FIFOScheduler as FIFOScheduler
from octavo.core.policy import Gauge as Gauge
from octavo.core.policy import Gauged as Gauged
from octavo.core.policy import Load as Load
from octavo.core.policy import Policy as Policy
from octavo.core.policy import PriorityScheduler as PriorityScheduler
from octavo.core.policy import RequestView as RequestView
from octavo.core.policy import StepLatencies as StepLatencies
from octavo.core.policy_registry import create_policy as create_policy
from octavo.core.slo import SLOScheduler as SLOScheduler
from octavo.core.slo import SLOState as SLOState

Gains = StepLatencies
Watching = AdaptivePolicy

__all__ = [
    "AdaptivePolicy",
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
    "StepLatencies",
    "Watching",
    "create_policy",
]
