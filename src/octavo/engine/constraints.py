"""What holds a request's choices to a form: made of what its submission says.

Grammars are compiled, and the tokenizer is read, in a thread (`text.matcher.Grammars`): `may_make`
says whether that is done. The states themselves are in `octavo.text`.
"""

from functools import partial

from octavo.constraints import Thinking
from octavo.core.constraint import Constraint
from octavo.core.submission import Submission
from octavo.errors import EngineError, RequestError
from octavo.text.matcher import Grammars
from octavo.text.sections import SectionMatcher, all_but
from octavo.text.thinking import BudgetedThinking, Marker


def may_make(submission: Submission, grammars: Grammars) -> bool:
    """Whether `constraint_of` need not wait; begins what it would wait for."""
    ready = submission.grammar is None or grammars.compile(submission.grammar).done()
    if (thinking := _budgeted(submission)) is not None and _needs_tokenizer(thinking):
        ready = grammars.tokenizer().done() and ready
    return ready


def constraint_of(
    submission: Submission,
    grammars: Grammars,
    stop_ids: tuple[int, ...],
    outputs: tuple[int, ...] = (),
) -> Constraint | None:
    """The state of a choice after the tokens that it has gained elsewhere; None if it is free.

    stop_ids: those that end its text. Raises RequestError for a grammar that is too large, or
    tokens that do not fit.
    """
    thinking = _budgeted(submission)
    if submission.grammar is None and thinking is None:
        return None
    made = None if submission.grammar is None else _form(submission, grammars, stop_ids)
    if thinking is not None:
        made = _with_budget(submission, thinking, made, grammars)
    assert made is not None
    try:
        for token in outputs:
            made.advance(token)
    except EngineError as error:
        raise RequestError(f"it cannot continue: {error}", "continuation") from error
    return made


def _form(submission: Submission, grammars: Grammars, stop_ids: tuple[int, ...]) -> Constraint:
    assert submission.grammar is not None
    compiled = grammars.compile(submission.grammar).result()
    start = partial(grammars.matcher, compiled, submission.params.stop_token_ids or ())
    where = submission.sections
    if where is None:
        return start()
    outside = None if where.may_end else all_but(stop_ids, grammars.vocab_size)
    return SectionMatcher(where.triggers, start, where.repeats, outside)


def _with_budget(
    submission: Submission, thinking: Thinking, form: Constraint | None, grammars: Grammars
) -> BudgetedThinking:
    budget = submission.params.thinking_token_budget
    assert budget is not None
    spelled = _needs_tokenizer(thinking)
    token_bytes = grammars.tokenizer().result().token_bytes if spelled else None
    begin, end = Marker(thinking.begin, token_bytes), Marker(thinking.end, token_bytes)
    return BudgetedThinking(budget, begin, end, thinking.inside, form, grammars.vocab_size)


def _budgeted(submission: Submission) -> Thinking | None:
    """How the request marks reasoning, if there is a budget for it."""
    return None if submission.params.thinking_token_budget is None else submission.thinking


def _needs_tokenizer(thinking: Thinking) -> bool:
    return len(thinking.begin) > 1 or len(thinking.end) > 1
