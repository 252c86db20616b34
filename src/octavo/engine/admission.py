"""The checks of a request that need the model: done once, before the engine hears of it.

Both faces (`llm` and the server) call `admit` for every request of a batch before they add the
first one, so a bad request costs nothing and loses nothing.
"""

from collections.abc import Iterable, Sequence

from octavo.core.plan import RunnerLimits
from octavo.errors import ContextLengthError, RequestError, RequestTypeError
from octavo.params import SamplingParams


def admit(prompt_ids: Sequence[int], params: SamplingParams, limits: RunnerLimits) -> int:
    """The number of tokens that the request may generate.

    Raises RequestError (empty prompt, ids outside the vocabulary), or ContextLengthError with
    both numbers when the prompt, or the prompt with an explicit `max_tokens`, does not fit.
    """
    room = limits.max_model_len - len(prompt_ids)
    if room < 1:  # before anything is looked at one by one: there may be millions
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens; the model's limit is "
            f"{limits.max_model_len} tokens, one of them for the answer",
            "prompt",
        )
    _check_prompt(prompt_ids, limits)
    _check_params(params, limits)
    if params.max_tokens is not None and params.max_tokens > room:
        raise ContextLengthError(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {params.max_tokens}; "
            f"together they exceed the limit of {limits.max_model_len}, so max_tokens may be "
            f"at most {room}",
            "max_tokens",
        )
    if params.min_tokens > room:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must be at most the {room} tokens that fit",
            "min_tokens",
        )
    return params.max_tokens if params.max_tokens is not None else room


def _check_prompt(prompt_ids: Sequence[int], limits: RunnerLimits) -> None:
    if not prompt_ids:
        raise RequestError("the prompt is empty; it must have at least one token", "prompt")
    for token in prompt_ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestTypeError(f"prompt token ids must be integers, not {token!r}", "prompt")
    _check_ids("prompt", prompt_ids, limits.vocab_size)


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
