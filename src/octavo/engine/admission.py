"""The validation of requests: against the model, and against the scheduler's capabilities.

The caller that creates a `Submission` admits it before it is sent to the engine; it is not checked
again. All requests of one call are admitted before the first one is added, so an invalid one costs
nothing. Not checked here: queue limits, which the engine enforces, and the sampling parameters by
themselves, which `SamplingParams` validates when it is created.
"""

from collections.abc import Iterable
from math import inf, isfinite

from octavo.core.plan import RunnerLimits
from octavo.core.submission import MAX_SALT_LENGTH, Continuation, Submission
from octavo.engine.capabilities import EngineCapabilities
from octavo.errors import ContextLengthError, RequestError, RequestTypeError, counted
from octavo.params import SamplingParams

_INT64 = 2**63


def admit(submission: Submission, capabilities: EngineCapabilities) -> Submission:
    """`submission`, if a loaded engine can serve it, or continue it.

    Raises RequestError or RequestTypeError naming the field at fault; ContextLengthError with
    both numbers when the prompt, or the prompt with an explicit `max_tokens`, does not fit.
    """
    limits, params = capabilities.limits, submission.params
    length = len(submission.token_ids)
    if length >= limits.max_model_len:  # before the ids are looked at: there may be millions
        raise ContextLengthError(
            f"the prompt has {counted(length, 'token')}; the model's limit is "
            f"{counted(limits.max_model_len, 'token')}, one of them for the answer",
            "prompt",
            length,
            limits.max_model_len,
        )
    _check_prompt(submission.token_ids, limits)
    _check_params(params, limits)
    if params.thinking_token_budget is not None and submission.thinking is None:
        raise RequestError(
            f"thinking_token_budget is {params.thinking_token_budget}, but this model is not known "
            "to mark its reasoning; leave it out, or name the format (--reasoning-parser)",
            "thinking_token_budget",
        )
    _check_window(length, params, limits)
    _check_priority(submission.priority, capabilities)
    _check_deadline(submission.deadline, capabilities)
    if submission.cache_salt is not None:
        _check_salt(submission.cache_salt)
    if submission.continuation is not None:
        _check_continuation(submission, submission.continuation, limits)
    return submission


def output_limit(submission: Submission, limits: RunnerLimits) -> int:
    """The most tokens that an admitted request may generate."""
    asked = submission.params.max_tokens
    return limits.max_model_len - len(submission.token_ids) if asked is None else asked


def deadline_at(seconds: object, now: float) -> float | None:
    """The deadline `seconds` from `now`, or None."""
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise RequestTypeError(f"deadline must be a number, not {seconds!r:.60}", "deadline")
    if not 0 < seconds < inf:
        raise RequestError(
            f"deadline must be a finite number of seconds above 0, not {seconds!r:.60}", "deadline"
        )
    return now + seconds


def _check_prompt(token_ids: tuple[int, ...], limits: RunnerLimits) -> None:
    if not token_ids:
        raise RequestError("the prompt is empty; it must have at least one token", "prompt")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestTypeError(f"prompt token ids must be integers, not {token!r}", "prompt")
    _check_ids("prompt", token_ids, limits.vocab_size)


def _check_params(params: SamplingParams, limits: RunnerLimits) -> None:
    _check_ids("logit_bias", params.logit_bias or (), limits.vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids or (), limits.vocab_size)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has token id {token}; the vocabulary has ids 0 to {vocab_size - 1}", name
            )


def _check_window(length: int, params: SamplingParams, limits: RunnerLimits) -> None:
    left = limits.max_model_len - length
    if params.max_tokens is not None and params.max_tokens > left:
        raise ContextLengthError(
            f"the prompt has {counted(length, 'token')} and max_tokens is {params.max_tokens}; "
            f"together they exceed the limit of {limits.max_model_len}, so max_tokens may be "
            f"at most {left}",
            "max_tokens",
            length,
            limits.max_model_len,
        )
    if params.min_tokens > left:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must be at most {left}, which is what fits",
            "min_tokens",
        )


def _check_priority(priority: object, capabilities: EngineCapabilities) -> None:
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestTypeError(f"priority must be an integer, not {priority!r:.60}", "priority")
    if not -_INT64 <= priority < _INT64:
        raise RequestError("priority must be a 64-bit signed integer", "priority")
    if priority and not capabilities.heeds_priority:
        raise RequestError(_not_heeded(f"priority is {priority}", capabilities), "priority")


def _check_deadline(deadline: float | None, capabilities: EngineCapabilities) -> None:
    if deadline is None:
        return
    if not isfinite(deadline):
        raise RequestError(f"deadline must be a finite time, not {deadline}", "deadline")
    if not capabilities.heeds_deadline:
        raise RequestError(_not_heeded("a deadline was given", capabilities), "deadline")


def _check_continuation(
    submission: Submission, continuation: Continuation, limits: RunnerLimits
) -> None:
    outputs, params = continuation.outputs, submission.params
    if not outputs:
        return
    if len(outputs) != params.n or all(tokens is None for tokens in outputs):
        raise RequestError(
            f"a continuation of n={params.n} has {params.n} outputs, at least one of them "
            f"unfinished; this one has {len(outputs)}, "
            f"{sum(tokens is not None for tokens in outputs)} of them unfinished",
            "continuation",
        )
    most = output_limit(submission, limits)
    for index, tokens in enumerate(outputs):
        if tokens is None:
            continue
        if not 1 <= len(tokens) <= most or len(submission.token_ids) + len(tokens) > (
            limits.max_model_len
        ):
            raise ContextLengthError(
                f"choice {index} continues after {counted(len(tokens), 'token')}; it may have 1 to "
                f"{most}, and at most {limits.max_model_len} with its prompt",
                "continuation",
            )
        _check_ids("continuation", tokens, limits.vocab_size)


def _not_heeded(what: str, capabilities: EngineCapabilities) -> str:
    return (
        f"{what}, but the scheduler {capabilities.scheduler!r} does not use it; leave it out, or "
        "use another scheduler (scheduler='priority', --scheduler priority)"
    )


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise RequestTypeError(
            f"cache_salt must be a string, not {type(salt).__name__}", "cache_salt"
        )
    if not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise RequestError(
            f"cache_salt must have 1 to {MAX_SALT_LENGTH} characters, not {len(salt)}",
            "cache_salt",
        )
