"""Simulated requests: what arrives when, and how it looks to the scheduler.

Prompts are token ids that share exactly what they are said to share; every drawn token is the
same, since what an answer says changes nothing here but its length.
"""

from functools import lru_cache
from typing import NamedTuple

from octavo.core.plan import SampleSpec
from octavo.core.request import Request
from octavo.core.submission import Submission
from octavo.params import SamplingParams

DRAWN = 0  # the id of every drawn token, and of prompts where it tells nothing
_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
# Nothing looks into a spec here, so that all requests have the same one.
_SPECS = (SampleSpec(_PARAMS, 0, 0, 0),)


class Job(NamedTuple):
    """One request. arrival: seconds from the start. group: requests of the same one, other than 0,
    have their first `shared` prompt tokens in common."""

    arrival: float
    prompt_len: int
    output_len: int
    priority: int = 0
    group: int = 0
    shared: int = 0


class SimulatedRequest(Request):
    """A request of the scheduler, and when it gained its tokens.

    first_at, gained_at: when it gained its first token, and its last one so far. shared_len: how
    much of its prompt others have, too.
    """

    __slots__ = ("first_at", "gained_at", "shared_len")

    def __init__(self, number: int, job: Job, arrival: float) -> None:
        submission = Submission(
            str(number), _prompt(number, job), _PARAMS, arrival_time=arrival, priority=job.priority
        )
        super().__init__(submission, seed=0, max_tokens=job.output_len, arrival_time=arrival)
        self.first_at = self.gained_at = -1.0
        self.shared_len = _shared_len(job)

    def sample_specs(self, drafts: tuple[int, ...] = ()) -> tuple[SampleSpec, ...]:
        """See Request."""
        return _SPECS

    def next_spec(self) -> SampleSpec:
        """See Request."""
        return _SPECS[0]


def _prompt(number: int, job: Job) -> tuple[int, ...]:
    """Positive ids begin what is a request's own, negative ones what a group shares.

    At least the last token is its own: no two requests have the same answer.
    """
    shared = _shared_len(job)
    own = (number + 1, *(DRAWN,) * (job.prompt_len - shared - 1))
    return _prefix(job.group, shared) + own if shared else own


def _shared_len(job: Job) -> int:
    return min(job.shared, job.prompt_len - 1) if job.group else 0


@lru_cache(maxsize=1024)
def _prefix(group: int, length: int) -> tuple[int, ...]:
    return (-group, *(DRAWN,) * (length - 1))
