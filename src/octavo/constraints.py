"""What limits the tokens of an answer: values that the front door makes and the engine applies.

Not here: making them (`octavo.text.answer_form`), the state of an answer (`octavo.text.matcher`).
"""

import msgspec


class LazyGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A grammar of certain sections, such as tool calls, of a text that is free otherwise.

    trigger_ids: tokens of which each begins a section. grammar: of what follows such a token, to
    the end of the section; then the text is free again. most: sections; the text ends with the last
    one.
    """

    trigger_ids: tuple[int, ...]
    grammar: str
    most: int
