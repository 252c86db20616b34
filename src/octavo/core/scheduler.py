"""The scheduler. (Signatures; being filled in.)"""

import msgspec

from octavo.core.kv_manager import KVManager
from octavo.core.plan import StepPlan, StepResult, TokenLogprobs
from octavo.core.policy import Policy
from octavo.core.request import Request
from octavo.outputs import FinishReason


class Update(msgspec.Struct, frozen=True, gc=False):
    """What one choice gained in a step.

    prompt_logprobs: complete, once, with the first update of choice 0 (one entry for each
    prompt token after the first); None otherwise.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class Scheduler:
    def __init__(
        self,
        kv: KVManager,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        raise NotImplementedError

    def add(self, request: Request) -> None:
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        raise NotImplementedError

    def finish_choice(self, request_id: str, index: int, reason: FinishReason) -> None:
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan:
        raise NotImplementedError

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Update]:
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError
