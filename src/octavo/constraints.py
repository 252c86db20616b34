"""What limits the tokens of an answer beside its grammar: values that the front door makes and the
engine applies.

Not here: making them (`octavo.text.answer_form`), the state of an answer (`octavo.text.matcher`).
"""

import msgspec


class Sections(msgspec.Struct, frozen=True, array_like=True):
    """Which parts of an answer its grammar holds; the rest is free text.

    triggers: ids of added tokens; what follows one is a text of the grammar, up to where nothing
    can follow it. repeats: whether free text follows a section, in which others may begin; else
    the answer ends with the first. may_end: whether the answer may end in free text.
    """

    triggers: tuple[int, ...]
    repeats: bool = True
    may_end: bool = True


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """How a model marks its reasoning, so that `thinking_token_budget` can end it.

    begin, end: the markers as token ids, several where a marker is no token of its own; an empty
    `begin`: nothing begins it in the answer. inside: whether the prompt ends in reasoning.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    inside: bool = False
