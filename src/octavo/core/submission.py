"""One request as it was made: a frozen value that crosses every border unchanged.

`LLM` and the web process make it once, and `engine.admission` checks it once. After that the
client, the message to the engine process, the engine and `core.request` carry this object, and
the choices of a request share it. An attribute of a request is a field here and its reader.
Text stays with the caller; what a request becomes while it runs is in `core.request`.
"""

import msgspec

from octavo.params import SamplingParams

MAX_SALT_LENGTH = 256


class Submission(msgspec.Struct, frozen=True, array_like=True):
    """A request for the engine.

    request_id: unique among the requests in flight. token_ids: the prompt; not empty.
    bad_words: `params.bad_words` as token sequences. arrival_time, deadline: seconds of the
    engine's clock; a request without an arrival time arrives when the engine takes it. priority:
    lower is earlier. cache_salt: only requests with equal ones share cached blocks.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    bad_words: tuple[tuple[int, ...], ...] = ()
    arrival_time: float | None = None
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
