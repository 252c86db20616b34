"""What a `SampleSpec` changes of a row of logits, as edits of single tokens.

For devices that change rows themselves (`kernels.sampling.EditsLogits`): the values are those that
`runner.sampler` computes on rows in host memory, to the bit.
"""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import SampleSpec
from octavo.kernels.sampling import EDIT, Items

_Ids = NDArray[np.int64]


def edits(spec: SampleSpec, vocab_size: int) -> Items:
    """The edits of one row, by rising id; where ids are allowed, one for each of these.

    Raises IndexError for an id outside the vocabulary.
    """
    params = spec.params
    masked = [word[-1] for word in spec.bad_words if _ends_with(spec.output_ids, word[:-1])]
    if spec.min_tokens_left > 0:
        masked += spec.stop_ids
    counts: Counter[int] = Counter()
    if params.frequency_penalty or params.presence_penalty:
        counts.update(spec.output_ids)
    seen = (*spec.prompt_ids, *spec.output_ids) if params.repetition_penalty != 1.0 else ()
    allowed = params.allowed_token_ids
    kinds = (masked, params.logit_bias or (), counts, seen, allowed or ())
    hidden, biased, counted, repeated, kept = (np.fromiter(ids, np.int64) for ids in kinds)
    ids = np.unique(np.concatenate((hidden, biased, counted, repeated, kept)))
    if ids.size and not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise IndexError
    made = np.zeros(ids.size, EDIT)
    made["place"], made["repetition"] = ids, 1.0
    made["repetition"][np.searchsorted(ids, repeated)] = params.repetition_penalty
    made["repetition"][np.searchsorted(ids, hidden)] = 0.0
    made["bias"][np.searchsorted(ids, biased)] = [*(params.logit_bias or {}).values()]
    times = np.fromiter(counts.values(), np.float32, len(counts))
    amounts = params.frequency_penalty * times + params.presence_penalty
    made["amount"][np.searchsorted(ids, counted)] = amounts
    return made if allowed is None else made[np.isin(ids, kept)]


def _ends_with(output_ids: tuple[int, ...], word: tuple[int, ...]) -> bool:
    return not word or output_ids[-len(word) :] == word
