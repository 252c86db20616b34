"""A request as submitted: a frozen value that crosses every boundary unchanged.

`LLM` or the web process creates it once, and `engine.admission` checks it once. After that the
client, the message to the engine process, the engine and `core.request` pass this object along,
and the choices of a request share it. Text stays with the caller; the state of a running request
is in `core.request`.
"""

import msgspec

from octavo.constraints import Sections, Thinking
from octavo.params import SamplingParams

MAX_SALT_LENGTH = 256


class Continuation(msgspec.Struct, frozen=True, array_like=True):
    """How far an interrupted request had come, for the engine that continues it.

    outputs: of each choice, the tokens that its caller has already; None for a choice that has
    ended, which is not run again. Empty if the caller has no token yet.
    """

    outputs: tuple[tuple[int, ...] | None, ...] = ()


class Submission(msgspec.Struct, frozen=True, array_like=True):
    """A request for the engine.

    request_id: unique among the requests in flight. token_ids: the prompt; not empty.
    bad_words: `params.bad_words` as token sequences. arrival_time, deadline: seconds of the
    engine's clock; without an arrival time, a request arrives when the engine queues it. priority:
    lower is earlier. cache_salt: only requests with equal ones share cached blocks. seed: the one
    that the client has drawn for a request without one, so that any engine draws the same tokens.
    continuation: of a request that an engine has accepted before and did not end. grammar: what
    the answer must be, as the front door has checked it (`text.grammar`, `text.answer_form`).
    sections: where only parts of the answer are held to the grammar. thinking: how the model marks
    reasoning; needed with `params.thinking_token_budget`, and not used without.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    arrival_time: float | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    seed: int | None = None
    continuation: Continuation | None = None
    grammar: str | None = None
    sections: Sections | None = None
    thinking: Thinking | None = None
