"""The scheduling policies, for users: pass one as `LLM(scheduler=...)`, or write your own."""

from octavo.core.policy import FIFOScheduler as FIFOScheduler
from octavo.core.policy import Load as Load
from octavo.core.policy import Policy as Policy
from octavo.core.policy import create_policy as create_policy

__all__ = ["FIFOScheduler", "Load", "Policy", "create_policy"]
